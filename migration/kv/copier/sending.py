"""The blocks that a copier sends to other copiers of its node, part by part through staging slots.

The receiving copiers read a part where it lies: one, or several of which each takes some heads. So a part of a slot is
written again only once all of them have answered for it, and gathering, scattering and messages of successive parts
overlap.
"""

from dataclasses import dataclass

from migration.kv.copier.wire import SendCall
from migration.kv.staging import HEADER

PARTS = 4
"""The parts of a slot: one is gathered while others are read, or wait to be."""


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks [first, last) of a request, staged at `offset`."""

    first: int
    last: int
    offset: int


def split(slot_blocks: int, block_bytes: int) -> tuple[int, int]:
    """The most parts (at most `PARTS`) of a slot for `slot_blocks` blocks, each with a header, and their blocks."""
    size = HEADER + slot_blocks * block_bytes
    for parts in range(PARTS, 1, -1):
        blocks = (_stride(size, parts) - HEADER) // block_bytes
        if blocks > 0:
            return parts, blocks
    return 1, slot_blocks


def _stride(size: int, parts: int) -> int:
    """Bytes from one part to the next: a multiple of the header's, so that payloads are aligned."""
    return size // parts // HEADER * HEADER


class Sending:
    """The progress of one `SendCall`. Parts are gathered in order, and answered in any order.

    `size` is the number of bytes gathered, headers included.
    """

    def __init__(self, call: SendCall, block_bytes: int) -> None:
        parts, self._blocks = split(call.blocks, block_bytes)
        stride = _stride(HEADER + call.blocks * block_bytes, parts)
        self.call = call
        self.size = 0
        self.offsets = tuple(slot + i * stride for slot in call.offsets for i in range(parts))
        self._free = list(self.offsets)
        self._unanswered = dict.fromkeys(self.offsets, 0)
        """The takers that may read the part at each offset."""
        self._gathered = call.first

    @property
    def ready(self) -> bool:
        """True if a part can be gathered now."""
        return bool(self._free) and self._gathered < self.call.last

    @property
    def done(self) -> bool:
        """True once all parts have been answered."""
        return self._gathered >= self.call.last and len(self._free) == len(self.offsets)

    def take(self) -> Part:
        """The next part to gather."""
        first = self._gathered
        self._gathered = min(first + self._blocks, self.call.last)
        offset = self._free.pop(0)
        self._unanswered[offset] = len(self.call.takers)
        return Part(first, self._gathered, offset)

    def answered(self, part: Part) -> None:
        """One more of the other copiers does not read this part any more."""
        self._unanswered[part.offset] -= 1
        if not self._unanswered[part.offset]:
            self._free.append(part.offset)
