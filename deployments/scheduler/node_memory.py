"""The memory of the nodes: what the replicas of all pools hold by their reports, and the orders about their KV pools.

Each node has a ledger (`policies.memory.ledger`), so the replicas on it never hold more than its budget together:

    starting    a replica waits with its engine until the ledger has room for it. It counts with what the last replica
                of its pool needed at least; before the first has been measured, with its share of the budget
    running     in every epoch, `policies.decision` divides what is left by demand; orders follow, shrinks first
    by hand     an operator's size stays until the operator gives the replica back to the division
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from math import inf
from typing import Any

from deployments.api.calls import (
    MeasuredEngine,
    MoveAccepted,
    MoveAnswer,
    MoveRejected,
    SeatAnswer,
    SeatCall,
    SeatGiven,
    SeatLater,
    SeatRefused,
)
from deployments.api.protocols import ControlApi, RemoteReplicas
from deployments.api.report import ElasticMemory
from deployments.config import MemorySettings
from deployments.serve.seats import ClaimStore, SeatClaim
from migration.concurrency import Tasks
from migration.memory.tables import PoolState
from migration.protocol.errors import MigrationError, PeerLost
from migration.protocol.ports import Clock
from policies.decision.devices import Division, SeatSize
from policies.decision.observation import Device, DeviceSeat
from policies.memory.ladder import DeviceState, SeatState
from policies.memory.ledger import DeviceLedger, MemoryOrder, MemoryReport, OrderNumber, Seat
from policies.memory.plan import ASLEEP, MemoryPlan, ModelMemory, mib_of
from policies.model import Blocks, Bytes, PoolId, ReplicaId

log = logging.getLogger("ray.serve")

CLAIM_S = 10.0
"""The time within which Serve lists a replica that has asked for memory, in seconds."""

WAIT_S = 5.0
"""A replica that has not asked again for this time, in seconds, no longer waits."""

REPEAT_S = 5.0
"""The time between two orders of a resize that keeps failing, in seconds."""

_ORDER_S = 5.0
"""The longest wait for the answer to an order, in seconds. The order counts also without."""

_UNKNOWN = "a replica has not reported to this scheduler yet"


@dataclass(frozen=True, slots=True)
class ReportedMemory:
    """A replica's KV pool by its newest report, with `block_tokens` tokens in a block, and its node."""

    node: str
    memory: ElasticMemory
    block_tokens: int = 1


@dataclass(frozen=True, slots=True)
class BudgetedPool:
    """The replicas of a model that share the memory of nodes with others.

    `bounds` gives the fewest and the most replicas, `is_gone` is true for a replica that Serve does not list.
    """

    replicas: RemoteReplicas[ControlApi]
    weight: float
    bounds: Callable[[], tuple[int, int]]
    is_gone: Callable[[ReplicaId], bool]


@dataclass(slots=True)
class _Waiting:
    """A replica that waits for `size` bytes, and last asked `at` a time."""

    pool: PoolId
    node: str
    size: Bytes
    at: float
    reason: str


