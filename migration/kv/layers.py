"""The memory layout of a model's KV cache.

vLLM hands a connector one tensor per layer, a view [B, H, N, C] (blocks, heads, tokens, K beside V) of one allocation
for all layers; the attention backend decides which axis is outermost in memory (vllm/v1/kv_cache_layout.py,
KVCacheLayout; vllm/v1/worker/utils.py, allocate_kv_cache; vllm/v1/kv_cache_interface.py, create_kv_cache_views).
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from migration.protocol.errors import TransferFailed

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class Layer(NamedTuple):
    """One layer's cache as [B, ...], its other axes in memory order; `order` gives their positions in vLLM's view.

    `head_axis` is the axis of `blocks` that counts KV heads; None if none does, or if single heads are not contiguous.
    """

    blocks: torch.Tensor
    order: tuple[int, ...]
    head_axis: int | None = None

    @property
    def heads(self) -> int:
        """The number of KV heads; 0 if it is not known."""
        return 0 if self.head_axis is None else self.blocks.shape[self.head_axis]

    def describe(self) -> str:
        """The layer's type, shape and axis order."""
        return f"{self.blocks.dtype}{tuple(self.blocks.shape[1:])}@{self.order}"

    def describe_head(self) -> str:
        """The shape and axis order of one head."""
        assert self.head_axis is not None
        shape, order = list(self.blocks.shape[1:]), list(self.order)
        del shape[self.head_axis - 1], order[self.head_axis - 1]
        return f"{tuple(shape)}@{tuple(order)}"


def layers_of(caches: Mapping[str, torch.Tensor], num_blocks: int) -> list[Layer]:
    """The layers of a cache by layer number, without those that share another layer's memory (shared_kv_cache_layers).

    Raises:
        TransferFailed: a layer is no tensor, or none of its axes counts blocks.
    """
    first: dict[tuple[object, ...], Layer] = {}
    for name in sorted(caches, key=_by_number):
        layer = _layer(name, caches[name], num_blocks)
        first.setdefault((layer.blocks.data_ptr(), layer.blocks.shape, layer.blocks.stride()), layer)
    return list(first.values())


def _by_number(name: str) -> list[str | int]:
    """A sort key that puts "layers.2" before "layers.10", the order in which vLLM allocates them."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _layer(name: str, cache: torch.Tensor, num_blocks: int) -> Layer:
    if not isinstance(cache, torch.Tensor):
        raise TransferFailed(f"KV cache of {name}: {type(cache).__name__} is not a tensor")
    dim = _block_dim(name, cache, num_blocks)
    if cache.shape[dim] != num_blocks:
        # Kernel blocks: vLLM's view splits a block into several adjacent ones (create_kv_cache_views).
        cache = cache.unflatten(0, (num_blocks, -1))
    others = sorted((d for d in range(cache.dim()) if d != dim), key=cache.stride, reverse=True)
    return Layer(cache.permute(dim, *others), tuple(others), _head_axis(cache, dim, others))


def _head_axis(cache: torch.Tensor, block_dim: int, others: Sequence[int]) -> int | None:
    """The axis that counts heads once blocks come first: those of vLLM's view [B, H, N, C], or [B, K, H, N, C]."""
    heads = cache.dim() - 3
    if block_dim != 0 or heads < 1 or others[-1] == heads:
        return None
    return 1 + others.index(heads)


def _block_dim(name: str, cache: torch.Tensor, num_blocks: int) -> int:
    """The axis that counts blocks: the first, or the second where a backend of an older vLLM has K and V before it."""
    for dim in (0, 1):
        if cache.dim() > dim and cache.shape[dim] == num_blocks:
            return dim
    if cache.dim() == 4 and cache.shape[0] and cache.shape[0] % num_blocks == 0:
        return 0
    raise TransferFailed(f"KV cache of {name}: no dimension of {tuple(cache.shape)} counts {num_blocks} blocks")


