"""Slot transfers through Ray collective groups: one per direction of a pair of workers, replaced after a failure."""

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from ray.util import collective

from migration.concurrency import Tasks, take_failure
from migration.kv.device import DeviceSlot
from migration.kv.staging import HEADER, TICKET
from migration.protocol.errors import TransferFailed, TransferTimeout
from migration.protocol.messages import SlotRef
from migration.protocol.ports import Slot
from policies.model import Bytes, ReplicaId

log = logging.getLogger(__name__)

SENDER, RECEIVER = 0, 1
_DROPPED_KEPT = 256
"""Names of dropped groups that are kept, so that a late transfer does not join one of them again."""


class Turns:
    """Puts the transfers of one end of a group in the order of their numbers."""

    def __init__(self) -> None:
        self._next = 0
        self._closed = False
        self._changed = asyncio.Condition()

    async def wait(self, number: int) -> None:
        """Wait for the turn of transfer `number`. Raises TransferFailed if the group is dropped."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or self._next == number)
        if self._closed:
            raise TransferFailed("the group was dropped after a failure")

    async def passed(self) -> None:
        """Give the turn to the next transfer."""
        async with self._changed:
            self._next += 1
            self._changed.notify_all()

    async def close(self) -> None:
        """Make all waiting and later transfers fail."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()


class SlotMemory(Protocol):
    """A backend's view of the memory of slots."""

    def buffer(self, slot: Slot, size: Bytes) -> Any:
        """The transferred part of a slot's first `size` bytes. Raises TransferFailed if the slot is smaller."""
        ...

    def arrived(self, slot: Slot, staged: SlotRef) -> None:
        """Finish a receive: `slot` now holds the payload that the peer staged as `staged`."""
        ...


class HostMemory:
    """Slots in host memory, transferred with their header."""

    def buffer(self, slot: Slot, size: Bytes) -> torch.Tensor:
        """See `SlotMemory.buffer`."""
        if size > len(slot.memory):
            raise TransferFailed(f"no staging slot holds {size} bytes")
        return torch.frombuffer(slot.memory, dtype=torch.uint8)[:size]

    def arrived(self, slot: Slot, staged: SlotRef) -> None:
        """See `SlotMemory.arrived`."""


class DeviceMemory:
    """Slots in GPU memory, transferred without their header, which is in host memory: the receiver writes its own."""

    def buffer(self, slot: Slot, size: Bytes) -> Any:
        """See `SlotMemory.buffer`."""
        if not isinstance(slot, DeviceSlot):
            raise TransferFailed("the staging slots are not in GPU memory")
        if size - HEADER > len(slot.payload):
            raise TransferFailed(f"no staging slot holds {size} bytes")
        return slot.payload[: size - HEADER]

    def arrived(self, slot: Slot, staged: SlotRef) -> None:
        """See `SlotMemory.arrived`."""
        TICKET.pack_into(slot.memory, 0, staged.ticket)


