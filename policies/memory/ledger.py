"""The ledger of one device: the replicas on it, their memory plans, and the orders that have no answer yet.

One invariant: no order or report of a plan takes the sum over a device's replicas of max(ordered, reported) above its
budget. A process that is seen to have grown may, until pools have shrunk. Four rules keep the invariant, whatever
messages are lost, late or out of order, and whenever a new scheduler begins:

    bound    a replica counts with the largest of its unanswered orders and of both plans in its newest report
    room     an order is sent only if the sum of all bounds, with it, is within the budget, or no larger than without
    fence    replicas obey no lower fence than the highest they have seen, and no number twice
    silence  a new scheduler orders nothing before all replicas of the device have reported under its fence; a silent
             replica counts with all that it declared

So nothing grows before another replica has reported that it shrank. The ledger is soft state: a new scheduler gets it
from the reports. All of its values are immutable.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from policies.memory.plan import MemoryPlan, ModelMemory
from policies.model import Blocks, Bytes, ReplicaId


@dataclass(frozen=True, slots=True, order=True)
class OrderNumber:
    """The place of an order in time: the fence of its scheduler, then a number that rises with each order."""

    fence: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class MemoryOrder:
    """An order to converge to a plan. An operator's is `by_hand`."""

    replica: ReplicaId
    at: OrderNumber
    plan: MemoryPlan
    by_hand: bool = False


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The plan that a replica is ordered to have, the plan that it holds now, and the newest order that it has seen.

    The number is 0 if it has seen the fence, and no order under it. The ordered plan is an operator's if it is
    `by_hand`.
    """

    replica: ReplicaId
    at: OrderNumber
    ordered: MemoryPlan
    held: MemoryPlan
    by_hand: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    """A replica's side of the ledger: its newest order, and the memory that it holds."""

    replica: ReplicaId
    at: OrderNumber
    ordered: MemoryPlan
    held: MemoryPlan
    by_hand: bool = False

    @property
    def report(self) -> MemoryReport:
        """Its report."""
        return MemoryReport(self.replica, self.at, self.ordered, self.held, self.by_hand)

    def obey(self, order: MemoryOrder) -> "ReplicaMemory":
        """Take an order, unless it has seen a higher fence, or this number or a higher one."""
        if order.at <= self.at:
            return self
        return replace(self, at=order.at, ordered=order.plan, by_hand=order.by_hand)

    def asked(self, fence: int) -> tuple["ReplicaMemory", MemoryReport | None]:
        """Answer a scheduler's request for a report, which shows its fence. A lower fence gets no answer."""
        if fence < self.at.fence:
            return self, None
        seen = self if fence == self.at.fence else replace(self, at=OrderNumber(fence))
        return seen, seen.report


@dataclass(frozen=True, slots=True)
class Seat:
    """A replica on the device by the ledger. `declared` is the largest plan that it may have.

    `sent` are the orders without an answer, `reported` is None before the first report under the ledger's fence.
    """

    replica: ReplicaId
    model: ModelMemory
    declared: MemoryPlan
    sent: tuple[MemoryOrder, ...] = ()
    reported: MemoryReport | None = None

    @property
    def bound(self) -> Bytes:
        """The most bytes that the replica may hold now."""
        return max(self.model.need(plan) for plan in self._plans())

    def gap(self, report: MemoryReport) -> int:
        """The bytes between the held and the ordered plan of a report."""
        return abs(self.model.need(report.held) - self.model.need(report.ordered))

    def _plans(self) -> Iterable[MemoryPlan]:
        yield from (order.plan for order in self.sent)
        if self.reported is None:
            yield self.declared
        else:
            yield from (self.reported.ordered, self.reported.held)


