"""Has replicas carry out moves: so many at a time, none between pairs that keep failing; knows what is under way."""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from migration.errors import PeerLost
from migration.estimates import Ordered
from migration.ports import Clock
from migration.protocol.messages import PathRequest
from migration.protocol.record import MigrationRecord, Outcome
from migration.run.source import Order
from policies.causes import PAIR_FAILURES
from policies.decision.breaker import Breaker
from policies.decision.observation import Underway
from policies.model import ReplicaId, RequestId
from policies.plan import Move, Reason

log = logging.getLogger("ray.serve")

_UNHEARD_S = 30.0
"""How long a move counts as under way of which its source says nothing more; the source has its own, shorter limits."""


class Sources(Protocol):
    """How replicas are reached."""

    async def move(self, source: ReplicaId, order: Order, target: ReplicaId) -> MigrationRecord:
        """Have `source` begin to move a request. Raises MigrationError."""
        ...


@dataclass(frozen=True, slots=True)
class Route:
    """The path of a move, and what both paths are predicted to take (seconds; None: nobody predicted it)."""

    path: PathRequest = PathRequest.AUTO
    kv_s: float | None = None
    tokens_s: float | None = None


@dataclass(slots=True)
class _Running:
    move: Underway
    since: float
    by_hand: bool = False
    ordered: Ordered | None = None


class Dispatch:
    """`per_replica` moves may leave one replica or come to it at a time, `at_once` are under way in all."""

    def __init__(
        self, sources: Sources, breaker: Breaker, clock: Clock, at_once: int = 32, per_replica: int = 4
    ) -> None:
        self._sources = sources
        self._breaker = breaker
        self._clock = clock
        self._at_once = at_once
        self._per_replica = per_replica
        self._running: dict[str, _Running] = {}
        self._took: list[float] = []
        self._by_hand: list[RequestId] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def admissible(self, moves: Iterable[Move]) -> list[Move]:
        """Those that may begin now, the first ones first. The others are decided anew in the next epoch."""
        now = self._clock()
        busy = Counter(end for r in self._running.values() for end in (r.move.source, r.move.target))
        moving = {r.move.request for r in self._running.values()}
        left = self._at_once - len(self._running)
        chosen = []
        for move in moves:
            ends = (move.source, move.target)
            free = all(busy[end] < self._per_replica for end in ends)
            barred = move.reason is not Reason.EVACUATE and self._breaker.blocks(ends, now)
            if left > 0 and free and move.request not in moving and not barred:
                chosen.append(move)
                busy.update(ends)
                left -= 1
        return chosen

    def begin(self, moves: Iterable[Move], routes: Mapping[RequestId, Route]) -> None:
        """Order moves, without waiting for the answers."""
        for move in moves:
            route = routes.get(move.request, Route())
            order = Order(new_id(), move.request, route.path, move.reason, route.kv_s, route.tokens_s)
            task = asyncio.create_task(self._begin(order, move))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _begin(self, order: Order, move: Move) -> None:
        try:
            await self.order(order, move, by_hand=False)
        except Exception as error:
            log.info("move of %s from %s to %s did not begin: %s", move.request, move.source, move.target, error)
            if not isinstance(error, PeerLost):
                return
            self._breaker.failed((move.source, move.target), self._clock())

    async def order(self, order: Order, move: Move, by_hand: bool) -> MigrationRecord:
        """Order one move, and wait until it has begun. Raises MigrationError if it does not."""
        self._running[order.id] = _Running(
            Underway(move.request, move.source, move.target), self._clock(), by_hand, Ordered(move, order.path.first)
        )
        try:
            record = await self._sources.move(move.source, order, move.target)
        except BaseException:
            self._running.pop(order.id, None)
            raise
        self.heard(record)
        return record

    def heard(self, record: MigrationRecord) -> None:
        """The newest word on a migration, also on one that this scheduler has not ordered."""
        if record.outcome is None:
            move = Underway(record.request_id, record.source, record.target)
            known = self._running.setdefault(record.id, _Running(move, self._clock()))
            known.since = self._clock()
        elif (ended := self._running.pop(record.id, None)) is not None:
            self._ended(record, ended)

    def _ended(self, record: MigrationRecord, ended: _Running) -> None:
        pair = (record.source, record.target)
        if record.outcome is Outcome.COMMITTED:
            self._breaker.succeeded(pair)
            self._took.append(record.duration_s or 0.0)
            if ended.by_hand:
                self._by_hand.append(record.request_id)
        elif record.cause in PAIR_FAILURES and self._breaker.failed(pair, self._clock()):
            log.warning("moves from %s to %s keep failing (%s): none for a while", *pair, record.error)

    def under_way(self) -> tuple[Underway, ...]:
        """The moves that have been ordered and have not ended."""
        limit = self._clock() - _UNHEARD_S
        self._running = {id: running for id, running in self._running.items() if running.since > limit}
        return tuple(running.move for running in self._running.values())

    def ordered(self) -> list[Ordered]:
        """Those of them that this scheduler has ordered, with their paths."""
        return [running.ordered for running in self._running.values() if running.ordered is not None]

    def take_results(self) -> tuple[tuple[float, ...], tuple[RequestId, ...]]:
        """Seconds that completed moves took, and requests that operators moved, since the last call."""
        took, by_hand = tuple(self._took), tuple(self._by_hand)
        self._took, self._by_hand = [], []
        return took, by_hand


def new_id() -> str:
    """A migration's id."""
    return uuid.uuid4().hex[:16]
