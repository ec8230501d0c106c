"""A replica's staging slots: a segment cut into equal parts, lent one at a time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from migration.errors import TransferFailed, TransferTimeout
from migration.kv.staging import HEADER, Segment
from migration.ports import Slot


class Slots:
    """`count` slots of `slot_bytes` payload each, in one segment. Lending waits until a slot is free."""

    def __init__(self, count: int, slot_bytes: int) -> None:
        stride = HEADER + slot_bytes
        self._segment = Segment.create(count * stride)
        self._slots = tuple(
            Slot(self._segment.path, i * stride, self._segment.view(i * stride, stride)) for i in range(count)
        )
        self._free: asyncio.Queue[Slot] = asyncio.Queue()
        for slot in self._slots:
            self._free.put_nowait(slot)

    @property
    def in_use(self) -> int:
        """Slots that are lent now."""
        return len(self._slots) - self._free.qsize()

    async def take(self, limit_s: float) -> Slot:
        """Borrow a slot until `give`.

        Raises:
            TransferTimeout: none became free within `limit_s` seconds.
        """
        try:
            async with asyncio.timeout(limit_s):
                return await self._free.get()
        except TimeoutError:
            raise TransferTimeout(f"no staging slot was free within {limit_s} s") from None

    def give(self, slot: Slot) -> None:
        """Return a slot; its old content is void from now on."""
        if slot not in self._slots:
            raise TransferFailed("the slot belongs to another pool")
        self._segment.stamp(slot.offset, 0)
        self._free.put_nowait(slot)

    @asynccontextmanager
    async def lend(self, limit_s: float) -> AsyncIterator[Slot]:
        """`take` and `give` as a context."""
        slot = await self.take(limit_s)
        try:
            yield slot
        finally:
            self.give(slot)

    def close(self) -> None:
        """Unmap the segment."""
        for slot in self._slots:
            slot.memory.release()
        self._segment.close()
