"""A replica's staging slots: the equal parts of one segment, each leased to one transfer at a time."""

import asyncio
from collections.abc import Callable

from migration.kv.staging import HEADER, HostSegment, Staging
from migration.protocol.errors import TransferTimeout
from migration.protocol.ports import Slot
from policies.causes import Cause


class Slots:
    """`count` slots of `slot_bytes` payload each, in one segment.

    `create` makes the segment; `DeviceSegment.create` makes one in GPU memory.
    """

    def __init__(self, count: int, slot_bytes: int, create: Callable[[int], Staging] = HostSegment.create) -> None:
        stride = HEADER + slot_bytes
        self._segment = create(count * stride)
        self._slots = tuple(self._segment.slot(i * stride, stride) for i in range(count))
        self._free: asyncio.Queue[Slot] = asyncio.Queue()
        for slot in self._slots:
            self._free.put_nowait(slot)

    @property
    def in_use(self) -> int:
        """The number of leased slots."""
        return len(self._slots) - self._free.qsize()

    async def lease(self, limit_s: float) -> "Lease":
        """Lease a slot; waits for a free one.

        Raises:
            TransferTimeout: no slot became free within `limit_s` seconds.
        """
        try:
            async with asyncio.timeout(limit_s):
                return Lease(self, await self._free.get())
        except TimeoutError:
            raise TransferTimeout(f"no staging slot was free within {limit_s} s", Cause.NO_SLOT) from None

    def _free_slot(self, slot: Slot) -> None:
        """Mark a slot as free; its content is void from now on."""
        self._segment.stamp(slot.offset, 0)
        self._free.put_nowait(slot)

    def close(self) -> None:
        """Unmap the segment."""
        for slot in self._slots:
            slot.memory.release()
        self._segment.close()


class Lease:
    """A leased slot. Ending a lease twice is allowed: of several users of the slot, each may end the lease."""

    def __init__(self, slots: Slots, slot: Slot) -> None:
        self.slot = slot
        self._slots: Slots | None = slots

    def __enter__(self) -> Slot:
        return self.slot

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Free the slot."""
        slots, self._slots = self._slots, None
        if slots is not None:
            slots._free_slot(self.slot)

    def end_with(self, task: "asyncio.Task[None]") -> None:
        """`end`, as a task's callback."""
        self.end()
