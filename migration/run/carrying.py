"""The ways of KV blocks from the workers of this replica to those of another one: by themselves, or in chunks.

Both stage blocks in slots. The workers of replicas on one node exchange a whole round without messages. Otherwise each
chunk is gathered into a slot, sent, and loaded by the target, and the chunks of a round overlap as far as there are
free slots.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from migration.concurrency import gather
from migration.protocol.layouts import Resharding
from migration.protocol.messages import Chunk, CopyRound, Prepared, Shard, Tail, load_name
from migration.protocol.ports import Peer, Slot, WorkerLinks
from migration.run.slots import Lease
from migration.run.world import MigrationWorld
from policies.model import Blocks, Bytes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Route:
    """From the blocks `key` of this replica's engine to a peer, which wants `cuts` of shards and chunks up to `limit`.

    `key` is the engine's name of a running request, or of a hold. `session` is the name of the copy at the peer.
    """

    session: str
    key: str
    peer: Peer
    world: MigrationWorld
    cuts: Resharding | None = None
    limit: Blocks | None = None

    @property
    def chunk(self) -> Blocks:
        """The most blocks of a chunk, or of a tail."""
        own = self.world.slots.blocks(self.world.blocks.fingerprint.shard_bytes)
        return own if self.limit is None else min(own, self.limit)

    async def lease(self) -> Lease:
        """A slot for a chunk."""
        return await self.world.slots.lease(to_send=not self.world.transport.shares_slots)

    def of_senders(self, of_ranks: Sequence[T]) -> Sequence[T]:
        """The values of the workers whose shards are sent."""
        return of_ranks if self.cuts is None else [of_ranks[rank] for rank in self.cuts.senders]

    async def gather_tail(self, tail: Tail, slots: Sequence[Slot]) -> Sequence[Shard]:
        """Stage the tail; the shards that are sent. Raises TransferFailed."""
        return self.of_senders(await self.world.blocks.gather_tail(self.key, tail, slots))


class Carrier(Protocol):
    """One way of blocks. Every method raises TransferFailed, PeerLost, Refused or RequestGone if it fails."""

    sent: Bytes
    """The bytes sent so far, headers included."""

    async def carry(self, planned: CopyRound) -> "asyncio.Task[None]":
        """Move a round's blocks; returns once the target's workers have them.

        The answer is the target's confirmation of the round, which may still be under way.
        """
        ...

    async def carry_tail(self, tail: Tail, staged: Callable[[], None]) -> None:
        """Have the target hold the tail. Calls `staged` once the blocks here are not read any more."""
        ...


async def choose_carrier(route: Route, prepared: Prepared) -> Carrier:
    """The workers themselves if they can reach the target's, else chunks."""
    links, workers = route.world.blocks.links, prepared.workers
    if workers and links is not None and route.world.transport.direct and await links.reach(workers):
        return WorkerCarrier(route, links, workers)
    return ChunkCarrier(route)