def dense(blocks: torch.Tensor) -> torch.Tensor:
    """The same bytes with as few axes as possible: contiguously nested axes are merged into one."""
    axes: list[tuple[int, int]] = []
    for size, stride in zip(blocks.shape[1:], blocks.stride()[1:], strict=True):
        if axes and axes[-1][1] == size * stride:
            axes[-1] = (axes[-1][0] * size, stride)
        elif size > 1:
            axes.append((size, stride))
    sizes, strides = zip((blocks.shape[0], blocks.stride(0)), *axes, strict=True)
    return blocks.as_strided(sizes, strides)


def as_words(layers: Sequence[torch.Tensor], widest: int) -> list[torch.Tensor]:
    """All layers viewed as integers of the largest size, at most `widest` bytes, to which every layer is aligned.

    Raises:
        TransferFailed: torch cannot view some layer with this integer type.
    """
    word = _WORDS[min(_word_bytes(layer, widest) for layer in layers)]
    try:
        return [layer.view(word) for layer in layers]
    except RuntimeError as error:
        raise TransferFailed(f"the KV cache's layers differ too much to be staged together: {error}") from error


def _word_bytes(layer: torch.Tensor, widest: int) -> int:
    size: int = layer.element_size()
    if layer.stride(-1) != 1:
        return size
    distances = (layer.shape[-1], layer.storage_offset(), *layer.stride()[:-1])
    return math.gcd(widest, *(distance * size for distance in distances))


def runs(layers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Layers of one shape at a constant distance in one allocation, stacked as [L, B, ...]."""
    found: list[list[torch.Tensor]] = []
    for layer in layers:
        if found and _continues(found[-1], layer):
            found[-1].append(layer)
        else:
            found.append([layer])
    return [_stacked(run) for run in found]


class Stack(NamedTuple):
    """Layers that one operation copies: along `axis`, block `b` of layer `l` is at index `bases[l] + b * stride`.

    A stack without `bases` has all layers at index `b`.
    """

    tensor: torch.Tensor
    axis: int
    bases: torch.Tensor | None = None
    stride: int = 1

    @property
    def layers(self) -> int:
        """The number of layers."""
        if self.bases is not None:
            return len(self.bases)
        return self.tensor.shape[0] if self.axis else 1

    def places(self, blocks: torch.Tensor) -> torch.Tensor:
        """The indexes of `blocks`, layer by layer."""
        return blocks if self.bases is None else torch.add(self.bases, blocks, alpha=self.stride).view(-1)

    def staged_shape(self, count: int) -> list[int]:
        """The shape of `count` staged blocks of these layers."""
        shape = list(self.tensor.shape)
        shape[self.axis] = count if self.bases is None else count * len(self.bases)
        return shape


def stack_rows(run: torch.Tensor) -> list[Stack]:
    """The layers of a run [L, B, ...] as one stack of rows, each of them a block of a layer, or as a stack per layer.

    The latter if a block is not contiguous, or if rows at equal distances would overlap.
    """
    step, stride = run.stride()[:2]
    unit = math.gcd(step, stride) or stride
    if run.dim() != 3 or run.stride(2) != 1 or unit < run.shape[2]:
        return [Stack(layer, 0) for layer in run]
    layers, blocks, words = run.shape
    count = ((layers - 1) * step + (blocks - 1) * stride) // unit + 1
    bases = torch.arange(layers, device=run.device)[:, None] * (step // unit)
    return [Stack(run.as_strided((count, words), (unit, 1)), 0, bases, stride // unit)]


def _continues(run: Sequence[torch.Tensor], layer: torch.Tensor) -> bool:
    last = run[-1]
    alike = (last.shape, last.stride()) == (layer.shape, layer.stride())
    if not alike or last.untyped_storage().data_ptr() != layer.untyped_storage().data_ptr():
        return False
    step = layer.storage_offset() - last.storage_offset()
    return step > 0 and (len(run) == 1 or step == last.storage_offset() - run[-2].storage_offset())


def _stacked(run: Sequence[torch.Tensor]) -> torch.Tensor:
    first = run[0]
    step = run[1].storage_offset() - first.storage_offset() if len(run) > 1 else 0
    return first.as_strided((len(run), *first.shape), (step, *first.stride()))
