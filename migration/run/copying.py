"""Copies KV blocks to another replica, in rounds of slot-sized chunks, and a running request's tail in one chunk.

The blocks are those of a running request, or of a held prefix. Gathering, sending and loading overlap as far as there
are free slots.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from migration.concurrency import gather
from migration.protocol.layouts import Resharding
from migration.protocol.messages import Chunk, CopyRound, Prepared, Shard, Tail, load_name, tail_name
from migration.protocol.ports import Peer, Slot
from migration.run.slots import Lease
from migration.run.world import MigrationWorld
from policies.model import Blocks, Bytes

T = TypeVar("T")


class BlockCopy:
    """The blocks of one migration on their way.

    Each round carries the output tokens since the previous one. `confirmed` is the number of tokens that the target has
    confirmed: those of a failed round may not have arrived. `seconds` is the time spent on copying, failed copies
    included. `held` is the tail that the target holds.
    """

    def __init__(self, migration: str, key: str, peer: Peer, world: MigrationWorld) -> None:
        """`key` is the engine's name of the request, or of the hold."""
        self.sent = Bytes(0)
        self.confirmed = 0
        self.seconds = 0.0
        self._migration = migration
        self._key = key
        self._peer = peer
        self._world = world
        self._rounds = 0
        self._workers: tuple[str, ...] = ()
        self._cuts: Resharding | None = None
        self._limit: Blocks | None = None
        self.held: Tail | None = None
        self._unconfirmed: tuple[CopyRound, asyncio.Task[None]] | None = None
        """The newest round, whose blocks the target's workers have, and the target's confirmation of it."""
        self._pushed: Chunk | None = None
        """The newest chunk of a round that has not ended well."""

    @property
    def chunk(self) -> Blocks:
        """The most blocks of a chunk, or of a tail."""
        own = self._world.slots.blocks(self._world.blocks.fingerprint.shard_bytes)
        return own if self._limit is None else min(own, self._limit)

    def begin(self, outputs: int) -> None:
        """The target has the first `outputs` output tokens."""
        self.confirmed = outputs

    def plan(self, first: Blocks, last: Blocks, outputs: tuple[int, ...]) -> CopyRound:
        """The next round, of blocks [first, last) of a context that ends with `outputs`."""
        self._rounds += 1
        return CopyRound(self._migration, self._rounds, first, last, self.confirmed, outputs[self.confirmed :])

    async def take_answer(self, prepared: Prepared) -> None:
        """Cut shards and size chunks as the target wants; have the workers send blocks to its own, if they can."""
        self._cuts, self._limit = prepared.cuts, prepared.chunk
        links, workers = self._world.blocks.links, prepared.workers
        if workers and links is not None and self._world.transport.direct and await links.reach(workers):
            self._workers = workers

    async def copy(self, planned: CopyRound) -> None:
        """Move the blocks of a round: while a chunk is sent and loaded, the next is gathered.

        Where the workers send the blocks, this does not wait until the target has confirmed the round: see `finish`.

        Raises:
            TransferFailed, PeerLost, Refused, RequestGone: as gathering, sending and the target's loading do.
        """
        with self._timed():
            await self._confirm()
            await (self._have_sent(planned) if self._workers else self._push_all(planned))

    def tail(self, first: Blocks, tokens: int) -> Tail:
        """The KV of the context's first `tokens` tokens from block `first` on."""
        return Tail(tail_name(self._migration), first, tokens)

    async def finish(self, tail: Tail | None = None, ready: Callable[[], None] = lambda: None) -> None:
        """Wait until the target has confirmed all rounds; meanwhile, have it hold the tail.

        `ready` is called as soon as they are confirmed and the tail is staged: the request's blocks here are not needed
        any more.

        Raises:
            TransferFailed, PeerLost, Refused, RequestGone: as gathering, sending, loading and the target's holding do.
        """
        with self._timed():
            try:
                async with asyncio.TaskGroup() as tasks:
                    staged = asyncio.Event()
                    if tail is not None:
                        tasks.create_task(self._send_tail(tail, staged))
                    await self._confirm()
                    if tail is not None:
                        await staged.wait()
                    ready()
            except ExceptionGroup as errors:  # Python 3.11.3 and earlier wrap errors that an `except*` block raises
                raise errors.exceptions[0] from None
            self.held = tail

    def close(self) -> None:
        """The migration is over, whatever is still under way."""
        if self._unconfirmed is not None:
            _, loading = self._unconfirmed
            loading.cancel()
            loading.add_done_callback(_take_failure)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began = self._world.clock()
        try:
            yield
        finally:
            self.seconds += self._world.clock() - began

    async def _confirm(self) -> None:
        """Wait until the target has confirmed the newest round."""
        if self._unconfirmed is not None:
            planned, loading = self._unconfirmed
            await loading
            self._unconfirmed = None
            self.confirmed = planned.outputs_from + len(planned.outputs)

    async def _send_tail(self, tail: Tail, staged: asyncio.Event) -> None:
        world = self._world
        lease = await self._lease()
        try:
            shards = self._of_senders(await world.blocks.gather_tail(self._key, tail, lease.slots))
            staged.set()
            if self._workers and (links := world.blocks.links) is not None:
                await links.hold(tail, [shard.slot for shard in shards], self._workers, self._cuts)
                self.sent = Bytes(self.sent + sum(shard.size for shard in shards))
                return
            chunk = self._chunk(self._rounds, tail.first, tail.last(world.blocks.fingerprint.block_size), shards, tail)
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
            self._world.transport.drop(channel)

    async def _have_sent(self, planned: CopyRound) -> None:
        """Have the workers send a round's blocks. Returns once the target's workers have them."""
        loading = asyncio.create_task(self._peer.load(planned))
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
        self._unconfirmed = (planned, loading)

    async def _send(self, planned: CopyRound) -> None:
        world, links = self._world, self._world.blocks.links
        assert links is not None
        size, load = self.chunk, load_name(planned.migration, planned.number)
        with contextlib.ExitStack() as leases:
            slots = [leases.enter_context(await world.slots.lease())]
            while len(slots) * size < planned.last - planned.first and (spare := world.slots.lease_spare()):
                slots.append(leases.enter_context(spare))
            blocks = self._key, planned.first, planned.last
            sent = await links.send(*blocks, slots, size, load, self._workers, self._cuts)
        self.sent = Bytes(self.sent + sent)

    async def _push_all(self, planned: CopyRound) -> None:
        """Send a round's blocks chunk by chunk. Returns once the target has confirmed the round."""
        try:
            async with asyncio.TaskGroup() as pushes:
                pushes.create_task(self._peer.load(planned))
                await self._gather_all(planned, pushes)
            self._pushed = None
            self.confirmed = planned.outputs_from + len(planned.outputs)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            if self._pushed is not None:
                self._drop(self._pushed)
                self._pushed = None

    async def _gather_all(self, planned: CopyRound, pushes: asyncio.TaskGroup) -> None:
        """Gather a round's chunks one after another, and begin to push each."""
        for low, high in _pieces(planned.first, planned.last, self.chunk):
            lease = await self._lease()
            try:
                chunk = await self._gather(planned.number, low, high, lease.slots)
                self._pushed = chunk
                push = pushes.create_task(self._push(chunk, lease))
            except BaseException:
                lease.end()
                raise
            # Also for a push that is cancelled before it begins.
            push.add_done_callback(lease.end_with)

    async def _lease(self) -> Lease:
        """A slot for a chunk."""
        return await self._world.slots.lease(to_send=not self._world.transport.shares_slots)

    async def _gather(self, number: int, first: Blocks, last: Blocks, slots: Sequence[Slot]) -> Chunk:
        shards = await self._world.blocks.gather(self._key, first, last, slots)
        return self._chunk(number, first, last, self._of_senders(shards))

    def _of_senders(self, of_ranks: Sequence[T]) -> Sequence[T]:
        """The values of the workers whose shards are sent."""
        return of_ranks if self._cuts is None else [of_ranks[rank] for rank in self._cuts.senders]

    def _chunk(
        self, number: int, first: Blocks, last: Blocks, shards: Sequence[Shard], tail: Tail | None = None
    ) -> Chunk:
        world = self._world
        ranks = self._of_senders(range(world.blocks.fingerprint.workers))
        return Chunk(
            migration=self._migration,
            round=number,
            first=first,
            last=last,
            shards=tuple(shards),
            channels=tuple(world.transport.channel(world.replica, self._peer.id, rank) for rank in ranks),
            tail=tail,
        )

    async def _push(self, chunk: Chunk, lease: Lease) -> None:
        """Send one chunk and have it loaded. The slots are given back as soon as nobody reads them."""
        transport = self._world.transport
        loading = asyncio.create_task(self._peer.receive(chunk))
        try:
            sending = asyncio.create_task(self._send_chunk(chunk, lease.slots))
            await _until_sent(sending, loading)
            if not transport.shares_slots:
                lease.end()
            await loading
        except BaseException:
            loading.cancel()
            raise
        self.sent = Bytes(self.sent + chunk.size)

    async def _send_chunk(self, chunk: Chunk, slots: Sequence[Slot]) -> None:
        """Send all shards of a chunk. The first failure fails the chunk, once the other sends have ended."""
        transfers = zip(chunk.channels, self._of_senders(slots), chunk.shards, strict=True)
        await gather([self._world.transport.send(channel, slot, shard.size) for channel, slot, shard in transfers])


async def _until_sent(sending: asyncio.Task[None], loading: asyncio.Task[None]) -> None:
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


def _take_failure(task: asyncio.Task[None]) -> None:
    """Read the exception of a task that nobody waits for."""
    if not task.cancelled():
        task.exception()
