"""Orders about the memory of replicas: how they are sent, and those of operators and of scalers.

An operator's size stays until the operator gives the replica back to the division. Sleep and wake are orders, too: of a
plan without anything, and of one with a KV pool.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from http import HTTPStatus

from deployments.api.calls import MoveAccepted, MoveAnswer, MoveRejected
from deployments.api.report import ElasticMemory
from deployments.scheduler.memory.ledgers import UNKNOWN, BudgetedPool, NodeLedgers, ReportedMemory
from deployments.scheduler.memory.starting import StartingSeats
from migration.protocol.errors import MigrationError, PeerLost
from policies.memory.ledger import MemoryOrder, MemoryReport, Seat
from policies.memory.plan import ASLEEP, MemoryPlan, mib_of
from policies.model import Blocks, Bytes, PoolId, ReplicaId


class MemoryOrders:
    """Sends orders to the replicas of all pools. `acts` is true while divisions are ordered, too."""

    def __init__(
        self,
        ledgers: NodeLedgers,
        starting: StartingSeats,
        pools: Mapping[PoolId, BudgetedPool],
        shrink_s: float,
        acts: Callable[[], bool],
    ) -> None:
        self._ledgers = ledgers
        self._starting = starting
        self._pools = pools
        self._shrink_s = shrink_s
        self._acts = acts
        self._under_way: Counter[ReplicaId] = Counter()

    def is_under_way(self, replica: ReplicaId) -> bool:
        """True while a replica has not answered an order. No division orders it meanwhile."""
        return self._under_way[replica] > 0

    async def send(self, order: MemoryOrder) -> MemoryReport:
        """Send an order, and take its answer. Raises MigrationError; the order may have arrived, and counts."""
        home = self._ledgers.home(order.replica)
        if home is None:
            raise PeerLost(f"replica {order.replica} is gone")
        self._under_way[order.replica] += 1
        try:
            replica = self._pools[home.pool].replicas.at(order.replica)
            report = await replica.set_memory(order, self._shrink_s, self._ledgers.fence)
        finally:
            self._under_way[order.replica] -= 1
        self._ledgers.take_answer(report)
        return report

    # --- for operators --------------------------------------------------------------------------------

    async def set_blocks(self, replica: ReplicaId, blocks: int | None) -> MoveAnswer:
        """Order the size of a replica's KV pool, which it keeps; None: divisions size it.

        If the mode is not `act`, it then gets the size of its start, or the nearest one that it can have now.
        """
        found = self._ledgers.find(replica)
        if found is None:
            return MoveRejected(HTTPStatus.SERVICE_UNAVAILABLE, f"replica {replica} has not reported yet; try again")
        memory = found.memory
        if not memory.report.ordered.is_awake:
            return MoveRejected(HTTPStatus.CONFLICT, f"replica {replica} is asleep: wake it first")
        if not self._ledgers.is_known:
            return MoveRejected(503, f"{UNKNOWN}; try again")
        ledger = self._ledgers.on(found.node)
        seat, kept = ledger.seat(replica), self._starting.reserved(found.node, ledger)
        wanted = self._undivided(memory, _most(ledger.room, kept, seat)) if blocks is None else Blocks(blocks)
        if refusal := _out_of_bounds(memory, wanted):
            return MoveRejected(422, refusal)
        plan = MemoryPlan(wanted, memory.report.ordered.remote)
        is_kept_free = 0 < memory.model.need(plan) - seat.bound > ledger.room - kept
        order = None if is_kept_free else self._ledgers.order(replica, plan, by_hand=blocks is not None)
        if order is None:
            return MoveRejected(422, _over_budget(ledger.room, kept, seat, wanted))
        return await self._send_now(order)

    def _undivided(self, memory: ElasticMemory, most: Blocks) -> Blocks:
        """The size of a replica that is given back to divisions, until the next one; it can have `most` blocks now."""
        ordered = memory.report.ordered.blocks
        assert ordered is not None, "it is awake"
        return ordered if self._acts() else Blocks(max(memory.least, min(memory.start, most)))

    # --- sleep ----------------------------------------------------------------------------------------

    async def sleep(self, replica: ReplicaId) -> MoveAnswer:
        """Order a replica to drop its parameters and its KV pool."""
        if (found := self._orderable(replica)) is None:
            return MoveRejected(HTTPStatus.SERVICE_UNAVAILABLE, f"{UNKNOWN}; try again")
        if (reason := found.memory.sleepless) is not None:
            return MoveRejected(422, reason)
        return await self._order_plan(replica, ASLEEP)

    async def wake(self, replica: ReplicaId) -> MoveAnswer:
        """Order a replica to be awake, with the KV pool of its start or, without room for it, a smaller one.

        If there is no room for the smallest, it waits for that as in `await_wake`: the order may be repeated.
        """
        if (found := self._orderable(replica)) is None:
            return MoveRejected(HTTPStatus.SERVICE_UNAVAILABLE, f"{UNKNOWN}; try again")
        memory = found.memory
        blocks = min(memory.start, memory.model.blocks_in(self._left(replica, found.node)))
        if blocks < memory.model.floor:
            return MoveRejected(HTTPStatus.SERVICE_UNAVAILABLE, self.await_wake(replica))
        self._starting.end_wait(replica)
        return await self._order_plan(replica, MemoryPlan(blocks))

    def await_wake(self, replica: ReplicaId) -> str:
        """Have a sleeping replica wait for room for its floor: others shrink or fall asleep for it. Returns the reason.

        Raises `KeyError` if it has no seat.
        """
        seat, home = self._ledgers.seat_of(replica), self._ledgers.home(replica)
        if seat is None or home is None:
            raise KeyError(replica)
        least, left = seat.model.least, self._left(replica, home.node)
        reason = f"awake it needs {mib_of(least)} MiB, and {mib_of(max(0, left))} MiB are free for it"
        self._starting.add_wait(replica, home.pool, home.node, Bytes(least - seat.bound), reason)
        return reason

    def _left(self, replica: ReplicaId, node: str) -> int:
        """The bytes that a replica may have, its own included."""
        ledger = self._ledgers.on(node)
        return ledger.room - self._starting.reserved(node, ledger, until=replica) + ledger.seat(replica).bound

    def _orderable(self, replica: ReplicaId) -> ReportedMemory | None:
        """The newest report of a replica; None if it cannot be ordered anything now."""
        return self._ledgers.find(replica) if self._ledgers.is_known else None

    async def _order_plan(self, replica: ReplicaId, plan: MemoryPlan) -> MoveAnswer:
        order = self._ledgers.order(replica, plan)
        if order is None:
            return MoveRejected(HTTPStatus.SERVICE_UNAVAILABLE, f"{UNKNOWN}; try again")
        return await self._send_now(order)

    async def _send_now(self, order: MemoryOrder) -> MoveAnswer:
        """Send an order of which somebody wants the outcome."""
        replica = order.replica
        try:
            report = await self.send(order)
        except PeerLost as error:
            # The order may have arrived: the ledger counts it until a newer one to the replica is answered.
            return MoveRejected(503, str(error))
        except MigrationError as error:
            return MoveRejected(422, str(error))
        if report.at == order.at and report.ordered != order.plan:
            reason = f"replica {replica} is in a pair, or changes its layers: undo it (mell unpair), or try again"
            return MoveRejected(HTTPStatus.CONFLICT, reason)
        return MoveAccepted(replica)


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


def _most(room: int, kept: int, seat: Seat) -> Blocks:
    """The most blocks that the replica can have now: of `room` bytes, `kept` are for others."""
    remote = 0 if seat.reported is None else seat.reported.ordered.remote
    most = min(seat.declared.blocks or 0, seat.model.blocks_in(max(0, room - kept) + seat.bound, remote))
    return Blocks(max(seat.model.floor, most))


def _over_budget(room: int, kept: int, seat: Seat, wanted: Blocks) -> str:
    """The reason why the replica cannot have the wanted blocks now: of `room` bytes, `kept` are for others."""
    starts = f", {mib_of(kept)} MiB are kept for replicas that start" if kept else ""
    free = f"{mib_of(max(0, room))} MiB are free{starts}"
    return f"{wanted} blocks exceed memory.budget_mib: {free}, so the replica can have {_most(room, kept, seat)} blocks"
