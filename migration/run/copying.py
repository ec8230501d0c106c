"""Copies KV blocks of a running request to the target, in rounds of slot-sized chunks, and its tail in one chunk.

Gathering, sending and loading overlap as far as there are free slots.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from migration.concurrency import gather
from migration.protocol.messages import Chunk, CopyRound, Shard, Tail, load_name
from migration.protocol.ports import Hosted, Peer, Slot
from migration.run.slots import Lease
from migration.run.world import MigrationWorld
from policies.model import Blocks, Bytes


class BlockCopy:
    """The blocks of one migration on their way.

    Each round carries the output tokens since the previous one. `confirmed` is the number of tokens that the target has
    confirmed: those of a failed round may not have arrived. `seconds` is the time spent on copying, failed copies
    included.
    """

    def __init__(self, migration: str, hosted: Hosted, peer: Peer, world: MigrationWorld) -> None:
        self.sent = Bytes(0)
        self.confirmed = 0
        self.seconds = 0.0
        self._migration = migration
        self._hosted = hosted
        self._peer = peer
        self._world = world
        self._rounds = 0
        self._workers: tuple[str, ...] = ()
        self._pushed: Chunk | None = None
        """The newest chunk of a round that has not ended well."""

    def begin(self, outputs: int) -> None:
        """The target has the first `outputs` output tokens."""
        self.confirmed = outputs

    def plan(self, first: Blocks, last: Blocks, outputs: tuple[int, ...]) -> CopyRound:
        """The next round, of blocks [first, last) of a context that ends with `outputs`."""
        self._rounds += 1
        return CopyRound(self._migration, self._rounds, first, last, self.confirmed, outputs[self.confirmed :])

    def reach(self, workers: tuple[str, ...]) -> None:
        """Have the workers send the blocks to the target's, at these addresses, if they can."""
        links = self._world.blocks.links
        if workers and links is not None and self._world.transport.direct and links.reaches(workers):
            self._workers = workers

    async def copy(self, planned: CopyRound) -> None:
        """Move the blocks of a round: while a chunk is sent and loaded, the next is gathered.

        Raises:
            TransferFailed, PeerLost, Refused, RequestGone: as gathering, sending and the target's loading do.
        """
        began = self._world.clock()
        try:
            async with asyncio.TaskGroup() as pushes:
                pushes.create_task(self._peer.load(planned))
                if self._workers:
                    await self._have_sent(planned)
                else:
                    await self._push_all(planned, pushes)
            self._pushed = None
            self.confirmed = planned.outputs_from + len(planned.outputs)
        except* Exception as errors:
            raise errors.exceptions[0] from None
        finally:
            self.seconds += self._world.clock() - began
            if self._pushed is not None:
                self._drop(self._pushed)
                self._pushed = None

    async def copy_tail(self, first: Blocks, tokens: int) -> None:
        """Have the target hold the KV of the context's first `tokens` tokens from block `first` on.

        Raises:
            TransferFailed, PeerLost, Refused, RequestGone: as gathering, sending and the target's holding do.
        """
        world = self._world
        tail = Tail(f"{self._migration}.tail", first, tokens)
        began = world.clock()
        lease = await self._lease()
        try:
            shards = await world.blocks.gather_tail(self._hosted.key, tail, lease.slots)
            last = tail.last(world.blocks.fingerprint.block_size)
            chunk = self._chunk(self._rounds, first, last, shards, tail)
            try:
                await self._push(chunk, lease)
            except BaseException:
                self._drop(chunk)
                raise
        finally:
            lease.end()
            self.seconds += world.clock() - began

    def _drop(self, chunk: Chunk) -> None:
        """Give up the channels of a chunk that failed: the two ends may disagree on the next transfer."""
        for channel in chunk.channels:
            self._world.transport.drop(channel)

    async def _have_sent(self, planned: CopyRound) -> None:
        """Have the workers send a round's blocks to the target's workers."""
        world, links = self._world, self._world.blocks.links
        assert links is not None
        size = world.slots.blocks(world.blocks.fingerprint.shard_bytes)
        load = load_name(planned.migration, planned.number)
        with contextlib.ExitStack() as leases:
            slots = [leases.enter_context(await world.slots.lease())]
            while len(slots) * size < planned.last - planned.first and (spare := world.slots.lease_spare()):
                slots.append(leases.enter_context(spare))
            sent = await links.send(self._hosted.key, planned.first, planned.last, slots, size, load, self._workers)
        self.sent = Bytes(self.sent + sent)

    async def _push_all(self, planned: CopyRound, pushes: asyncio.TaskGroup) -> None:
        """Gather a round's chunks one after another, and begin to push each."""
        world = self._world
        size = world.slots.blocks(world.blocks.fingerprint.shard_bytes)
        for low, high in _pieces(planned.first, planned.last, size):
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
        shards = await self._world.blocks.gather(self._hosted.key, first, last, slots)
        return self._chunk(number, first, last, shards)

    def _chunk(
        self, number: int, first: Blocks, last: Blocks, shards: Sequence[Shard], tail: Tail | None = None
    ) -> Chunk:
        world, ranks = self._world, range(len(shards))
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
            sending = asyncio.create_task(self._send(chunk, lease.slots))
            await _until_sent(sending, loading)
            if not transport.shares_slots:
                lease.end()
            await loading
        except BaseException:
            loading.cancel()
            raise
        self.sent = Bytes(self.sent + chunk.size)

    async def _send(self, chunk: Chunk, slots: Sequence[Slot]) -> None:
        """Send all shards of a chunk. The first failure fails the chunk, once the other sends have ended."""
        transfers = zip(chunk.channels, slots, chunk.shards, strict=True)
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
