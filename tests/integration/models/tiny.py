"""Tiny models with the caches that Mell's own tiny model does not have, and random weights, by their names.

Each is made on first use, like `app.tinymodel`, and has that model's tokenizer. Their greedy output is diverse: the
weights have a large standard deviation, and the output layer is not that of the input.
"""

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from app.tinymodel import CONTEXT, VERSION, VOCAB_SIZE, ensure_generated, ensure_tiny_model

_SEED = 20240607
WINDOW = 64
"""The sliding windows, in tokens: two blocks."""

_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.12,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}

_OWN: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "sliding": ("Mistral", {"num_key_value_heads": 2, "sliding_window": WINDOW}),
    "mixed": ("Olmo3", {"num_key_value_heads": 2, "sliding_window": WINDOW}),
    "experts": ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
"""The architecture of each model, and the members of its configuration beside the common ones."""


def ensure_model(name: str) -> Path:
    """The folder of a model, made by the first call in a few seconds."""
    make = _make_eagle if name == "eagle" else partial(_make, *_OWN[name])
    return ensure_generated(f"tiny-{name}-v{VERSION}", make)


def _make(kind: str, own: Mapping[str, Any], folder: Path) -> None:
    import torch
    import transformers

    for file in ensure_tiny_model().iterdir():
        if "token" in file.name or "template" in file.name:
            shutil.copy(file, folder)
    config = getattr(transformers, f"{kind}Config")(**{**_COMMON, **own})
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.eval().to(torch.float32).save_pretrained(folder)


def _make_eagle(folder: Path) -> None:
    """An EAGLE head for Mell's tiny model: one layer, which reads the model's last hidden state beside each token."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**_COMMON, "num_hidden_layers": 1, "num_key_value_heads": 2})
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        layer = LlamaForCausalLM(config).model.layers[0].state_dict(prefix="layers.0.")
        joined = 0.12 * torch.randn(config.hidden_size, 2 * config.hidden_size)
    weights = {name: weight for name, weight in layer.items() if "input_layernorm" not in name}
    save_file({**weights, "fc.weight": joined}, folder / "model.safetensors")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
