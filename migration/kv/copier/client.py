"""The replica's end of the connections to the copiers of its engine's workers."""

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from typing import Self

from migration.concurrency import gather
from migration.kv.copier.wire import (
    CallFailed,
    Computed,
    ComputedCall,
    DiscardTail,
    ExpectTail,
    Filled,
    FilledCall,
    ForgetLoad,
    GatherCall,
    Gathered,
    HaltRun,
    Held,
    HeldCall,
    HoldTailCall,
    Loaded,
    LoadedCall,
    Missing,
    MissingCall,
    Reply,
    ScatterCall,
    Scattered,
    SendCall,
    Sent,
    StopCall,
    TailHeld,
    Taker,
    decode,
)
from migration.kv.copier.wire import encode as encoded
from migration.protocol.errors import BlocksGone, LoadOver, TransferFailed
from migration.protocol.layouts import Resharding, ShardPart
from migration.protocol.messages import Shard, SlotRef, Tail
from migration.protocol.ports import Slot
from migration.sockets import open_local
from policies.model import Bytes


class CopierClient:
    """Calls of any number of tasks over one connection. Calls are served in order, but for those that wait for a load.

    Every call raises TransferFailed if it fails there, or if the connection ends.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._reading = asyncio.create_task(self._read(reader))

    @classmethod
    async def connect(cls, address: str) -> Self:
        """Connect to the copier at `address`. Raises OSError."""
        return cls(*await open_local(address))

    async def gather(self, key: str, first: int, last: int, segment: str, offset: int, partial: bool = False) -> Shard:
        """Copy blocks [first, last) of the running request `key` into the slot at `offset` of `segment`.

        If `partial`, the last block need not be full.

        Cancelled, it returns only once the slot is no longer written.

        Raises:
            BlocksGone: the request holds no blocks.
            TransferFailed: a block is not full, or the engine computes the request's known tokens anew.
        """
        reply = await self._call(GatherCall(next(self._numbers), key, first, last, segment, offset, partial))
        assert isinstance(reply, Gathered)
        return Shard(SlotRef(segment, offset, reply.ticket), Bytes(reply.size))

    async def computed(self, key: str, beyond: int | None = None) -> int | None:
        """The number of tokens of the running request `key` whose KV its blocks have; None: it has no blocks.

        With `beyond`, wait until there are more than that many.
        """
        reply = await self._call(ComputedCall(next(self._numbers), key, beyond))
        assert isinstance(reply, Computed)
        return reply.tokens

    async def send(
        self, key: str, first: int, last: int, slots: Sequence[Slot], blocks: int, load: str, takers: Sequence[Taker]
    ) -> Bytes:
        """Copy full blocks [first, last) of the running request `key` into a load of the workers `takers`.

        They pass through `slots` of one segment, each of which holds `blocks` blocks. Returns the bytes transferred
        (headers included). Cancelled, it returns only once the slots are no longer used.

        Raises:
            BlocksGone: the request holds no blocks.
            TransferFailed: a block is not full, or another worker cannot be reached, or failed.
        """
        number, offsets = next(self._numbers), [slot.offset for slot in slots]
        call = SendCall(number, key, first, last, slots[0].segment, offsets, blocks, list(takers), load)
        reply = await self._call(call)
        assert isinstance(reply, Sent)
        return Bytes(reply.size)

    async def scatter(self, load: str, first: int, last: int, slot: SlotRef, part: ShardPart | None = None) -> None:
        """Copy staged blocks [first, last) of a load into the cache, as soon as vLLM has admitted it.

        With a `part`, the blocks are staged as another worker's shard.

        Raises:
            LoadOver: the load has ended.
        """
        call = ScatterCall(next(self._numbers), load, first, last, slot.segment, slot.offset, slot.ticket, part)
        reply = await self._call(call)
        assert isinstance(reply, Scattered)

    async def held(self, hold: str) -> int:
        """Wait until vLLM holds a prefix; the number of its blocks, which can be gathered under the key `hold`."""
        reply = await self._call(HeldCall(next(self._numbers), hold))
        assert isinstance(reply, Held)
        return reply.blocks

    async def filled(self, load: str) -> int:
        """Wait until this worker has all blocks of a load; the number of those that the cache did not hold before."""
        reply = await self._call(FilledCall(next(self._numbers), load))
        assert isinstance(reply, Filled)
        return reply.blocks

    async def missing(self, load: str) -> int | None:
        """The number of a load's blocks that have not arrived; None before its admission, and after its end."""
        reply = await self._call(MissingCall(next(self._numbers), load))
        assert isinstance(reply, Missing)
        return reply.blocks

    async def loaded(self, load: str) -> None:
        """Wait until the blocks of a load are in the prefix cache."""
        reply = await self._call(LoadedCall(next(self._numbers), load))
        assert isinstance(reply, Loaded)

    def forget(self, load: str) -> None:
        """End a load: its calls that still wait fail."""
        self._writer.write(encoded(ForgetLoad(load)))

    def expect(self, tail: str) -> None:
        """Let a tail be held once, or until `discard`."""
        self._writer.write(encoded(ExpectTail(tail)))

    async def hold(self, tail: str, blocks: int, slot: SlotRef, part: ShardPart | None = None) -> None:
        """Copy staged blocks into the worker's memory, under the name `tail`, which its replica expects.

        With a `part`, the blocks are staged as another worker's shard.
        """
        reply = await self._call(
            HoldTailCall(next(self._numbers), tail, blocks, slot.segment, slot.offset, slot.ticket, part)
        )
        assert isinstance(reply, TailHeld)

    def discard(self, tail: str) -> None:
        """Free a tail, if it is held, and expect it no more."""
        self._writer.write(encoded(DiscardTail(tail)))

    def halt(self, key: str) -> None:
        """Have the engine end the running request `key` with one of its next tokens."""
        self._writer.write(encoded(HaltRun(key)))

    @property
    def closed(self) -> bool:
        """True once the connection has ended."""
        return self._reading.done()

    def close(self) -> None:
        """End the connection."""
        self._writer.close()
        self._reading.cancel()

    async def _call(
        self,
        call: GatherCall
        | ComputedCall
        | SendCall
        | ScatterCall
        | HeldCall
        | FilledCall
        | MissingCall
        | LoadedCall
        | HoldTailCall,
    ) -> Reply:
        if self.closed:
            raise TransferFailed("the connection to the engine's worker has ended")
        future = self._calls[call.number] = asyncio.get_running_loop().create_future()
        self._writer.write(encoded(call))
        try:
            reply: Reply = await asyncio.shield(future)
        except asyncio.CancelledError:
            if isinstance(call, SendCall | ComputedCall) and not self.closed:
                self._writer.write(encoded(StopCall(call.number)))
            if isinstance(call, GatherCall | SendCall):
                await asyncio.wait({future})
            raise
        if isinstance(reply, CallFailed):
            raise (BlocksGone if reply.gone else LoadOver if reply.over else TransferFailed)(reply.text)
        return reply

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            with contextlib.suppress(OSError):
                async for line in reader:
                    message = decode(line)
                    if not isinstance(message, Reply):
                        raise ValueError(f"{message} is no reply")
                    self._calls.pop(message.number).set_result(message)
        finally:
            self._writer.close()
            for number, future in self._calls.items():
                future.set_result(CallFailed(number, "the connection to the engine's worker has ended"))
            self._calls.clear()


