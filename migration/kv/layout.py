"""The copies between KV cache blocks and a staging slot.

Staged bytes keep their order in memory:

    for each layer, by layer number: for each block: its bytes

Copies move whole machine words, whatever the cache's type: no value is converted, and types that torch cannot index
(8-bit floats) need no special case. The staged bytes are the same for both kinds of device; the copies differ. On a
GPU, layers at a constant distance from each other are one tensor [L, B, ...], so that one kernel copies blocks of all
of them. On a CPU, layers are copied one by one, since torch indexes an inner axis element by element there (measured:
300 times slower), in words of 4 bytes, since torch copies 8-byte words at half the speed (measured, torch 2.13).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from migration.kv.layers import as_words, dense, layers_of, runs
from migration.protocol.errors import TransferFailed


class CacheLayout:
    """The KV tensors of all layers; a layer that shares another layer's cache is left out."""

    def __init__(self, caches: Mapping[str, torch.Tensor], num_blocks: int, for_gpu: bool | None = None) -> None:
        """`for_gpu` selects the kind of copies; by default, that of the cache's device.

        Raises:
            TransferFailed: the cache cannot be moved by blocks.
        """
        layers = layers_of(caches, num_blocks)
        devices = {layer.blocks.device for layer in layers}
        if len(devices) != 1:
            raise TransferFailed(f"the KV cache is on {len(devices)} devices")
        self._device = devices.pop()
        self._num_blocks = num_blocks
        self._description = ";".join(layer.describe() for layer in layers)
        on_gpu = self._device.type == "cuda" if for_gpu is None else for_gpu
        words = as_words([dense(layer.blocks) for layer in layers], widest=8 if on_gpu else 4)
        self.block_bytes = sum(layer[0].numel() * layer.element_size() for layer in words)
        self._runs, self._axis = (runs(words), 1) if on_gpu else (words, 0)

    @property
    def device(self) -> torch.device:
        """The cache's device."""
        return self._device

    @property
    def kernels(self) -> int:
        """The number of copy kernels of one gather or scatter."""
        return len(self._runs)

    def describe(self) -> str:
        """The types, shapes and axis orders of all layers, which must be equal in two caches that exchange blocks."""
        return self._description

    def gather(self, blocks: Sequence[int], out: Any) -> None:
        """Copy `blocks` of every layer into `out`: len(blocks) * block_bytes bytes of host or GPU memory.

        Returns when the copy is complete and visible to other processes. On a GPU it is made in the calling thread's
        current stream.

        Raises:
            TransferFailed: a block does not exist, or `out` has another size; nothing was copied.
        """
        index = self._index(blocks)
        for run, staged in self._staged(len(blocks), out):
            if run.device == staged.device:
                torch.index_select(run, self._axis, index, out=staged)
            else:
                staged.copy_(run.index_select(self._axis, index))
        self._settle()

    def scatter(self, blocks: Sequence[int], staged_count: int, skip: int, source: Any) -> None:
        """Copy staged blocks [skip, skip + len(blocks)) of `staged_count` into the cache blocks `blocks`.

        Returns when the staged bytes have been read.

        Raises:
            TransferFailed: a block does not exist, or too few are staged; nothing was copied.
        """
        try:
            self.place(blocks, staged_count, skip, source)
        finally:
            # Also if a copy failed: the caller may free the blocks, and no copy before it may still write to them.
            self._settle()

    def place(self, blocks: Sequence[int], staged_count: int, skip: int, source: Any) -> None:
        """Like `scatter`, but on a GPU the copy is only launched, in the calling thread's current stream."""
        if skip < 0 or skip + len(blocks) > staged_count:
            raise TransferFailed(f"{len(blocks)} blocks after {skip} are more than the {staged_count} staged")
        index = self._index(blocks)
        for run, staged in self._staged(staged_count, source):
            run.index_copy_(self._axis, index, staged.narrow(self._axis, skip, len(blocks)).to(run.device))
        if isinstance(source, torch.Tensor) and source.device.type == "cuda":
            # The allocator of the copier's stream must not give the memory to somebody else before the copy is made.
            source.record_stream(torch.cuda.current_stream(source.device))

    def take(self, source: Any) -> torch.Tensor:
        """A copy of staged bytes in memory of the cache's device, for `place`. Returns when they have been read."""
        taken = _flat(source, self._device).to(self._device, copy=True)
        self._settle()
        return taken

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        """Block ids as a tensor. Checked, since an index out of range inside the worker would end the engine."""
        if not blocks or min(blocks) < 0 or max(blocks) >= self._num_blocks:
            raise TransferFailed(f"no such KV blocks: {blocks[:4]}...")
        return torch.tensor(blocks, dtype=torch.int64, device=self._device)

    def _staged(self, count: int, memory: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each run of layers with its part of the staged bytes, in the run's shape with `count` blocks."""
        if len(memory) != count * self.block_bytes:
            raise TransferFailed(f"{len(memory)} bytes are not {count} blocks of {self.block_bytes}")
        flat = _flat(memory, self._device)
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        offset = 0
        for run in self._runs:
            shape = list(run.shape)
            shape[self._axis] = count
            end = offset + math.prod(shape) * run.element_size()
            parts.append((run, flat[offset:end].view(run.dtype).view(shape)))
            offset = end
        return parts

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _flat(memory: Any, device: torch.device) -> torch.Tensor:
    """Staged bytes as a tensor over the same memory: a memoryview is host memory, a CuPy array GPU memory."""
    if isinstance(memory, torch.Tensor):
        return memory
    if isinstance(memory, memoryview):
        return torch.frombuffer(memory, dtype=torch.uint8)
    # Without `device`, torch asks CUDA for the memory's device, and copies memory of another GPU.
    flat = torch.as_tensor(memory, device=device)
    if flat.data_ptr() != memory.data.ptr:
        raise TransferFailed(f"the staging slot is not in memory that {device} can use")
    return flat
