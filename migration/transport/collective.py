"""Staged blocks through Ray collective groups: one group per direction of a pair, renewed after any failure."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager

import torch
from ray.util import collective

from migration.errors import TransferFailed, TransferTimeout
from migration.messages import SlotRef
from migration.ports import Slot
from policies.model import Bytes, ReplicaId

log = logging.getLogger(__name__)

SENDER, RECEIVER = 0, 1


class CollectiveGroups:
    """Sends through `ray.util.collective` with the given registered backend.

    A group's name holds the pair and a number that rises with every failure and differs between processes of
    a replica's life, so that no group is ever joined by the remains of an earlier one.
    Transfers block a thread each; they have their own pool, so that a silent peer stalls nothing else.
    """

    shares_slots = False

    def __init__(self, backend: str, threads: int = 8) -> None:
        self.name = backend.lower()
        self._backend = backend
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kv-transfer")
        self._numbers = itertools.count(1)
        self._channels: dict[str, str] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._joined: set[str] = set()

    def channel(self, source: ReplicaId, target: ReplicaId) -> str:
        """See `Transport.channel`."""
        pair = f"{source}>{target}"
        if pair not in self._channels:
            self._channels[pair] = f"{pair}#{next(self._numbers)}"
        return self._channels[pair]

    def turn(self, channel: str) -> AbstractAsyncContextManager[object]:
        """See `Transport.turn`: a send ends once the peer has posted its receive, so this orders both ends."""
        return self._turns.setdefault(channel, asyncio.Lock())

    async def send(self, channel: str, slot: Slot, size: Bytes) -> None:
        """See `Transport.send`."""
        self._join(channel, SENDER)
        await self._transfer(channel, lambda: collective.send(_tensor(slot, size), RECEIVER, channel))

    async def receive(self, channel: str, staged: SlotRef, size: Bytes, slot: Slot | None) -> SlotRef:
        """See `Transport.receive`."""
        if slot is None or size > len(slot.memory):
            raise TransferFailed(f"no staging slot holds {size} bytes")
        self._join(channel, RECEIVER)
        await self._transfer(channel, lambda: collective.recv(_tensor(slot, size), SENDER, channel))
        return SlotRef(slot.segment, slot.offset, staged.ticket)

    def close(self) -> None:
        """See `Transport.close`."""
        for channel in tuple(self._joined):
            self.drop(channel)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _join(self, channel: str, rank: int) -> None:
        if channel in self._joined:
            return
        pair = channel.rsplit("#", 1)[0]
        if rank == RECEIVER:
            # The sender renewed the group: what is left of the old one is of no use.
            for old in [c for c in self._joined if c.startswith(f"{pair}#")]:
                self.drop(old)
        collective.init_collective_group(2, rank, self._backend, channel)
        self._joined.add(channel)

    def drop(self, channel: str) -> None:
        """See `Transport.drop`."""
        pair = channel.rsplit("#", 1)[0]
        if self._channels.get(pair) == channel:
            del self._channels[pair]
        self._turns.pop(channel, None)
        if channel in self._joined:
            self._joined.discard(channel)
            collective.destroy_collective_group(channel)

    async def _transfer(self, channel: str, blocking: Callable[[], None]) -> None:
        """Run a blocking transfer in the pool. It uses a slot's memory, so it is waited for even if cancelled."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, blocking)
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError:
            self.drop(channel)
            await asyncio.wait({future})
            if not future.cancelled():
                future.exception()
            raise
        except Exception as error:
            self.drop(channel)
            kind = TransferTimeout if "timed out" in str(error).lower() else TransferFailed
            raise kind(f"{self.name} {channel}: {error}") from error


def _tensor(slot: Slot, size: Bytes) -> torch.Tensor:
    return torch.frombuffer(slot.memory, dtype=torch.uint8)[:size]
