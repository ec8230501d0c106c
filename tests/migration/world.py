"""Two replicas without Ray or vLLM, wired mouth to ear, and the reader of a stream between them."""

import asyncio
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from deployments.engine.paced import PacedEngine
from deployments.replica.host import RequestHost
from deployments.replica.moves import Moves
from deployments.replica.outbox import Outboxes
from deployments.replica.peers import PeerCalls
from deployments.replica.prefix_cache.copies import Copies
from migration.kv.staging import HostSegment
from migration.protocol.continuing import plain_spec
from migration.protocol.core_messages import Adapter
from migration.protocol.cursor import Cursor
from migration.protocol.errors import Refused
from migration.protocol.messages import Adopt, Chunk, CopyRound, PathRequest, Prepare, Prepared
from migration.protocol.ports import Transport
from migration.protocol.record import MigrationRecord
from migration.protocol.request import Delta, Doubt, IngressId, Lost, Moved, Moving, RequestSpec, StreamEvent
from migration.protocol.rounds import CopyLimits
from migration.run.slots import Slots
from migration.run.source import Order
from migration.run.world import MigrationLimits, MigrationWorld
from migration.transport.shared import SharedSlots
from policies.causes import Cause
from policies.model import PoolId, ReplicaId, RequestId
from policies.plan import Move, Reason
from tests.deployments.engine.quick_engine import QuickEngine, is_unused

INGRESS = IngressId("ingress")
POOL = PoolId("Pool")
SLOT_BLOCKS = 8
LIMITS = MigrationLimits(prepare_s=0.5, copy_s=0.5, final_s=0.5, adopt_s=0.5, copy=CopyLimits())


def calls_of(replica: ReplicaId, moves: Moves, engine: Any, adopt_s: float) -> PeerCalls:
    """What takes the calls of other replicas, for migrations and copies alone."""
    unused: Any = None
    return PeerCalls(replica, moves, unused, unused, engine, adopt_s, unused)


async def loads_no_adapter(adapter: Adapter) -> Refused | None:
    """The engine's answer to a request with an adapter."""
    return Refused("an engine without adapters", Cause.ADAPTER)


class LocalPeer:
    """Calls another replica's `Moves` directly. `fault` is raised, or awaited, before the named call."""

    def __init__(self, replica: "Replica") -> None:
        self.id = replica.id
        self._replica = replica

    async def _pass(self, call: str) -> Moves:
        await asyncio.sleep(0)
        fault = self._replica.faults.get(call)
        if isinstance(fault, Exception):
            raise fault
        if fault == "silent":
            await asyncio.Event().wait()
        return self._replica.moves

    async def prepare(self, message: Prepare) -> Prepared:
        await self._pass("prepare")
        return await self._replica.calls.prepare(message)

    async def load(self, message: CopyRound) -> None:
        await (await self._pass("load")).load(message)

    async def receive(self, message: Chunk) -> None:
        await (await self._pass("receive")).receive(message)

    async def renew(self, migration: str) -> None:
        (await self._pass("renew")).renew(migration)

    async def adopt(self, message: Adopt) -> None:
        moves = await self._pass("adopt")
        await moves.adopt(message)
        await self._pass("adopted")

    async def cancel(self, migration: str) -> None:
        await self._pass("cancel")
        await self._replica.calls.cancel(migration)

    async def resumed(self, migration: str) -> float | None:
        return await (await self._pass("resumed")).resumed(migration)


class Replica:
    """One replica around a paced engine."""

    def __init__(
        self,
        name: str,
        cluster: "dict[ReplicaId, Replica]",
        engine: PacedEngine,
        transport: Transport,
        lease_s: float,
        limits: MigrationLimits,
        slot_blocks: int = SLOT_BLOCKS,
    ) -> None:
        self.id = ReplicaId(name)
        self.engine = engine
        self.faults: dict[str, Exception | str] = {}
        self.room = 10_000
        clock = asyncio.get_running_loop().time
        self.outboxes = Outboxes(clock)
        self.host = RequestHost(engine, self.outboxes, clock, lambda: self.room)
        workers = engine.fingerprint.workers
        self.slots = Slots(2, slot_blocks * engine.fingerprint.shard_bytes, [HostSegment.create] * workers)
        world = MigrationWorld(self.id, POOL, self.host, engine, transport, self.slots, limits, clock, time.time)
        self.moves = Moves(world, self.host, lambda to: LocalPeer(cluster[to]), lease_s)
        self.copies = Copies(world, engine, lambda to: LocalPeer(cluster[to]), loads_no_adapter, lease_s)
        self.calls = calls_of(self.id, self.moves, engine, limits.adopt_s)

    @property
    def idle(self) -> bool:
        """Nothing runs, nothing is held: no request, block, slot, reservation or migration."""
        return not (
            list(self.host.loads())
            or self.slots.in_use
            or self.host.reserved_tokens
            or self.moves.pending
            or self.copies.outgoing
            or not is_unused(self.engine)
        )