class Copiers:
    """The copiers of all workers of one engine, in the order of their ranks.

    Every worker copies its shard of the blocks, or its parts of other shards, if the workers of the other engine hold
    other heads (`Resharding`). A call that fails at one worker fails, once it has ended at the others.
    """

    def __init__(self, clients: Sequence[CopierClient], addresses: Sequence[str], block_size: int) -> None:
        self._clients = clients
        self._block_size = block_size
        self._peers: dict[tuple[str, ...], Copiers] = {}
        """The copiers of other engines, by their addresses."""
        self.addresses = tuple(addresses)

    @classmethod
    async def connect(cls, addresses: Sequence[str], block_size: int) -> Self:
        """Connect to the copiers at `addresses`. Raises OSError."""
        clients: list[CopierClient] = []
        try:
            for address in addresses:
                clients.append(await CopierClient.connect(address))
        except BaseException:
            for client in clients:
                client.close()
            raise
        return cls(clients, addresses, block_size)

    async def gather(
        self, key: str, first: int, last: int, slots: Sequence[Slot], partial: bool = False
    ) -> list[Shard]:
        """See `CopierClient.gather`; each worker has a slot of its own."""
        pairs = zip(self._clients, slots, strict=True)
        return await gather([client.gather(key, first, last, s.segment, s.offset, partial) for client, s in pairs])

    async def computed(self, key: str, beyond: int | None = None) -> int | None:
        """See `CopierClient.computed`: of the worker that has the fewest."""
        computed = await gather([client.computed(key, beyond) for client in self._clients])
        known = [tokens for tokens in computed if tokens is not None]
        return min(known) if len(known) == len(computed) else None

    async def reach(self, addresses: Sequence[str]) -> bool:
        """See `WorkerLinks.reach`."""
        self._peers = {key: peer for key, peer in self._peers.items() if not peer.closed}
        if tuple(addresses) not in self._peers:
            with contextlib.suppress(OSError):
                connected = await Copiers.connect(addresses, self._block_size)
                if self._peers.setdefault(tuple(addresses), connected) is not connected:
                    connected.close()  # Another move to the same engine has connected meanwhile.
        return tuple(addresses) in self._peers

    async def send(
        self,
        key: str,
        first: int,
        last: int,
        slots: Sequence[Sequence[Slot]],
        blocks: int,
        load: str,
        addresses: Sequence[str],
        cuts: Resharding | None = None,
    ) -> Bytes:
        """See `WorkerLinks.send`."""
        of_ranks = list(zip(*slots, strict=True))
        sent = [
            self._clients[rank].send(key, first, last, of_ranks[rank], blocks, load, takers)
            for rank, takers in _takers(addresses, cuts)
        ]
        return Bytes(sum(await gather(sent)))

    async def scatter(
        self, load: str, first: int, last: int, slots: Sequence[SlotRef], cuts: Resharding | None = None
    ) -> None:
        """See `CopierClient.scatter`; each worker has a slot of its own, or takes its `cuts` of the sent shards."""
        taken = _taken(self._clients, slots, cuts)
        await gather([client.scatter(load, first, last, slot, part) for client, slot, part in taken])

    async def held(self, hold: str) -> int:
        """See `CopierClient.held`."""
        return min(await gather([client.held(hold) for client in self._clients]))

    async def filled(self, load: str) -> int:
        """Wait until all workers have all blocks of a load; the number of those that the cache did not hold before."""
        return max(await gather([client.filled(load) for client in self._clients]))

    async def missing(self, load: str) -> int | None:
        """See `WorkerLinks.missing`."""
        missing = [blocks for blocks in await gather([c.missing(load) for c in self._clients]) if blocks is not None]
        return sum(missing) if missing else None

    async def loaded(self, load: str) -> None:
        """See `CopierClient.loaded`. All workers share the prefix cache, so the first one answers for all."""
        await self._clients[0].loaded(load)

    def forget(self, load: str) -> None:
        """See `CopierClient.forget`."""
        for client in self._clients:
            client.forget(load)

    def expect(self, tail: str) -> None:
        """See `CopierClient.expect`."""
        for client in self._clients:
            client.expect(tail)

    async def hold(
        self, tail: Tail, slots: Sequence[SlotRef], addresses: Sequence[str] = (), cuts: Resharding | None = None
    ) -> None:
        """See `CopierClient.hold` and `WorkerLinks.hold`; without `addresses`, of this engine's own workers."""
        holders = self._peers[tuple(addresses)] if addresses else self
        blocks = tail.last(self._block_size) - tail.first
        taken = _taken(holders._clients, slots, cuts)
        await gather([client.hold(tail.name, blocks, slot, part) for client, slot, part in taken])

    def discard(self, tail: str) -> None:
        """See `CopierClient.discard`."""
        for client in self._clients:
            client.discard(tail)

    def halt(self, key: str) -> None:
        """See `CopierClient.halt`. All workers share vLLM's scheduler, so the first one passes it on for all."""
        self._clients[0].halt(key)

    @property
    def closed(self) -> bool:
        """True once some connection has ended."""
        return any(client.closed for client in self._clients)

    def close(self) -> None:
        """End the connections, those to other engines included."""
        for client in self._clients:
            client.close()
        for peer in self._peers.values():
            peer.close()


def _takers(addresses: Sequence[str], cuts: Resharding | None) -> list[tuple[int, list[Taker]]]:
    """The ranks that send shards to the workers at `addresses`, and the takers of each."""
    if cuts is None:
        return [(rank, [Taker(address)]) for rank, address in enumerate(addresses)]
    return [
        (rank, [Taker(addresses[cut.worker], cut.part) for cut in cuts.taken(shard)])
        for shard, rank in enumerate(cuts.senders)
    ]


def _taken(
    clients: Sequence[CopierClient], slots: Sequence[SlotRef], cuts: Resharding | None
) -> list[tuple[CopierClient, SlotRef, ShardPart | None]]:
    """The workers that take sent shards, and the parts that each takes."""
    if cuts is None:
        return [(client, slot, None) for client, slot in zip(clients, slots, strict=True)]
    return [(clients[cut.worker], slots[cut.shard], cut.part) for cut in cuts.cuts]
