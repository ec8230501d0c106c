"""A replica's staging slots: equal parts of one segment per worker, leased to one transfer at a time."""

import asyncio
from collections.abc import Callable, Sequence

from migration.kv.staging import HEADER, HostSegment, Staging
from migration.protocol.errors import TransferTimeout
from migration.protocol.ports import Slot
from policies.causes import Cause
from policies.model import Blocks, Bytes


class Slots:
    """`count` slots per worker, of `slot_bytes` payload each.

    A lease is for one slot of each worker, since these hold the shards of the same blocks. `creates` make the workers'
    segments, in the order of their ranks; `DeviceSegment.create` makes one in GPU memory.

    A transfer between nodes needs a slot at both ends, and its sender has one before its receiver. So all sends
    together leave one slot free (of two or more): otherwise two replicas that send to each other could hold all slots,
    and wait for each other.
    """

    def __init__(
        self, count: int, slot_bytes: int, creates: Sequence[Callable[[int], Staging]] = (HostSegment.create,)
    ) -> None:
        self._slot_bytes = slot_bytes
        stride = HEADER + slot_bytes
        self.segments: list[Staging] = []
        """The memory of each worker's slots."""

        try:
            for create in creates:
                self.segments.append(create(count * stride))
        except BaseException:
            self._close_segments()
            raise
        self._slots = tuple(tuple(s.slot(i * stride, stride) for s in self.segments) for i in range(count))
        self._free: asyncio.Queue[tuple[Slot, ...]] = asyncio.Queue()
        self._sends = asyncio.Semaphore(max(1, count - 1))
        for slots in self._slots:
            self._free.put_nowait(slots)

    @property
    def in_use(self) -> int:
        """The number of leased slots of each worker."""
        return len(self._slots) - self._free.qsize()

    def blocks(self, shard_bytes: int) -> Blocks:
        """The number of KV blocks whose shards fit into one slot of each worker."""
        return Blocks(self._slot_bytes // shard_bytes)

    async def lease(self, limit_s: float | None = None, *, to_send: bool = False) -> "Lease":
        """Lease a slot of each worker; waits for free ones. `to_send`: the receiver needs a slot of its own as well.

        Raises:
            TransferTimeout: no slot became free within `limit_s` seconds; None: it waits until it is cancelled.
        """
        try:
            async with asyncio.timeout(limit_s):
                return await (self._lease_to_send() if to_send else self._lease())
        except TimeoutError:
            raise TransferTimeout(f"no staging slot was free within {limit_s} s", Cause.NO_SLOT) from None

    async def _lease(self) -> "Lease":
        return Lease(self, await self._free.get())

    async def _lease_to_send(self) -> "Lease":
        await self._sends.acquire()
        try:
            return Lease(self, await self._free.get(), to_send=True)
        except BaseException:
            self._sends.release()
            raise

    def lease_spare(self) -> "Lease | None":
        """Lease a slot of each worker if more than half of them are free now."""
        return Lease(self, self._free.get_nowait()) if self.in_use < len(self._slots) // 2 else None

    def blocks_received(self, shards: Sequence[Bytes]) -> Blocks:
        """The number of KV blocks that one slot of each worker takes from other workers, with `shards` of a block."""
        return Blocks(max(0, self._part_stride(len(shards)) - HEADER) // max(shards))

    def _part_stride(self, shards: int) -> int:
        """Bytes of each part of a slot, if one slot of each worker takes `shards` shards; several parts are aligned."""
        size, parts = HEADER + self._slot_bytes, -(-shards // len(self.segments))
        return size if parts == 1 else size // parts // HEADER * HEADER

    def _split(self, slots: tuple[Slot, ...], shards: int) -> list[tuple[Staging, Slot]]:
        """Parts of slots for `shards` shards, with their segments; the shards take the ranks in turn."""
        stride, ranks = self._part_stride(shards), len(slots)
        return [
            (segment, segment.slot(slots[shard % ranks].offset + shard // ranks * stride, stride))
            for shard in range(shards)
            for segment in [self.segments[shard % ranks]]
        ]

    def _free_slots(self, slots: tuple[Slot, ...], to_send: bool) -> None:
        """Mark slots as free; their content is void from now on."""
        if to_send:
            self._sends.release()
        for segment, slot in zip(self.segments, slots, strict=True):
            segment.stamp(slot.offset, 0)
        self._free.put_nowait(slots)

    def close(self) -> None:
        """Unmap the segments."""
        for slots in self._slots:
            for slot in slots:
                slot.memory.release()
        self._close_segments()

    def _close_segments(self) -> None:
        for segment in self.segments:
            segment.close()


class Lease:
    """A leased slot of each worker, in the order of their ranks.

    Ending a lease twice is allowed: of several users of the slots, each may end the lease.
    """

    def __init__(self, owner: Slots, slots: tuple[Slot, ...], to_send: bool = False) -> None:
        self.slots = slots
        self._owner: Slots | None = owner
        self._to_send = to_send
        self._parts: list[tuple[Staging, Slot]] = []

    def __enter__(self) -> tuple[Slot, ...]:
        return self.slots

    def __exit__(self, *_: object) -> None:
        self.end()

    def split(self, shards: int) -> list[Slot]:
        """Parts of the slots, one for each of `shards` shards of another replica's workers."""
        assert self._owner is not None, "a lease that has not ended"
        self._parts = self._owner._split(self.slots, shards)
        return [slot for _, slot in self._parts]

    def end(self) -> None:
        """Free the slots."""
        owner, self._owner = self._owner, None
        if owner is not None:
            for segment, part in self._parts:
                segment.stamp(part.offset, 0)
            owner._free_slots(self.slots, self._to_send)

    def end_with(self, task: "asyncio.Task[None]") -> None:
        """`end`, as a task's callback."""
        self.end()
