"""Copies of KV cache blocks in memory of the host, in numbered slots.

A slot is sealed with the name of its block and a checksum of its bytes. A block is loaded from a slot only if the seal
is that of the block which the caller expects, and matches the bytes that are copied: a wrong block would be read by all
later requests with the same prefix.

All copies go over a staging buffer: the checked bytes are the copied ones, and each direction is one operation over all
layers of a cache (`layout`).
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from migration.kv.layout import CacheLayout

_PARTS = 16
"""The number of parts of a page with a sum of their own."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd word with ones and zeros in all its parts."""
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class HostBlocks:
    """Memory for `slots` blocks of a cache, on the host. Pages that were never written take no memory."""

    def __init__(self, layers: Sequence[torch.Tensor], slots: int) -> None:
        """`layers` are the cache's, each [blocks, bytes] of 8-bit integers."""
        self.slots = slots
        self._pages: list[int] = [layer.shape[1] for layer in layers]
        self._cache = _layout(layers, layers[0].shape[0])
        memory = torch.empty(slots * sum(self._pages), dtype=torch.int8)
        parts = memory.split([slots * page for page in self._pages])
        self._host = _layout([part.view(slots, -1) for part in parts], slots)
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._names: list[bytes | None] = [None] * slots
        self._sums = np.zeros(slots, np.int64)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        return sum(self._pages)

    def store(self, blocks: Sequence[int], slots: Sequence[int], names: Sequence[bytes]) -> None:
        """Copy cache blocks into slots and seal these. If it raises, none of the slots is sealed."""
        for slot in slots:
            self._names[slot] = None
        staged = self._staged(len(blocks))
        self._cache.gather(blocks, staged)
        self._host.scatter(slots, len(slots), 0, staged)
        self._sums[slots] = self._checksums(staged, len(slots))
        for slot, name in zip(slots, names, strict=True):
            self._names[slot] = name

    def load(self, slots: Sequence[int], names: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Copy slots into cache blocks, up to the first slot whose seal does not match; the number of copied blocks."""
        staged = self._staged(len(slots))
        self._host.gather(slots, staged)
        matches = self._checksums(staged, len(slots)) == self._sums[slots]
        sound = 0
        for slot, name, match in zip(slots, names, matches, strict=True):
            if self._names[slot] != name or not match:
                break
            sound += 1
        if sound:
            self._cache.scatter(blocks[:sound], len(slots), 0, staged)
        return sound

    def _staged(self, count: int) -> torch.Tensor:
        """Room for `count` blocks, the same for every copy: fresh memory costs more than the copy."""
        size = count * self.block_bytes
        if len(self._staging) < size:
            self._staging = torch.empty(size, dtype=torch.uint8)
        return self._staging[:size]

    def _checksums(self, staged: torch.Tensor, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """A checksum for each of `count` staged blocks, which lie layer by layer.

        A sum for each part of a page at the speed of memory, weighted by the part's place: a block does not match if a
        byte of it has changed, or if parts or layers of it have changed places.
        """
        total, offset, weight = torch.zeros(count, dtype=torch.int64), 0, 1
        for layers, page in _equal(self._pages):
            parts = math.gcd(_PARTS, page)
            size = layers * count * page
            words = staged[offset : offset + size].view(_WORDS[math.gcd(8, page // parts, offset)])
            sums = words.view(layers, count, parts, -1).sum(-1, dtype=torch.int64)
            weights = (torch.arange(layers * parts, dtype=torch.int64) * 2 + weight) * _ODD
            total += (sums * weights.view(layers, 1, parts)).sum((0, 2))
            offset, weight = offset + size, weight + 2 * layers * parts
        found: np.ndarray[tuple[int], np.dtype[np.int64]] = total.numpy()
        return found


def _layout(layers: Sequence[torch.Tensor], blocks: int) -> CacheLayout:
    return CacheLayout({str(index): layer for index, layer in enumerate(layers)}, blocks)


def _equal(pages: Sequence[int]) -> list[tuple[int, int]]:
    """The pages' sizes, each with the number of layers in a row that have it."""
    found: list[tuple[int, int]] = []
    for page in pages:
        if found and found[-1][1] == page:
            found[-1] = (found[-1][0] + 1, page)
        else:
            found.append((1, page))
    return found
