"""Random LoRA adapters of the tiny model, with PEFT's files and names."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from app.tinymodel import ensure_tiny_model

ADAPTERS = ("left", "right")
"""The adapters that integration tests serve."""
RANK = 8
TARGETS = ("q_proj", "v_proj")
_STD = 0.12
"""The standard deviation of the weights: the product of both factors changes every greedy answer within few tokens."""


def make_adapter(folder: Path, seed: int, rank: int = RANK) -> Path:
    """Write an adapter of the tiny model's attention, of random weights, into a new folder."""
    config = AutoConfig.from_pretrained(ensure_tiny_model())
    head = config.hidden_size // config.num_attention_heads
    outputs = dict(zip(TARGETS, (config.hidden_size, config.num_key_value_heads * head), strict=True))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config.num_hidden_layers):
        for module, size in outputs.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(rank, config.hidden_size, generator=generator) * _STD
            weights[f"{name}.lora_B.weight"] = torch.randn(size, rank, generator=generator) * _STD
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(outputs)}
    (folder / "adapter_config.json").write_text(json.dumps({**described, "bias": "none", "task_type": "CAUSAL_LM"}))
    return folder