class WorkerCarrier:
    """Implements `Carrier`: the workers send blocks to the target's `workers`."""

    def __init__(self, route: Route, links: WorkerLinks, workers: tuple[str, ...]) -> None:
        self.sent = Bytes(0)
        self._route = route
        self._links = links
        self._workers = workers

    async def carry(self, planned: CopyRound) -> "asyncio.Task[None]":
        """See `Carrier.carry`."""
        loading = asyncio.create_task(self._route.peer.load(planned))
        sending = asyncio.create_task(self._send(planned))
        try:
            await asyncio.wait({loading, sending}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
            await sending
        except BaseException:
            loading.cancel()
            sending.cancel()
            await asyncio.wait({loading, sending})
            raise
        return loading

    async def _send(self, planned: CopyRound) -> None:
        route, pool = self._route, self._route.world.slots
        size, load = route.chunk, load_name(planned.migration, planned.number)
        with contextlib.ExitStack() as leases:
            slots = [leases.enter_context(await pool.lease())]
            while len(slots) * size < planned.last - planned.first and (spare := pool.lease_spare()):
                slots.append(leases.enter_context(spare))
            blocks = route.key, planned.first, planned.last
            sent = await self._links.send(*blocks, slots, size, load, self._workers, route.cuts)
        self.sent = Bytes(self.sent + sent)

    async def carry_tail(self, tail: Tail, staged: Callable[[], None]) -> None:
        """See `Carrier.carry_tail`."""
        with await self._route.lease() as slots:
            shards = await self._route.gather_tail(tail, slots)
            staged()
            await self._links.hold(tail, [shard.slot for shard in shards], self._workers, self._route.cuts)
        self.sent = Bytes(self.sent + sum(shard.size for shard in shards))


class ChunkCarrier:
    """Implements `Carrier`: the transport sends slots, and the target's replica has each chunk loaded."""

    def __init__(self, route: Route) -> None:
        self.sent = Bytes(0)
        self._route = route
        self._pushed: Chunk | None = None
        """The newest chunk of a round that has not ended well."""

    async def carry(self, planned: CopyRound) -> "asyncio.Task[None]":
        """See `Carrier.carry`."""
        try:
            async with asyncio.TaskGroup() as pushes:
                loading = pushes.create_task(self._route.peer.load(planned))
                await self._gather_all(planned, pushes)
            self._pushed = None
        except ExceptionGroup as errors:  # Python 3.11.3 and earlier wrap errors that an `except*` block raises
            raise errors.exceptions[0] from None
        finally:
            if self._pushed is not None:
                self._drop(self._pushed)
                self._pushed = None
        return loading

    async def carry_tail(self, tail: Tail, staged: Callable[[], None]) -> None:
        """See `Carrier.carry_tail`."""
        lease = await self._route.lease()
        try:
            shards = await self._route.gather_tail(tail, lease.slots)
            staged()
            last = tail.last(self._route.world.blocks.fingerprint.block_size)
            chunk = self._chunk(0, tail.first, last, shards, tail)
            try:
                await self._push(chunk, lease)
            except BaseException:
                self._drop(chunk)
                raise
        finally:
            lease.end()

    def _drop(self, chunk: Chunk) -> None:
        """Give up the channels of a chunk that failed: the two ends may disagree on the next transfer."""
        for channel in chunk.channels:
            self._route.world.transport.drop(channel)

    async def _gather_all(self, planned: CopyRound, pushes: asyncio.TaskGroup) -> None:
        """Gather a round's chunks one after another, and begin to push each."""
        for low, high in _pieces(planned.first, planned.last, self._route.chunk):
            lease = await self._route.lease()
            try:
                chunk = await self._gather(planned.number, low, high, lease.slots)
                self._pushed = chunk
                push = pushes.create_task(self._push(chunk, lease))
            except BaseException:
                lease.end()
                raise
            # Also for a push that is cancelled before it begins.
            push.add_done_callback(lease.end_with)

    async def _gather(self, number: int, first: Blocks, last: Blocks, slots: Sequence[Slot]) -> Chunk:
        route = self._route
        shards = await route.world.blocks.gather(route.key, first, last, slots)
        return self._chunk(number, first, last, route.of_senders(shards))

    def _chunk(
        self, number: int, first: Blocks, last: Blocks, shards: Sequence[Shard], tail: Tail | None = None
    ) -> Chunk:
        route, world = self._route, self._route.world
        ranks = route.of_senders(range(world.blocks.fingerprint.workers))
        return Chunk(
            migration=route.session,
            round=number,
            first=first,
            last=last,
            shards=tuple(shards),
            channels=tuple(world.transport.channel(world.replica, route.peer.id, rank) for rank in ranks),
            tail=tail,
        )

    async def _push(self, chunk: Chunk, lease: Lease) -> None:
        """Send one chunk and have it loaded. The slots are given back as soon as nobody reads them."""
        loading = asyncio.create_task(self._route.peer.receive(chunk))
        try:
            sending = asyncio.create_task(self._send_chunk(chunk, lease.slots))
            await _until_sent(sending, loading)
            if not self._route.world.transport.shares_slots:
                lease.end()
            await loading
        except BaseException:
            loading.cancel()
            raise
        self.sent = Bytes(self.sent + chunk.size)

    async def _send_chunk(self, chunk: Chunk, slots: Sequence[Slot]) -> None:
        """Send all shards of a chunk. The first failure fails the chunk, once the other sends have ended."""
        transfers = zip(chunk.channels, self._route.of_senders(slots), chunk.shards, strict=True)
        send = self._route.world.transport.send
        await gather([send(channel, slot, shard.size) for channel, slot, shard in transfers])


async def _until_sent(sending: "asyncio.Task[None]", loading: "asyncio.Task[None]") -> None:
    """Wait for the send, or for the receiver's failure, which a send could wait for in vain.

    A send is never left running: until it has ended, it reads the slots.
    """
    try:
        await asyncio.wait({sending, loading}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and not sending.done() and loading.exception() is not None:
            sending.cancel()
        await asyncio.wait({sending})
    except asyncio.CancelledError:
        sending.cancel()
        await asyncio.wait({sending})
        raise
    if loading.done():
        loading.result()
    sending.result()


def _pieces(first: Blocks, last: Blocks, size: Blocks) -> Iterator[tuple[Blocks, Blocks]]:
    """[first, last) in ranges of at most `size` blocks."""
    for low in range(first, last, size):
        yield Blocks(low), Blocks(min(low + size, last))
