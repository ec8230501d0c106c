"""Replicas that need memory to serve: they start or wake, and wait until the ledger of their node has room.

A replica counts with what the last one of its pool needed at least; before the first has been measured, with its share
of the budget. While it waits, no order of another replica takes the room that divisions make for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from deployments.api.calls import MeasuredEngine, SeatAnswer, SeatCall, SeatGiven, SeatLater, SeatRefused
from deployments.scheduler.memory.ledgers import UNKNOWN, BudgetedPool, NodeLedgers
from deployments.serve.seats import SeatClaim
from migration.protocol.ports import Clock
from policies.memory.ledger import DeviceLedger, OrderNumber
from policies.memory.plan import MemoryPlan, ModelMemory, mib_of
from policies.model import Blocks, Bytes, PoolId, ReplicaId

WAIT_S = 5.0
"""A replica that has not asked again for this time, in seconds, no longer waits."""


@dataclass(frozen=True, slots=True)
class SeatWait:
    """A replica that waits for `size` bytes, and last asked `at` a time."""

    pool: PoolId
    node: str
    size: Bytes
    at: float
    reason: str


class StartingSeats:
    """Gives memory to replicas that start, in the order of their first calls."""

    def __init__(self, ledgers: NodeLedgers, pools: Mapping[PoolId, BudgetedPool], clock: Clock) -> None:
        self._ledgers = ledgers
        self._pools = pools
        self._clock = clock
        self._waits: dict[ReplicaId, SeatWait] = {}
        self._lacks: dict[ReplicaId, str] = {}

    @property
    def waits(self) -> Mapping[ReplicaId, SeatWait]:
        """The replicas that wait for memory, in the order of their first calls."""
        now = self._clock()
        self._waits = {replica: each for replica, each in self._waits.items() if now - each.at < WAIT_S}
        return self._waits

    @property
    def lacks(self) -> Mapping[ReplicaId, str]:
        """The reasons why measured engines do not serve yet, in the order of their first calls."""
        self._lacks = {r: reason for r, reason in self._lacks.items() if self._ledgers.home(r) is not None}
        return self._lacks

    def waiting(self) -> tuple[ReplicaId, ...]:
        """The replicas that have no memory to start yet, or too little to serve."""
        return tuple(sorted({*self.waits, *self.lacks}))

    def reserved(self, node: str, ledger: DeviceLedger, until: ReplicaId | None = None) -> Bytes:
        """The bytes of a node for replicas that wait, those that others can make room for; of those before `until`."""
        reserved, floors = 0, self._floors(ledger)
        for replica, waiting in self.waits.items():
            if replica == until:
                break
            if waiting.node == node and floors + reserved + waiting.size <= ledger.budget:
                reserved += waiting.size
        return Bytes(reserved)

    def add_wait(self, replica: ReplicaId, pool: PoolId, node: str, size: Bytes, reason: str) -> None:
        """Have a replica wait for `size` bytes, behind those that wait already. It may be repeated."""
        self._waits[replica] = SeatWait(pool, node, size, self._clock(), reason)

    def end_wait(self, replica: ReplicaId) -> None:
        """Forget that a replica waits: it has its memory."""
        self._waits.pop(replica, None)

    # --- calls of replicas that start -----------------------------------------------------------------

    def seat(self, call: SeatCall) -> SeatAnswer:
        """See `SeatApi.seat`."""
        if not self._ledgers.is_known:
            return SeatLater(UNKNOWN)
        if call.measured is None:
            return self._claim(call)
        return self._begin(call, call.measured)

    def _claim(self, call: SeatCall) -> SeatAnswer:
        """Have a replica start its engine."""
        model = self._ledgers.models.get(call.pool)
        ledger = self._ledgers.on(call.node)
        size = self._first_size(call.pool, ledger) if model is None else model.least
        if not self._ledgers.is_claimed(call.replica):
            before = self.reserved(call.node, ledger, until=call.replica)
            if ledger.room < before + size:
                reason = _lack(ledger, size)
                self.add_wait(call.replica, call.pool, call.node, size, reason)
                return SeatLater(reason)
            self._give(call, ledger.claim(call.replica, size), size)
        return SeatGiven(MemoryPlan(Blocks(0)), self._at(call))

    def _begin(self, call: SeatCall, measured: MeasuredEngine) -> SeatAnswer:
        """Give a measured engine the KV pool of its start, or have it wait for the smallest that it can serve with."""
        model, ledger = measured.model, self._ledgers.on(call.node)
        seat = self._ledgers.seat_of(call.replica)
        if seat is not None and not seat.model.is_claimed and seat.reported is not None:
            return SeatGiven(seat.reported.ordered, seat.reported.at)
        if refusal := self._refusal(call, model):
            return SeatRefused(refusal)
        self._ledgers.take_measurement(call.pool, model)
        others = ledger.without(call.replica)
        room = others.room - self.reserved(call.node, others)
        blocks = min(measured.size, model.blocks_in(min(self._share(call.pool), room)))
        plan = MemoryPlan(Blocks(max(model.floor, blocks)))
        seated = others.start(call.replica, model, MemoryPlan(measured.declared), plan)
        if seated is None:
            # It has its parameters already: it counts with them, and other replicas shrink.
            if first := self._blocking(call, others, model.least):
                self._lacks.pop(call.replica, None)
                return SeatRefused(f"{_lack(others, model.least)}: replica {first} waits with its engine, too")
            size = Bytes(max(model.least, 0 if seat is None else seat.bound))
            self._give(call, ledger.claim(call.replica, size), size)
            reason = self._lacks[call.replica] = _lack(others, size)
            return SeatLater(reason)
        self._lacks.pop(call.replica, None)
        self._give(call, seated, model.need(plan))
        return SeatGiven(plan, self._at(call))

    def _give(self, call: SeatCall, ledger: DeviceLedger, size: Bytes) -> None:
        self._ledgers.claim(call.replica, SeatClaim(call.pool, call.node, size), ledger)
        self.end_wait(call.replica)

    def _blocking(self, call: SeatCall, others: DeviceLedger, least: Bytes) -> ReplicaId | None:
        """The first measured engine that waits, if both would wait for ever, each for what the other one has."""
        lacking = [r for r in self.lacks if r == call.replica or any(seat.replica == r for seat in others.seats)]
        if not lacking or lacking[0] == call.replica or self._floors(others) + least <= others.budget:
            return None
        return lacking[0]

    def _at(self, call: SeatCall) -> OrderNumber:
        reported = self._ledgers.on(call.node).seat(call.replica).reported
        assert reported is not None, "a replica that starts has nothing to report"
        return reported.at

    # --- sizes ----------------------------------------------------------------------------------------

    def _floors(self, ledger: DeviceLedger) -> int:
        """The bytes that the replicas keep when divisions leave them the least."""
        return sum(seat.model.least if self._ledgers.is_divided(seat) else seat.bound for seat in ledger.seats)

    def _first_size(self, pool: PoolId, ledger: DeviceLedger) -> Bytes:
        """The bytes of a replica before any of its pool has been measured: its share, or all that others can leave."""
        share, left = self._share(pool), ledger.budget - self._floors(ledger)
        return Bytes(min(share, left)) if left > 0 else share

    def _share(self, pool: PoolId) -> Bytes:
        """The part of a node's budget for a replica of a pool, if all replicas of all pools are on the node."""
        weights = sum(each.weight * each.bounds()[1] for each in self._pools.values())
        return Bytes(int(self._ledgers.budget * self._pools[pool].weight / weights))

    def _refusal(self, call: SeatCall, model: ModelMemory) -> str | None:
        """The reason why a replica can never start: the floors of the fewest replicas exceed all budgets."""
        budget = self._ledgers.budget
        models = {**self._ledgers.models, call.pool: model}
        needed = {pool: (self._pools[pool].bounds()[0], each.least) for pool, each in models.items()}
        nodes = len({*self._ledgers.nodes, call.node})
        if model.least <= budget and sum(n * least for n, least in needed.values()) <= nodes * budget:
            return None
        parts = (model.parameters, model.fixed, model.floor * model.block)
        names = "parameters", "processes", "KV of one request of max_model_len"
        listed = " + ".join(f"{mib_of(part)} ({name})" for part, name in zip(parts, names, strict=True))
        text = f"memory.budget_mib: a replica needs {listed} = {mib_of(model.least)} MiB"
        if model.least <= budget:
            fewest = " + ".join(f"{n} x {mib_of(least)} ({pool})" for pool, (n, least) in sorted(needed.items()))
            text += f", the fewest replicas {fewest} MiB"
        budgets = f"{mib_of(budget)} MiB" + (f" on each of {nodes} nodes" if nodes > 1 else "")
        return f"{text}, and the budget is {budgets}: raise it, or lower min_replicas or max_model_len"


def _lack(ledger: DeviceLedger, size: Bytes) -> str:
    return f"it needs {mib_of(size)} MiB of memory.budget_mib, and {mib_of(max(0, ledger.room))} MiB are free"