@dataclass(frozen=True, slots=True)
class DeviceLedger:
    """The ledger of a device with `budget` bytes, under the `fence` of one scheduler. `number` is that of the newest
    order.
    """

    budget: Bytes
    fence: int
    seats: tuple[Seat, ...] = ()
    number: int = 0

    @property
    def bound(self) -> Bytes:
        """The most bytes that all replicas may hold now."""
        return Bytes(sum(seat.bound for seat in self.seats))

    @property
    def room(self) -> int:
        """The bytes that no replica may hold; below zero if they may hold more than the budget."""
        return self.budget - self.bound

    @property
    def is_known(self) -> bool:
        """True once all replicas have reported under this fence."""
        return all(seat.reported is not None for seat in self.seats)

    def seat(self, replica: ReplicaId) -> Seat:
        """The seat of a replica. Raises `KeyError` if it has none."""
        for seat in self.seats:
            if seat.replica == replica:
                return seat
        raise KeyError(replica)

    def with_seat(self, seat: Seat) -> "DeviceLedger":
        """Add a replica that exists already. Raises `ValueError` if it has a seat."""
        if any(other.replica == seat.replica for other in self.seats):
            raise ValueError(f"{seat.replica} has a seat")
        return replace(self, seats=(*self.seats, seat))

    def start(
        self, replica: ReplicaId, model: ModelMemory, declared: MemoryPlan, plan: MemoryPlan
    ) -> "DeviceLedger | None":
        """Give a seat to a replica that starts now, with this plan; None without room for it.

        The process of the replica starts with the seat, and holds nothing before: its first report is known.
        """
        number = OrderNumber(self.fence, self.number)
        report = MemoryReport(replica, number, plan, plan)
        ledger = self.with_seat(Seat(replica, model, declared, reported=report))
        return ledger if self.is_known and ledger.bound <= self.budget else None

    def claim(self, replica: ReplicaId, size: Bytes) -> "DeviceLedger":
        """Count `size` bytes for a replica that starts, and whose parts have not been measured; any room is enough."""
        number, plan = OrderNumber(self.fence, self.number), MemoryPlan(Blocks(0))
        report = MemoryReport(replica, number, plan, plan)
        return self.without(replica).with_seat(Seat(replica, ModelMemory.claimed(size), plan, reported=report))

    def measured(self, replica: ReplicaId, model: ModelMemory) -> "DeviceLedger":
        """Count a replica by other bytes of its parts. Raises `KeyError` if it has no seat."""
        return self._put(replace(self.seat(replica), model=model))

    def without(self, replica: ReplicaId) -> "DeviceLedger":
        """Remove a replica that no longer exists."""
        return replace(self, seats=tuple(seat for seat in self.seats if seat.replica != replica))

    def order(
        self, replica: ReplicaId, plan: MemoryPlan, by_hand: bool = False
    ) -> "tuple[DeviceLedger, MemoryOrder] | None":
        """Order a plan; None without room for it, or before all replicas have reported.

        A plan within the replica's own bound needs no room: where too much is held, replicas can shrink. Raises
        `KeyError` if the replica has no seat, `ValueError` for more than it declared.
        """
        seat = self.seat(replica)
        if seat.model.need(plan) > seat.model.need(seat.declared):
            raise ValueError(f"{replica} cannot have more than it declared")
        if not self.is_known:
            return None
        order = MemoryOrder(replica, OrderNumber(self.fence, self.number + 1), plan, by_hand)
        grows = seat.model.need(plan) - seat.bound
        if grows > 0 and grows > self.room:
            return None
        return replace(self._put(replace(seat, sent=(*seat.sent, order))), number=order.at.number), order

    def order_size(self, replica: ReplicaId, blocks: Blocks) -> "tuple[DeviceLedger, MemoryOrder] | None":
        """Order a number of blocks; fewer if that is growth, and there is room for less now.

        None if the size stays, or before all replicas have reported. Raises `KeyError` if the replica has no seat.
        """
        seat = self.seat(replica)
        if seat.reported is None or (now := seat.reported.ordered.blocks) is None:
            return None
        if blocks > now:
            left = self.room + seat.bound - seat.model.need(seat.reported.ordered)
            blocks = Blocks(min(blocks, now + max(0, left) // seat.model.block))
        return None if blocks == now else self.order(replica, MemoryPlan(blocks))

    def take(self, report: MemoryReport) -> "DeviceLedger":
        """Take a report. One under another fence, or older than the newest one, changes nothing.

        Replicas converge: of two reports on the same order, the newer has the held plan that is nearer to it.
        """
        if report.at.fence != self.fence:
            return self
        seat, newest = self.seat(report.replica), self.seat(report.replica).reported
        if newest is not None and (newest.at, seat.gap(report)) > (report.at, seat.gap(newest)):
            return self
        return self._put(
            replace(seat, reported=report, sent=tuple(order for order in seat.sent if order.at > report.at))
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the bounds exceed the budget although all replicas have reported."""
        assert not self.is_known or self.bound <= self.budget, f"{self.bound} of {self.budget} bytes"

    def _put(self, seat: Seat) -> "DeviceLedger":
        seats = tuple(seat if other.replica == seat.replica else other for other in self.seats)
        return replace(self, seats=seats)
