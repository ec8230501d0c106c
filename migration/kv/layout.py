"""How a model's KV cache lies in memory, and the copies between cache blocks and a staging slot."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from migration.errors import TransferFailed


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's KV tensor and the dimension that counts blocks."""

    tensor: torch.Tensor
    block_dim: int

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of one block: the tensor's, without the block dimension."""
        return tuple(size for dim, size in enumerate(self.tensor.shape) if dim != self.block_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this layer."""
        return int(self.tensor.element_size() * math.prod(self.block_shape))


class CacheLayout:
    """The KV tensors of all layers, in a fixed order."""

    def __init__(self, caches: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        self._layers = tuple(Layer(caches[name], _block_dim(name, caches[name], num_blocks)) for name in sorted(caches))
        self._num_blocks = num_blocks
        self.block_bytes = sum(layer.block_bytes for layer in self._layers)

    def describe(self) -> str:
        """What two caches must agree on for their blocks to be exchanged."""
        return ";".join(f"{layer.tensor.dtype}:{layer.block_dim}:{layer.block_shape}" for layer in self._layers)

    def gather(self, blocks: Sequence[int], out: memoryview) -> None:
        """Copy `blocks` of every layer into `out`, which holds len(blocks) * block_bytes bytes.

        Raises:
            TransferFailed: a block does not exist.
        """
        index = self._index(blocks)
        for layer, staged in self._staged(len(blocks), out):
            if layer.tensor.device == staged.device:
                torch.index_select(layer.tensor, layer.block_dim, index, out=staged)
            else:
                staged.copy_(layer.tensor.index_select(layer.block_dim, index.to(layer.tensor.device)))

    def scatter(self, blocks: Sequence[int], staged_count: int, skip: int, source: memoryview) -> None:
        """Copy staged blocks [skip, skip + len(blocks)) of `staged_count` into the cache blocks `blocks`.

        Raises:
            TransferFailed: a block does not exist, or fewer are staged.
        """
        if skip < 0 or skip + len(blocks) > staged_count:
            raise TransferFailed(f"{len(blocks)} blocks after {skip} are more than the {staged_count} staged")
        index = self._index(blocks)
        for layer, staged in self._staged(staged_count, source):
            part = staged.narrow(layer.block_dim, skip, len(blocks)).to(layer.tensor.device)
            layer.tensor.index_copy_(layer.block_dim, index.to(layer.tensor.device), part)

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        """Block ids as a tensor, checked here: an index out of range inside the worker kills the engine."""
        if not blocks or min(blocks) < 0 or max(blocks) >= self._num_blocks:
            raise TransferFailed(f"no such KV blocks: {blocks[:4]}...")
        return torch.tensor(blocks, dtype=torch.int64)

    def _staged(self, count: int, memory: memoryview) -> list[tuple[Layer, torch.Tensor]]:
        """Each layer with its part of the staged bytes, shaped like the tensor with `count` blocks."""
        if len(memory) != count * self.block_bytes:
            raise TransferFailed(f"{len(memory)} bytes are not {count} blocks of {self.block_bytes}")
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        parts: list[tuple[Layer, torch.Tensor]] = []
        offset = 0
        for layer in self._layers:
            size = count * layer.block_bytes
            shape = list(layer.block_shape)
            shape.insert(layer.block_dim, count)
            parts.append((layer, flat[offset : offset + size].view(layer.tensor.dtype).view(shape)))
            offset += size
        return parts


def _block_dim(name: str, tensor: torch.Tensor, num_blocks: int) -> int:
    """The dimension of a KV tensor that counts blocks (0 on CPU; some GPU back ends put K and V first)."""
    for dim in (0, 1):
        if tensor.dim() > dim and tensor.shape[dim] == num_blocks:
            return dim
    raise TransferFailed(f"KV cache of {name}: no dimension of {tuple(tensor.shape)} counts {num_blocks} blocks")
