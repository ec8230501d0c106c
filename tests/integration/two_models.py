"""Two models whose vocabularies have nothing in common but single bytes: an answer shows which one it is from."""

import json
import re
from pathlib import Path

from app.tinymodel import ensure_generated, ensure_tiny_model

_WORD = re.compile(r"( )w(\d+)$")
_SEED = 7


def ensure_other_model() -> Path:
    """The folder of a model like the tiny one, with other weights, and ` z1` in the place of the token ` w1`."""
    return ensure_generated("tiny-other-v1", _make)


def is_of_tiny(text: str) -> bool:
    """True for a text with words of the tiny model, and none of the other one."""
    return bool(re.search(r" w\d", text)) and not re.search(r" z\d", text)


def is_of_other(text: str) -> bool:
    """True for a text with words of the other model, and none of the tiny one."""
    return bool(re.search(r" z\d", text)) and not re.search(r" w\d", text)


def _make(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny = ensure_tiny_model()
    for name in [path.name for path in tiny.iterdir() if path.suffix in (".json", ".jinja")]:
        text = (tiny / name).read_text()
        (folder / name).write_text(_renamed(text) if name.startswith("tokenizer") else text)
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(tiny))
    model.eval().to(torch.float32).save_pretrained(folder)


def _renamed(text: str) -> str:
    """A file of the tokenizer with the other words."""
    document = json.loads(text)
    for token in document.get("added_tokens", []):
        token["content"] = _WORD.sub(r"\1z\2", token["content"])
    for token in document.get("added_tokens_decoder", {}).values():
        token["content"] = _WORD.sub(r"\1z\2", token["content"])
    return json.dumps(document)
