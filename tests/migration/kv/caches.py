"""KV caches as vLLM allocates them: one buffer for all layers, seen through a view [B, H, N, C] per layer."""

import math

import torch

LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""vLLM's KVCacheLayout: the logical axes L, B, H, N and C in the order of memory."""


def paged(
    layout: str,
    blocks: int,
    layers: int = 12,
    heads: int = 2,
    tokens: int = 4,
    content: int = 6,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    seed: int | None = None,
) -> dict[str, torch.Tensor]:
    """A cache of that layout, filled at random, or with zeros."""
    order, shape = LAYOUTS[layout], (layers, blocks, heads, tokens, content)
    size = math.prod(shape) * dtype.itemsize
    if seed is None:
        data = torch.zeros(size, dtype=torch.int8, device=device)
    else:
        generator = torch.Generator(device).manual_seed(seed)
        data = torch.randint(-128, 128, (size,), dtype=torch.int8, device=device, generator=generator)
    physical = data.view(dtype).view([shape[axis] for axis in order])
    logical = physical.permute([order.index(axis) for axis in range(5)])
    return {f"model.layers.{i}.self_attn.attn": logical[i] for i in range(layers)}