@dataclass
class Pair:
    """Replicas a and b, and one ingress that reads both."""

    a: Replica
    b: Replica
    cursors: dict[RequestId, Cursor] = field(default_factory=dict)
    events: list[StreamEvent] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """Of the orders to move."""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    readers: list[asyncio.Task[None]] = field(default_factory=list)
    attach: bool = True

    def replica(self, name: str) -> Replica:
        return {self.a.id: self.a, self.b.id: self.b}[ReplicaId(name)]

    def submit(self, spec: RequestSpec, on: str = "a", then: Move | None = None) -> Cursor:
        self.cursors[spec.id] = Cursor()
        self.replica(on).moves.submit(spec, 0, (), then)
        return self.cursors[spec.id]

    def move(
        self,
        request: RequestId,
        source: str = "a",
        target: str = "b",
        path: PathRequest = PathRequest.KV,
        reason: Reason = Reason.MANUAL,
    ) -> MigrationRecord:
        order = Order(f"m-{next(self.numbers)}-{source}{target}", request, path, reason)
        return self.replica(source).moves.start(order, ReplicaId(target))

    async def settled(self, source: str = "a") -> MigrationRecord:
        """The newest record of a replica once none of its migrations runs."""
        moves = self.replica(source).moves
        async with asyncio.timeout(10):
            while moves._tasks or not moves._done:
                await asyncio.sleep(0.001)
        return moves.records()[0]

    async def until(self, cursor: Cursor, tokens: int) -> None:
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(lambda: len(cursor.tokens) >= tokens)

    async def finished(self, cursor: Cursor) -> tuple[int, ...]:
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(lambda: cursor.finish is not None)
        return tuple(cursor.tokens)

    async def both_idle(self) -> None:
        async with asyncio.timeout(10):
            while not (self.a.idle and self.b.idle):
                await asyncio.sleep(0.005)

    async def read(self, replica: Replica) -> None:
        async for batch in replica.outboxes.read(INGRESS):
            async with self.changed:
                for event in batch:
                    self.take(event)
                self.changed.notify_all()

    def take(self, event: StreamEvent) -> None:
        self.events.append(event)
        cursor = self.cursors.get(event.request)
        match event:
            case Delta() if cursor:
                cursor.feed(event)
            case Moved() if cursor:
                cursor.moved(event)
                if self.attach:
                    self.replica(event.target).moves.attach(event.request, event.next_hop, cursor.next_index)
            case Doubt() if cursor and self.attach:
                for replica in (self.a, self.b):
                    if cursor.hop == event.hop:
                        replica.moves.keep(event.request, event.hop, event.next_hop)
                    else:
                        replica.moves.release(event.request, cursor.hop)
            case Moving() | Lost() | Delta() | Moved() | Doubt():
                pass


def spec(name: str = "r", prompt: int = 40, tokens: int = 60, seed: int | None = None, **sampling: Any) -> RequestSpec:
    """A greedy request with a prompt that no other request has; `sampling` are vLLM's sampling parameters."""
    draw = random.Random(name)
    ids = tuple(draw.randrange(3, 500) for _ in range(prompt))
    if seed is not None:
        sampling["seed"] = seed
    return plain_spec(name, ids, tokens, label=f"label-{name}", ingress=INGRESS, **sampling)


def make_pair(
    *,
    step_s: float = 0.001,
    lease_s: float = 1.0,
    limits: MigrationLimits = LIMITS,
    transport: Transport | None = None,
    model_b: str = "fake",
    cache_b: str = "fake-cache",
    workers: int = 1,
    workers_b: int | None = None,
    slot_blocks: int = SLOT_BLOCKS,
) -> Pair:
    """Two replicas whose streams are read; their engines take `step_s` for a step."""
    cluster: dict[ReplicaId, Replica] = {}
    engines = {
        "a": QuickEngine(step_s, workers=workers),
        "b": QuickEngine(step_s, model=model_b, cache=cache_b, workers=workers_b or workers),
    }
    for name, engine in engines.items():
        replica = Replica(name, cluster, engine, transport or SharedSlots(), lease_s, limits, slot_blocks)
        cluster[replica.id] = replica
    pair = Pair(cluster[ReplicaId("a")], cluster[ReplicaId("b")])
    pair.readers = [asyncio.create_task(pair.read(r)) for r in (pair.a, pair.b)]
    return pair
