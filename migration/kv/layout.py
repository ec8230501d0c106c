"""The copies between KV cache blocks and a staging slot.

A staged block keeps its bytes in memory order:

    for each layer, in the order of their numbers: for each block: its bytes

Copies move whole machine words, whatever the cache's type: nothing is converted, and types by which torch cannot
index (8-bit floats) are no exception. What is best for the two kinds of device differs, what is staged does not:
GPUs get layers that lie at a constant distance from each other as one tensor [L, B, ...], so that one kernel copies
blocks of all of them; CPUs get them one by one, since there torch indexes an inner axis element by element (measured:
300 times slower), and words of 4 bytes, since it copies 8-byte ones at half the speed (measured, torch 2.13).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from migration.errors import TransferFailed
from migration.kv.layers import as_words, dense, layers_of, runs


class CacheLayout:
    """The KV tensors of all layers. Layers that share another one's cache count once."""

    def __init__(self, caches: Mapping[str, torch.Tensor], num_blocks: int, for_gpu: bool | None = None) -> None:
        """`for_gpu` says for which kind of device to copy; by default the one that the cache is on.

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
        """Where the cache is."""
        return self._device

    @property
    def kernels(self) -> int:
        """Copy kernels that one gather or scatter takes."""
        return len(self._runs)

    def describe(self) -> str:
        """What two caches must agree on for their blocks to be exchanged."""
        return self._description

    def gather(self, blocks: Sequence[int], out: Any) -> None:
        """Copy `blocks` of every layer into `out`: len(blocks) * block_bytes bytes of host or GPU memory.

        Returns once they are there, for other processes too: on a GPU it waits for the stream that vLLM computes
        on, hence for the step in flight, which may still be writing to these blocks.

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

        Returns once the staged bytes have been read.

        Raises:
            TransferFailed: a block does not exist, or fewer are staged; nothing was copied.
        """
        if skip < 0 or skip + len(blocks) > staged_count:
            raise TransferFailed(f"{len(blocks)} blocks after {skip} are more than the {staged_count} staged")
        index = self._index(blocks)
        for run, staged in self._staged(staged_count, source):
            run.index_copy_(self._axis, index, staged.narrow(self._axis, skip, len(blocks)).to(run.device))
        self._settle()

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        """Block ids as a tensor, checked here: an index out of range inside the worker kills the engine."""
        if not blocks or min(blocks) < 0 or max(blocks) >= self._num_blocks:
            raise TransferFailed(f"no such KV blocks: {blocks[:4]}...")
        return torch.tensor(blocks, dtype=torch.int64, device=self._device)

    def _staged(self, count: int, memory: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each run of layers with its part of the staged bytes, shaped like it with `count` blocks."""
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
    """Staged bytes as a tensor over the same memory: a memoryview is the host's, a CuPy array the GPU's."""
    if isinstance(memory, memoryview):
        return torch.frombuffer(memory, dtype=torch.uint8)
    # Given no device, torch asks CUDA where the memory lies, and copies what it finds on another GPU.
    flat = torch.as_tensor(memory, device=device)
    if flat.data_ptr() != memory.data.ptr:
        raise TransferFailed(f"the staging slot is not in memory that {device} can use")
    return flat