class NodeMemory:
    """The ledgers of all nodes, for one scheduler. `acts` is true while divisions are ordered."""

    def __init__(
        self,
        settings: MemorySettings,
        fence: int,
        pools: Mapping[PoolId, BudgetedPool],
        store: ClaimStore,
        acts: Callable[[], bool],
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._fence = fence
        self._pools = pools
        self._store = store
        self._acts = acts
        self._clock = clock
        self._ledgers: dict[str, DeviceLedger] = {}
        self._reported: dict[PoolId, Mapping[ReplicaId, ReportedMemory]] = {}
        self._serving: dict[PoolId, frozenset[ReplicaId]] = {}
        self._pool_of: dict[ReplicaId, PoolId] = {}
        self._models: dict[PoolId, ModelMemory] = {}
        self._claims: dict[ReplicaId, SeatClaim] = {}
        self._claimed_at: dict[ReplicaId, float] = {}
        self._waiting: dict[ReplicaId, _Waiting] = {}
        self._lacks: dict[ReplicaId, str] = {}
        """The reasons why measured engines do not serve yet."""
        self._ordering: Counter[ReplicaId] = Counter()
        """The number of orders under way to each replica."""
        self._sizes: dict[ReplicaId, SeatSize] = {}
        self._repeated_at: dict[ReplicaId, float] = {}
        self._tasks = Tasks()
        if self.is_elastic:
            self._restore()

    @property
    def is_elastic(self) -> bool:
        """True if KV pools change their sizes."""
        return self._settings.budget_mib is not None

    # --- reports --------------------------------------------------------------------------------------

    def take(self, pool: PoolId, reported: Mapping[ReplicaId, ReportedMemory], serving: Iterable[ReplicaId]) -> None:
        """Follow the newest reports of a pool's replicas; `serving` are all that serve, silent ones included.

        A replica that has become silent counts with its last report until Serve no longer lists it.
        """
        if not self.is_elastic:
            return
        self._reported[pool], self._serving[pool] = reported, frozenset(serving)
        for replica in [replica for replica, of in self._pool_of.items() if of == pool]:
            if replica not in reported and not self._is_here(pool, replica):
                self._forget(replica)
        for replica, found in reported.items():
            self._models[pool] = found.memory.model
            self._take(pool, replica, found)
        for node in [node for node, ledger in self._ledgers.items() if not ledger.seats]:
            del self._ledgers[node]

    def _is_here(self, pool: PoolId, replica: ReplicaId) -> bool:
        """True for a replica without a report that has its processes: it is silent, it starts, or it stops.

        Serve's router drops a replica that stops before Serve's list shows that.
        """
        if replica in self._serving[pool] or not self._pools[pool].is_gone(replica):
            return True
        return replica in self._claims and self._clock() - self._claimed_at[replica] < CLAIM_S

    def _take(self, pool: PoolId, replica: ReplicaId, found: ReportedMemory) -> None:
        ledger, memory = self._ledger(found.node), found.memory
        seat = next((seat for seat in ledger.seats if seat.replica == replica), None)
        if seat is None or seat.model.is_claimed:
            ledger = ledger.without(replica).with_seat(Seat(replica, memory.model, MemoryPlan(memory.declared)))
        else:
            ledger = ledger.measured(replica, memory.model)
        self._pool_of[replica] = pool
        self._ledgers[found.node] = ledger.take(memory.report)
        self._end_claim(replica)

    def _forget(self, replica: ReplicaId) -> None:
        self._end_claim(replica)
        for node, ledger in self._ledgers.items():
            self._ledgers[node] = ledger.without(replica)
        del self._pool_of[replica]
        self._sizes.pop(replica, None)
        self._repeated_at.pop(replica, None)
        self._lacks.pop(replica, None)

    def _ledger(self, node: str) -> DeviceLedger:
        return self._ledgers.get(node) or DeviceLedger(self._budget, self._fence)

    @property
    def _budget(self) -> Bytes:
        assert self._settings.budget_mib is not None
        return Bytes(self._settings.budget_mib << 20)

    def _is_known(self) -> bool:
        """True once all replicas that serve have reported to this scheduler: the node of another one may be any."""
        if self._serving.keys() != self._pools.keys():
            return False
        measured = {s.replica for each in self._ledgers.values() for s in each.seats if not s.model.is_claimed}
        is_known = all(ledger.is_known for ledger in self._ledgers.values())
        return is_known and all(serving <= measured for serving in self._serving.values())

    # --- replicas that start --------------------------------------------------------------------------

    def _restore(self) -> None:
        """Count the replicas that start with what the scheduler before has given them."""
        self._claims = {replica: claim for replica, claim in self._store.read().items() if claim.pool in self._pools}
        for replica, claim in self._claims.items():
            self._ledgers[claim.node] = self._ledger(claim.node).claim(replica, claim.size)
            self._pool_of[replica], self._claimed_at[replica] = claim.pool, self._clock()

    def seat(self, call: SeatCall) -> SeatAnswer:
        """See `SeatApi.seat`."""
        if not self._is_known():
            return SeatLater(_UNKNOWN)
        if call.measured is None:
            return self._claim(call)
        return self._begin(call, call.measured)

    def _claim(self, call: SeatCall) -> SeatAnswer:
        """Have a replica start its engine."""
        model = self._models.get(call.pool)
        ledger = self._ledger(call.node)
        size = self._first_size(call.pool, ledger) if model is None else model.least
        if call.replica not in self._claims:
            before = self._reserved(ledger, call.node, until=call.replica)
            if ledger.room < before + size:
                return self._wait(call, size, self._lack(ledger, size))
            self._put(call, ledger.claim(call.replica, size), size)
        return SeatGiven(MemoryPlan(Blocks(0)), self._at(call))

    def _begin(self, call: SeatCall, measured: MeasuredEngine) -> SeatAnswer:
        """Give a measured engine the KV pool of its start, or have it wait for the smallest that it can serve with."""
        model, ledger = measured.model, self._ledger(call.node)
        seat = next((seat for seat in ledger.seats if seat.replica == call.replica), None)
        if seat is not None and not seat.model.is_claimed and seat.reported is not None:
            return SeatGiven(seat.reported.ordered, seat.reported.at)
        if refusal := self._refusal(call, model):
            return SeatRefused(refusal)
        self._models[call.pool] = model
        others = ledger.without(call.replica)
        room = others.room - self._reserved(others, call.node)
        blocks = min(measured.size, model.blocks_in(min(self._share(call.pool), room)))
        plan = MemoryPlan(Blocks(max(model.floor, blocks)))
        seated = others.start(call.replica, model, MemoryPlan(measured.declared), plan)
        if seated is None:
            # It has its parameters already: it counts with them, and other replicas shrink.
            if first := self._blocking(call, others, model.least):
                self._lacks.pop(call.replica, None)
                return SeatRefused(f"{self._lack(others, model.least)}: replica {first} waits with its engine, too")
            size = Bytes(max(model.least, 0 if seat is None else seat.bound))
            self._put(call, ledger.claim(call.replica, size), size)
            reason = self._lacks[call.replica] = self._lack(others, size)
            return SeatLater(reason)
        self._lacks.pop(call.replica, None)
        self._put(call, seated, model.need(plan))
        return SeatGiven(plan, self._at(call))

    def _blocking(self, call: SeatCall, others: DeviceLedger, least: Bytes) -> ReplicaId | None:
        """The first measured engine that waits, if both would wait for ever, each for what the other one has."""
        lacking = [r for r in self._lacks if r == call.replica or any(seat.replica == r for seat in others.seats)]
        if not lacking or lacking[0] == call.replica or self._floors(others) + least <= others.budget:
            return None
        return lacking[0]

    def _at(self, call: SeatCall) -> OrderNumber:
        reported = self._ledgers[call.node].seat(call.replica).reported
        assert reported is not None, "a replica that starts has nothing to report"
        return reported.at

    def _put(self, call: SeatCall, ledger: DeviceLedger, size: Bytes) -> None:
        """Store a starting replica's claim, and then count it: one that is not stored is not given."""
        claim = SeatClaim(call.pool, call.node, size)
        if self._claims.get(call.replica) != claim:
            self._store_claims(self._claims | {call.replica: claim})
        self._ledgers[call.node] = ledger
        self._waiting.pop(call.replica, None)
        self._pool_of[call.replica], self._claimed_at[call.replica] = call.pool, self._clock()

    def _end_claim(self, replica: ReplicaId) -> None:
        """Its reports count from now on, or it is gone."""
        if replica in self._claims:
            self._store_claims({r: claim for r, claim in self._claims.items() if r != replica})
            del self._claimed_at[replica]

    def _store_claims(self, claims: dict[ReplicaId, SeatClaim]) -> None:
        self._store.write(claims)
        self._claims = claims

    def _wait(self, call: SeatCall, size: Bytes, reason: str) -> SeatLater:
        waiting = self._waiting.setdefault(call.replica, _Waiting(call.pool, call.node, size, 0.0, reason))
        waiting.size, waiting.at, waiting.reason = size, self._clock(), reason
        return SeatLater(reason)

    def _reserved(self, ledger: DeviceLedger, node: str, until: ReplicaId | None = None) -> int:
        """The bytes of the replicas that wait, and that others can make room for, in the order of their first calls."""
        now, reserved = self._clock(), 0
        self._waiting = {replica: each for replica, each in self._waiting.items() if now - each.at < WAIT_S}
        floors = self._floors(ledger)
        for replica, waiting in self._waiting.items():
            if replica == until:
                break
            if waiting.node == node and floors + reserved + waiting.size <= ledger.budget:
                reserved += waiting.size
        return reserved

    def _floors(self, ledger: DeviceLedger) -> int:
        """The bytes that the replicas keep when divisions leave them the least."""
        return sum(seat.model.least if self._is_divided(seat) else seat.bound for seat in ledger.seats)

    def _first_size(self, pool: PoolId, ledger: DeviceLedger) -> Bytes:
        """The bytes of a replica before any of its pool has been measured: its share, or all that others can leave."""
        share, left = self._share(pool), ledger.budget - self._floors(ledger)
        return Bytes(min(share, left)) if left > 0 else share

    def _share(self, pool: PoolId) -> Bytes:
        """The part of a node's budget for a replica of a pool, if all replicas of all pools are on the node."""
        weights = sum(each.weight * each.bounds()[1] for each in self._pools.values())
        return Bytes(int(self._budget * self._pools[pool].weight / weights))

    def _lack(self, ledger: DeviceLedger, size: Bytes) -> str:
        return f"it needs {mib_of(size)} MiB of memory.budget_mib, and {mib_of(max(0, ledger.room))} MiB are free"

    def _refusal(self, call: SeatCall, model: ModelMemory) -> str | None:
        """The reason why a replica can never start: the floors of the fewest replicas exceed all budgets."""
        models = self._models | {call.pool: model}
        needed = {pool: (self._pools[pool].bounds()[0], each.least) for pool, each in models.items()}
        nodes = len({*self._ledgers, call.node})
        if model.least <= self._budget and sum(n * least for n, least in needed.values()) <= nodes * self._budget:
            return None
        parts = (model.parameters, model.fixed, model.floor * model.block)
        names = "parameters", "processes", "KV of one request of max_model_len"
        listed = " + ".join(f"{mib_of(part)} ({name})" for part, name in zip(parts, names, strict=True))
        text = f"memory.budget_mib: a replica needs {listed} = {mib_of(model.least)} MiB"
        if model.least <= self._budget:
            fewest = " + ".join(f"{n} x {mib_of(least)} ({pool})" for pool, (n, least) in sorted(needed.items()))
            text += f", the fewest replicas {fewest} MiB"
        budgets = f"{self._settings.budget_mib} MiB" + (f" on each of {nodes} nodes" if nodes > 1 else "")
        return f"{text}, and the budget is {budgets}: raise it, or lower min_replicas or max_model_len"

    # --- the division ---------------------------------------------------------------------------------

    def devices(self) -> tuple[Device, ...]:
        """The memory of the nodes that a division may give to KV pools; nothing before all replicas have reported."""
        if not self.is_elastic or not self._is_known():
            return ()
        return tuple(self._device(node, ledger) for node, ledger in sorted(self._ledgers.items()))

    def waiting(self) -> tuple[ReplicaId, ...]:
        """The replicas that have no memory to start yet, or too little to serve."""
        now = self._clock()
        asking = (replica for replica, each in self._waiting.items() if now - each.at < WAIT_S)
        return tuple(sorted({*asking, *self._lacks}))

    def _device(self, node: str, ledger: DeviceLedger) -> Device:
        room, seats = ledger.budget - self._reserved(ledger, node), []
        for seat in ledger.seats:
            if not self._is_divided(seat):
                room -= seat.bound
                continue
            pool = self._pool_of[seat.replica]
            found = self._reported[pool][seat.replica]
            room -= seat.model.need(MemoryPlan(Blocks(0)))
            weight, blocks = self._pools[pool].weight, _ordered(seat)
            seats.append(
                DeviceSeat(seat.replica, weight, seat.model, found.block_tokens, found.memory.declared, blocks)
            )
        return Device(node, Bytes(room), tuple(seats))

    def _is_divided(self, seat: Seat) -> bool:
        """True if divisions size the replica: it reports, is awake, in no pair, and has no size by hand."""
        reported, pool = seat.reported, self._pool_of.get(seat.replica)
        if seat.model.is_claimed or reported is None or pool is None or reported.by_hand:
            return False
        found = self._reported.get(pool, {}).get(seat.replica)
        # A wake that has failed is ordered still, and one under way has all of its memory.
        awake = reported.ordered.is_awake and reported.held.is_awake
        if not awake or found is None or found.memory.is_paired:
            return False
        return found.memory.state not in (PoolState.ASLEEP, PoolState.LOADING)

    def follow(self, division: Division) -> None:
        """Take a division: orders follow while the mode is `act`, shrinks first.

        A replica that grows gets no more than others have given back; the next division orders the rest.
        """
        self._sizes = {size.replica: size for sizes in division.values() for size in sizes}
        if not self._acts():
            return
        for node, sizes in division.items():
            changes = []
            for size in sizes:
                seat = next((s for s in self._ledger(node).seats if s.replica == size.replica), None)
                if seat is not None and self._is_divided(seat) and not self._ordering[size.replica]:
                    changes.append((size.blocks - _ordered(seat), size))
            for _, size in sorted(changes, key=lambda change: (change[0], change[1].replica)):
                if (given := self._order_of(node, size)) is not None:
                    self._ledgers[node], order = given
                    self._tasks.start(self._order(node, order, self._pool_of[size.replica]))
                    self._ordering[size.replica] += 1

    def _order_of(self, node: str, size: SeatSize) -> tuple[DeviceLedger, MemoryOrder] | None:
        """The order that a replica's part is. If its size stays, and the last resize has failed: the same one again."""
        ledger, replica = self._ledgers[node], size.replica
        if (given := ledger.order_size(replica, size.blocks)) is not None:
            return given
        found, newest = self._reported[self._pool_of[replica]][replica].memory, ledger.seat(replica).reported
        if newest is None or found.cause is None or self._clock() - self._repeated_at.get(replica, -inf) < REPEAT_S:
            return None
        self._repeated_at[replica] = self._clock()
        return ledger.order(replica, newest.ordered)

    async def _order(self, node: str, order: MemoryOrder, pool: PoolId) -> None:
        """Send an order of a division. Without an answer, the next division orders again."""
        try:
            async with asyncio.timeout(_ORDER_S):
                await self._send(node, order, pool)
        except (MigrationError, TimeoutError) as error:
            log.debug("replica %s has not answered an order of memory: %r", order.replica, error)
        finally:
            self._ordering[order.replica] -= 1

    async def _send(self, node: str, order: MemoryOrder, pool: PoolId) -> MemoryReport:
        """Send an order, and take its answer. Raises MigrationError; the order may have arrived, and counts."""
        replica = self._pools[pool].replicas.at(order.replica)
        report = await replica.set_memory(order, self._settings.shrink_s, self._fence)
        ledger = self._ledgers.get(node)
        if ledger is not None and any(seat.replica == order.replica for seat in ledger.seats):
            self._ledgers[node] = ledger.take(report)
        return report

    # --- for operators --------------------------------------------------------------------------------

    async def set_blocks(self, replica: ReplicaId, blocks: int | None) -> MoveAnswer:
        """Order the size of a replica's KV pool, which it keeps; None: divisions size it, or it gets that of its start.

        The latter if the mode is not `act`.
        """
        if not self.is_elastic:
            return MoveRejected(422, "memory.budget_mib is not set: KV pools keep their sizes")
        pool = self._pool_of.get(replica)
        found = None if pool is None else self._reported.get(pool, {}).get(replica)
        if found is None:
            return MoveRejected(HTTPStatus.SERVICE_UNAVAILABLE, f"replica {replica} has not reported yet; try again")
        memory = found.memory
        if not memory.report.ordered.is_awake:
            return MoveRejected(HTTPStatus.CONFLICT, f"replica {replica} is asleep: wake it first")
        as_divided = memory.report.ordered.blocks if self._acts() else memory.start
        wanted = Blocks((as_divided or memory.start) if blocks is None else blocks)
        if refusal := _out_of_bounds(memory, wanted):
            return MoveRejected(422, refusal)
        if not self._is_known():
            return MoveRejected(503, f"{_UNKNOWN}; try again")
        ledger = self._ledgers[found.node]
        seat, kept = ledger.seat(replica), self._reserved(ledger, found.node)
        plan = MemoryPlan(wanted, memory.report.ordered.remote)
        ordered = ledger.order(replica, plan, by_hand=blocks is not None)
        if ordered is None or 0 < memory.model.need(plan) - seat.bound > ledger.room - kept:
            return MoveRejected(422, _over_budget(ledger.room, kept, seat, wanted))
        self._ledgers[found.node], order = ordered
        return await self._send_by_hand(found.node, order)

    async def _send_by_hand(self, node: str, order: MemoryOrder) -> MoveAnswer:
        """Send an order of which somebody wants the outcome. No division orders the replica meanwhile."""
        replica = order.replica
        self._ordering[replica] += 1
        try:
            report = await self._send(node, order, self._pool_of[replica])
        except PeerLost as error:
            # The order may have arrived: the ledger counts it until a newer one to the replica is answered.
            return MoveRejected(503, str(error))
        except MigrationError as error:
            return MoveRejected(422, str(error))
        finally:
            self._ordering[replica] -= 1
        if report.at == order.at and report.ordered != order.plan:
            reason = f"replica {replica} is in a pair, or changes its layers: undo it (mell unpair), or try again"
            return MoveRejected(HTTPStatus.CONFLICT, reason)
        return MoveAccepted(replica)

    # --- sleep ----------------------------------------------------------------------------------------

    async def sleep(self, replica: ReplicaId) -> MoveAnswer:
        """Order a replica to drop its parameters and its KV pool."""
        if (refusal := self._why_not(replica)) is not None:
            return refusal
        if (reason := self.why_sleepless(replica)) is not None:
            return MoveRejected(422, reason)
        return await self._order_plan(replica, ASLEEP)

    async def wake(self, replica: ReplicaId) -> MoveAnswer:
        """Order a replica to be awake, with the KV pool of its start or, without room for it, a smaller one.

        If there is no room for the smallest, divisions have others shrink for it, where they can: the order may be
        repeated.
        """
        if (refusal := self._why_not(replica)) is not None:
            return refusal
        found = self._found(replica)
        assert found is not None, "it has reported"
        ledger, memory, pool = self._ledgers[found.node], found.memory, self._pool_of[replica]
        bound = ledger.seat(replica).bound
        left = ledger.room - self._reserved(ledger, found.node, until=replica) + bound
        blocks = min(memory.start, memory.model.blocks_in(left))
        if blocks < memory.model.floor:
            least = memory.model.least
            reason = f"awake it needs {mib_of(least)} MiB, and {mib_of(max(0, left))} MiB are free for it"
            self._waiting.setdefault(replica, _Waiting(pool, found.node, Bytes(least - bound), 0.0, reason))
            self._waiting[replica].at = self._clock()
            return MoveRejected(HTTPStatus.SERVICE_UNAVAILABLE, reason)
        self._waiting.pop(replica, None)
        return await self._order_plan(replica, MemoryPlan(blocks))

    def why_sleepless(self, replica: ReplicaId) -> str | None:
        """The reason why a replica cannot sleep; None if it can, or has not reported."""
        found = self._found(replica)
        return None if found is None else found.memory.sleepless

    def why_not_woken(self, replica: ReplicaId) -> str | None:
        """The reason why a replica sleeps that was ordered to wake."""
        found = self._found(replica)
        return None if found is None or not found.memory.report.ordered.is_awake else found.memory.cause

    def least(self, replicas: Iterable[ReplicaId]) -> Bytes:
        """The most bytes that one of these replicas needs awake, at its floor."""
        found = (self._found(replica) for replica in replicas)
        return Bytes(max((each.memory.model.least for each in found if each is not None), default=0))

    def ladder(self, asleep: Collection[ReplicaId], waking: Collection[ReplicaId]) -> tuple[DeviceState, ...]:
        """The nodes, with the replicas on them; those `asleep` may be ordered to be, those `waking` to wake.

        A replica that divisions size can shrink to its floor.
        """
        found = []
        for number, (_, ledger) in enumerate(sorted(self._ledgers.items())):
            seats = tuple(self._seat_state(seat, asleep) for seat in ledger.seats)
            is_waking = any(seat.replica in waking for seat in ledger.seats)
            found.append(DeviceState(number, ledger.budget, seats, is_waking))
        return tuple(found)

    def _seat_state(self, seat: Seat, asleep: Collection[ReplicaId]) -> SeatState:
        sleeps = seat.replica in asleep or (seat.reported is not None and not seat.reported.ordered.is_awake)
        held = seat.model.least if self._is_divided(seat) else seat.bound
        size = seat.model.asleep if sleeps else held
        return SeatState(seat.replica, self._pool_of[seat.replica], not sleeps, size, seat.model.asleep)

    def _found(self, replica: ReplicaId) -> ReportedMemory | None:
        pool = self._pool_of.get(replica)
        return None if pool is None else self._reported.get(pool, {}).get(replica)

    def _why_not(self, replica: ReplicaId) -> MoveRejected | None:
        """The reason why nothing can be ordered now."""
        if not self.is_elastic:
            return MoveRejected(422, "memory.budget_mib is not set: no replica sleeps")
        if self._found(replica) is None or not self._is_known():
            return MoveRejected(HTTPStatus.SERVICE_UNAVAILABLE, f"{_UNKNOWN}; try again")
        return None

    async def _order_plan(self, replica: ReplicaId, plan: MemoryPlan) -> MoveAnswer:
        found = self._found(replica)
        ordered = None if found is None else self._ledgers[found.node].order(replica, plan)
        if found is None or ordered is None:
            return MoveRejected(HTTPStatus.SERVICE_UNAVAILABLE, f"{_UNKNOWN}; try again")
        self._ledgers[found.node], order = ordered
        return await self._send_by_hand(found.node, order)

    def to_json(self) -> list[dict[str, Any]]:
        """The member `devices` of `/mell/state`."""
        waiting = {each.node for each in self._waiting.values()}
        return [self._device_json(node) for node in sorted({*self._ledgers, *waiting})]

    def _device_json(self, node: str) -> dict[str, Any]:
        ledger = self._ledger(node)
        seats = [self._seat_json(seat) for seat in ledger.seats]
        seats += [
            {"replica": replica, "pool": each.pool, "by": "waits", "held_mib": 0, "ordered_mib": mib_of(each.size)}
            | {"why": each.reason}
            for replica, each in self._waiting.items()
            if each.node == node
        ]
        return {
            "id": node,
            "budget_mib": self._settings.budget_mib,
            "ordered_mib": mib_of(ledger.bound),
            "held_mib": mib_of(sum(seat.model.need(seat.reported.held) for seat in ledger.seats if seat.reported)),
            "seats": seats,
        }

    def _seat_json(self, seat: Seat) -> dict[str, Any]:
        """The part of a replica. `want` and `target` are those of its KV pool by the newest division."""
        reported, block = seat.reported, seat.model.block
        held = seat.bound if reported is None else seat.model.need(reported.held)
        found: dict[str, Any] = {
            "replica": seat.replica,
            "pool": self._pool_of.get(seat.replica),
            "by": self._by(seat),
            "held_mib": mib_of(held),
            "ordered_mib": mib_of(seat.bound),
        }
        if (size := self._sizes.get(seat.replica)) is None or not self._is_divided(seat):
            return found | {"why": self._lacks.get(seat.replica) or _WHY.get(found["by"], "")}
        target = size.blocks * block
        if size.want > target:
            why = "its requests want more than there is for it"
        elif size.blocks <= seat.model.floor:
            why = "it keeps the least, one request of max_model_len"
        else:
            why = "its requests have what they want; the rest is for its prefix cache"
        return found | {"want_mib": mib_of(size.want), "target_mib": mib_of(target), "why": why}

    def _by(self, seat: Seat) -> str:
        """The origin of a replica's size."""
        if seat.model.is_claimed or seat.replica in self._claims:
            return "starts"
        if seat.reported is None or seat.replica not in self._reported.get(self._pool_of[seat.replica], {}):
            return "silent"
        if not seat.reported.ordered.is_awake:
            return "asleep"
        if seat.reported.by_hand:
            return "hand"
        return "demand" if self._acts() and seat.replica in self._sizes else "start"


_WHY: Mapping[str, str] = {
    "starts": "it starts",
    "silent": "it does not report: it counts with its last report and orders",
    "asleep": "it sleeps",
    "hand": "an operator has ordered its size",
    "start": "it has the size of its start",
}


def _ordered(seat: Seat) -> Blocks:
    """The blocks that a replica which is awake is ordered to have, by its newest report."""
    blocks = None if seat.reported is None else seat.reported.ordered.blocks
    assert blocks is not None, "a replica that is awake has blocks"
    return blocks


def _out_of_bounds(memory: ElasticMemory, wanted: Blocks) -> str | None:
    """The reason why the replica cannot have the wanted blocks, whatever others have."""
    if wanted < memory.least:
        lacks = (
            "have room for layers that come back" if memory.report.ordered.remote else "hold a request of max_model_len"
        )
        return f"a pool of {wanted} blocks does not {lacks}: write {memory.least} or more"
    if wanted > memory.declared:
        return f"{wanted} blocks are more than the {memory.declared} that the replica can have (memory.declared)"
    return None


def _over_budget(room: int, kept: int, seat: Seat, wanted: Blocks) -> str:
    """The reason why the replica cannot have the wanted blocks now: of `room` bytes, `kept` are for others."""
    remote = 0 if seat.reported is None else seat.reported.ordered.remote
    most = min(seat.declared.blocks or 0, seat.model.blocks_in(max(0, room - kept) + seat.bound, remote))
    starts = f", {mib_of(kept)} MiB are kept for replicas that start" if kept else ""
    free = f"{mib_of(max(0, room))} MiB are free{starts}"
    least = max(seat.model.floor, most)
    return f"{wanted} blocks exceed memory.budget_mib: {free}, so the replica can have {least} blocks"