class CollectiveGroups:
    """A transport through `ray.util.collective`, with a registered backend.

    A group's name is the pair of replicas, the rank of their workers, and a number that rises with every failure.
    Replica ids are never reused, so a late transfer of a dropped group cannot join a new one. A channel is a group and
    the number of one transfer through it ("a>b/0#1:17"). Both ends make transfers in this order, so the receive of a
    chunk may start while the chunk before it is still in transfer.
    Each transfer blocks a thread of the transport's own pool, so that a silent peer stalls nothing else.
    Groups with a replica that has ended are left (`leave`): each has sockets and threads, or a communicator.
    """

    direct = shares_slots = False

    def __init__(self, backend: str, timeout_s: float, threads: int, memory: SlotMemory | None = None) -> None:
        self.name = backend.lower()
        self._backend = backend
        self._memory = memory or HostMemory()
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kv-transfer")
        self._numbers = itertools.count(1)
        self._groups: dict[str, str] = {}
        self._transfers: dict[str, int] = {}
        self._turns: dict[str, Turns] = {}
        self._dropped: deque[str] = deque(maxlen=_DROPPED_KEPT)
        self._closing = Tasks()

    def channel(self, source: ReplicaId, target: ReplicaId, rank: int) -> str:
        """See `Transport.channel`."""
        pair = f"{source}>{target}/{rank}"
        if pair not in self._groups:
            self._groups[pair] = f"{pair}#{next(self._numbers)}"
        group = self._groups[pair]
        number = self._transfers.get(group, 0)
        self._transfers[group] = number + 1
        return f"{group}:{number}"

    async def send(self, channel: str, slot: Slot, size: Bytes) -> None:
        """See `Transport.send`."""
        group, buffer = _group(channel), self._memory.buffer(slot, size)
        await self._pass(channel, SENDER, lambda: collective.send(buffer, RECEIVER, group))

    async def receive(self, channel: str, staged: SlotRef, size: Bytes, slot: Slot | None) -> SlotRef:
        """See `Transport.receive`."""
        if slot is None:
            raise TransferFailed("there is no staging slot to receive into")
        group, buffer = _group(channel), self._memory.buffer(slot, size)
        await self._pass(channel, RECEIVER, lambda: collective.recv(buffer, SENDER, group))
        self._memory.arrived(slot, staged)
        return SlotRef(slot.segment, slot.offset, staged.ticket)

    def leave(self, replica: ReplicaId) -> None:
        """See `PeerGroups.leave`."""
        self._leave_all([group for group in {*self._turns, *self._groups.values()} if replica in _ends(group)])

    def close(self) -> None:
        """See `Transport.close`."""
        try:
            self._leave_all(list(self._turns))
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def drop(self, channel: str) -> None:
        """See `Transport.drop`."""
        self._leave(_group(channel))

    async def _pass(self, channel: str, rank: int, blocking: Callable[[], None]) -> None:
        """Make one transfer in its turn. A failure drops the group."""
        turns = self._join(_group(channel), rank)
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await turns.wait(int(channel.rsplit(":", 1)[1]))
            except TimeoutError:
                raise TransferTimeout(f"{channel}: the transfers before it did not end in time") from None
            await self._transfer(channel, blocking)
        except BaseException:
            self.drop(channel)
            raise
        await turns.passed()

    def _join(self, group: str, rank: int) -> Turns:
        if group in self._dropped:
            raise TransferFailed(f"{group} was dropped after a failure")
        if group not in self._turns:
            pair = group.rsplit("#", 1)[0]
            if rank == RECEIVER:
                # The sender has replaced its group, so this end of the old one is useless.
                for old in [g for g in self._turns if g.startswith(f"{pair}#")]:
                    self._leave(old)
            collective.init_collective_group(2, rank, self._backend, group)
            self._turns[group] = Turns()
        return self._turns[group]

    def _leave_all(self, groups: Sequence[str]) -> None:
        """Leave groups, also those behind one that cannot be left."""
        with contextlib.ExitStack() as leaving:
            for group in groups:
                leaving.callback(self._leave, group)

    def _leave(self, group: str) -> None:
        pair = group.rsplit("#", 1)[0]
        if self._groups.get(pair) == group:
            del self._groups[pair]
        self._transfers.pop(group, None)
        self._dropped.append(group)
        turns = self._turns.pop(group, None)
        if turns is not None:
            self._closing.start(turns.close())
            collective.destroy_collective_group(group)

    async def _transfer(self, channel: str, blocking: Callable[[], None]) -> None:
        """Run a blocking transfer in the pool. A cancelled call still waits for its end: it uses a slot's memory."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, blocking)
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError:
            self.drop(channel)
            await asyncio.wait({future})
            take_failure(future)
            raise
        except TimeoutError as error:
            raise TransferTimeout(f"{self.name} {channel}: {error}") from error
        except Exception as error:
            raise TransferFailed(f"{self.name} {channel}: {error}") from error


def _group(channel: str) -> str:
    return channel.rsplit(":", 1)[0]


def _ends(group: str) -> list[str]:
    """The source and the target of a group."""
    return group.rsplit("/", 1)[0].split(">")
