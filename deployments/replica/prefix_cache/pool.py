"""The MemPool of one replica, over its engine, its requests and its migrations."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from deployments.engine.port import Engine
from deployments.replica.host import RequestHost
from deployments.replica.moves import Moves
from deployments.replica.prefix_cache.copies import Copies
from migration.concurrency import gather
from migration.pool import PinAnswer, PinRefusal
from migration.protocol.errors import Refused, TransferFailed
from migration.protocol.messages import SlotRef
from migration.protocol.record import CopyRecord, MigrationRecord
from migration.protocol.request import RequestSpec
from migration.run.donor import CopyOrder
from migration.run.source import Order
from policies.causes import Cause
from policies.model import Blocks, ReplicaId, Tokens
from policies.prefix.tree import HeldPrefix

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pin:
    """The names of pinned blocks, and the end of their pin, which a renewal replaces."""

    names: tuple[int, ...]
    expiry: asyncio.TimerHandle


class ReplicaPool:
    """Implements `MemPool`. Allocated memory is under leases of `lease_s` seconds.

    Pins hold at most the share `pin_share` of the tier of host memory. What changes them happens one after another: the
    engine answers later, and what is decided meanwhile must count it.
    """

    def __init__(
        self,
        engine: Engine,
        host: RequestHost,
        moves: Moves,
        copies: Copies,
        lease_s: float,
        pin_share: float = 0.25,
    ) -> None:
        self._engine = engine
        self._host = host
        self._moves = moves
        self._copies = copies
        self._lease_s = lease_s
        self._leases: dict[str, asyncio.TimerHandle] = {}
        self._pin_budget = Blocks(int(engine.host_blocks * pin_share))
        self._pins: dict[str, _Pin] = {}
        self._pinning = asyncio.Lock()
        self._expiring: set[asyncio.Task[None]] = set()

    def alloc_mem(self, name: str, tokens: Tokens) -> None:
        """See `MemPool.alloc_mem`."""
        if name in self._leases:
            raise Refused(f"there is memory of the name {name!r} already", Cause.ALREADY_THERE)
        self._host.require_room(tokens)
        self._host.reserve(_reservation(name), tokens)
        self._leases[name] = asyncio.get_running_loop().call_later(self._lease_s, self.free_mem, name)

    def free_mem(self, name: str) -> None:
        """See `MemPool.free_mem`."""
        if (lease := self._leases.pop(name, None)) is not None:
            lease.cancel()
            self._host.release(_reservation(name))

    async def insert(
        self,
        name: str,
        spec: RequestSpec,
        outputs: tuple[int, ...],
        first: Blocks,
        staged: Sequence[SlotRef],
        count: Blocks,
    ) -> None:
        """See `MemPool.insert`."""
        last = Blocks(first + count)
        # The load comes first, since blocks are put into a load that has begun.
        await gather([self._engine.load(name, spec, outputs, first, last), self._engine.put(name, first, last, staged)])

    def match(self, spec: RequestSpec, outputs: tuple[int, ...] = ()) -> HeldPrefix:
        """See `MemPool.match`."""
        return self._engine.present(spec, outputs)

    async def delete(self, names: Collection[int] | None) -> Blocks:
        """See `MemPool.delete`. Pins of deleted blocks end."""
        async with self._pinning:
            deleted = None if names is None else set(names)
            for name in [name for name, pin in self._pins.items() if deleted is None or deleted & set(pin.names)]:
                await self._unpin(name)
            return await self._engine.delete(names)

    async def swap_in(self, name: str, spec: RequestSpec, outputs: tuple[int, ...] = ()) -> None:
        """See `MemPool.swap_in`: a load that brings no blocks."""
        end = Blocks(self._engine.present(spec, outputs).blocks)
        if end:
            await self._engine.load(name, spec, outputs, end, end)

    async def swap_out(self, count: Blocks) -> Blocks:
        """See `MemPool.swap_out`."""
        return await self._engine.swap_out(count)

    async def pin(self, names: Sequence[int], ttl_s: float) -> PinAnswer:
        """See `MemPool.pin`."""
        if not self._engine.host_blocks:
            return PinAnswer(refusal=PinRefusal.NO_TIER, why="there is no tier of host memory: set cache.dram_gib")
        async with self._pinning:
            prefix = tuple(names[: self._engine.mirror.held_by_host(names)])
            if not prefix:
                return PinAnswer(refusal=PinRefusal.UNKNOWN, why="the host's memory has no block of the prompt")
            name = f"pin-{prefix[-1]:x}"
            if ttl_s:
                return await self._pin(name, prefix, ttl_s)
            if name not in self._pins:
                why = "the prompt is not pinned, or its pin has expired"
                return PinAnswer(refusal=PinRefusal.UNKNOWN, why=why)
            return PinAnswer(await self._unpin(name))

    async def _pin(self, name: str, prefix: tuple[int, ...], ttl_s: float) -> PinAnswer:
        pinned = {block for other, pin in self._pins.items() if other != name for block in pin.names}
        if (wanted := len(pinned.union(prefix))) > self._pin_budget:
            why = f"{wanted} blocks would be pinned, and {self._pin_budget} can be (cache.pin_share)"
            return PinAnswer(refusal=PinRefusal.BUDGET, why=why)
        if (earlier := self._pins.get(name)) is not None:
            earlier.expiry.cancel()
        expiry = asyncio.get_running_loop().call_later(ttl_s, self._expire, name)
        # Before the call: the engine may carry it out although it fails here.
        self._pins[name] = _Pin(prefix, expiry)
        try:
            count = await self._engine.pin(name, prefix)
        except BaseException:
            expiry.cancel()
            self._expire(name)
            raise
        self._pins[name] = _Pin(prefix[:count], expiry)
        return PinAnswer(count)

    async def reset(self, reset: Callable[[], Awaitable[str | None]]) -> str | None:
        """Have the engine's memory reset; the reason why it is not. The engine has no pins then."""
        async with self._pinning:
            if (failure := await reset()) is None:
                for pin in self._pins.values():
                    pin.expiry.cancel()
                self._pins.clear()
            return failure

    @property
    def pinned(self) -> Blocks:
        """The number of pinned blocks."""
        return Blocks(len({block for pin in self._pins.values() for block in pin.names}))

    def _expire(self, name: str) -> None:
        task = asyncio.ensure_future(self._end(name, self._pins[name].expiry))
        self._expiring.add(task)
        task.add_done_callback(self._expiring.discard)

    async def _end(self, name: str, expiry: asyncio.TimerHandle) -> None:
        """End a pin, unless it is renewed or ended before its turn comes."""
        async with self._pinning:
            if (pin := self._pins.get(name)) is not None and pin.expiry is expiry:
                await self._unpin(name)

    async def _unpin(self, name: str) -> Blocks:
        """End a pin. A failure costs nothing: the engine that failed has no pins."""
        self._pins.pop(name).expiry.cancel()
        try:
            return await self._engine.unpin(name)
        except TransferFailed as error:
            log.warning("a pin could not be ended: %s", error)
            return Blocks(0)

    def transfer(self, order: Order, to: ReplicaId) -> MigrationRecord:
        """See `MemPool.transfer`."""
        return self._moves.start(order, to)

    async def transfer_with_insert(self, order: CopyOrder, to: ReplicaId) -> CopyRecord:
        """See `MemPool.transfer_with_insert`."""
        return await self._copies.copy(order, to)


def _reservation(name: str) -> str:
    """The name of a reservation at the host, apart from those of migrations."""
    return f"pool-{name}"
