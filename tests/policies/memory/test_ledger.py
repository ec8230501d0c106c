"""The ledger of a device: a bounded exhaustive walk over lost, late and reordered messages and new schedulers."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest

from policies.memory.ledger import (
    DeviceLedger,
    MemoryOrder,
    MemoryReport,
    OrderNumber,
    ReplicaMemory,
    Seat,
)
from policies.memory.plan import ASLEEP, MemoryPlan, ModelMemory
from policies.model import Blocks, Bytes, ReplicaId

BUDGET = Bytes(3)
MODEL = ModelMemory(Bytes(0), Bytes(0), Bytes(0), Bytes(1), Blocks(1))
SMALL, LARGE = MemoryPlan(Blocks(1)), MemoryPlan(Blocks(2))
DECLARED = MemoryPlan(Blocks(3))
NAMES = ReplicaId("a"), ReplicaId("b")


class Walked(NamedTuple):
    """The replicas, the scheduler's ledger, and the messages under way."""

    replicas: tuple[ReplicaMemory, ...]
    ledger: DeviceLedger
    orders: frozenset[MemoryOrder] = frozenset()
    reports: frozenset[MemoryReport] = frozenset()

    @property
    def held(self) -> int:
        return sum(MODEL.need(replica.held) for replica in self.replicas)

    @property
    def has_way(self) -> bool:
        """True if one more message may be under way."""
        return len(self.orders) + len(self.reports) < 2

    def put(self, changed: ReplicaMemory) -> "Walked":
        return self._replace(replicas=tuple(changed if r.replica == changed.replica else r for r in self.replicas))


def new_ledger(fence: int) -> DeviceLedger:
    return DeviceLedger(BUDGET, fence, tuple(Seat(name, MODEL, DECLARED) for name in NAMES))


def first() -> Walked:
    replicas = [ReplicaMemory(n, OrderNumber(1), p, p) for n, p in zip(NAMES, (SMALL, LARGE), strict=True)]
    return Walked(tuple(replicas), new_ledger(1))


def one_block_nearer(replica: ReplicaMemory) -> ReplicaMemory:
    held, ordered = replica.held.blocks or 0, replica.ordered.blocks or 0
    return replace(replica, held=MemoryPlan(Blocks(held + (1 if ordered > held else -1))))


def following(at: Walked) -> Iterator[Walked]:
    """All states after one event."""
    for replica in at.replicas:
        if replica.held != replica.ordered:
            yield at.put(one_block_nearer(replica))
        seen, report = replica.asked(at.ledger.fence)
        if report is not None and at.has_way:
            yield at.put(seen)._replace(reports=at.reports | {report})
        for plan in (SMALL, LARGE):
            if (
                at.ledger.number < 2
                and len(at.orders) < 2
                and (given := at.ledger.order(replica.replica, plan)) is not None
            ):
                yield at._replace(ledger=given[0], orders=at.orders | {given[1]})
    for report in at.reports:
        left = at._replace(reports=at.reports - {report})
        yield left
        yield left._replace(ledger=at.ledger.take(report))
    for order in at.orders:
        left = at._replace(orders=at.orders - {order})
        yield left
        yield left.put(next(r for r in at.replicas if r.replica == order.replica).obey(order))
    if at.ledger.fence < 2:
        yield at._replace(ledger=new_ledger(2))


def walked(until_excess: bool = False) -> tuple[int, int]:
    """The number of states, and the most bytes held in one. Two messages are under way at most."""
    begin = first()
    seen, todo, most = {begin}, deque([begin]), begin.held
    while todo:
        at = todo.popleft()
        most = max(most, at.held)
        at.ledger.check_integrity()
        if until_excess and most > BUDGET:
            break
        for state in following(at):
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return len(seen), most


@pytest.mark.slow
def test_no_state_exceeds_the_budget() -> None:
    states, most = walked()
    assert most == BUDGET
    assert states > 10_000, "the walk is not empty"


def plans_of(
    seat: Seat, *, sent: bool = True, ordered: bool = True, silent: MemoryPlan = DECLARED
) -> Iterable[MemoryPlan]:
    if sent:
        yield from (order.plan for order in seat.sent)
    if seat.reported is None:
        yield silent
    else:
        yield seat.reported.held
        if ordered:
            yield seat.reported.ordered


def obeys_all(replica: ReplicaMemory, order: MemoryOrder) -> ReplicaMemory:
    return replace(replica, at=max(order.at, replica.at), ordered=order.plan)


def takes_all(ledger: DeviceLedger, report: MemoryReport) -> DeviceLedger:
    seat = ledger.seat(report.replica)
    sent = tuple(order for order in seat.sent if order.at > report.at)
    return ledger._put(replace(seat, reported=report, sent=sent)) if report.at.fence == ledger.fence else ledger


BROKEN: dict[str, list[tuple[type, str, Callable[..., object] | property]]] = {
    "orders that replicas have taken do not count": [(Seat, "_plans", lambda s: plans_of(s, ordered=False))],
    "orders without an answer do not count": [(Seat, "_plans", lambda s: plans_of(s, sent=False))],
    "orders need no room": [(DeviceLedger, "bound", property(lambda ledger: 0))],
    "replicas obey every order": [(ReplicaMemory, "obey", obeys_all)],
    "silent replicas are trusted": [
        (DeviceLedger, "is_known", property(lambda ledger: True)),
        (Seat, "_plans", lambda s: plans_of(s, silent=ASLEEP)),
    ],
    "late reports replace newer ones": [(DeviceLedger, "take", takes_all)],
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", BROKEN)
def test_the_walk_notices_a_broken_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceLedger, "check_integrity", lambda ledger: None)
    for owner, name, broken in BROKEN[rule]:
        monkeypatch.setattr(owner, name, broken)
    assert walked(until_excess=True)[1] > BUDGET


def test_a_replica_starts_only_into_free_memory_that_is_known() -> None:
    empty = DeviceLedger(BUDGET, 1)
    one = empty.start(NAMES[0], MODEL, DECLARED, LARGE)
    assert one is not None and one.bound == 2
    assert one.start(NAMES[1], MODEL, DECLARED, LARGE) is None
    assert one.start(NAMES[1], MODEL, DECLARED, SMALL) is not None
    silent = replace(empty, budget=Bytes(9)).with_seat(Seat(NAMES[0], MODEL, DECLARED))
    assert silent.start(NAMES[1], MODEL, DECLARED, SMALL) is None
    assert one.without(NAMES[0]).start(NAMES[1], MODEL, DECLARED, LARGE) is not None


def test_a_replica_shrinks_although_the_device_holds_more_than_its_budget() -> None:
    """As when a replica that starts takes a share into which another has grown."""
    ledger = new_ledger(1)
    for name, plan in zip(NAMES, (LARGE, LARGE), strict=True):
        ledger = ledger.take(MemoryReport(name, OrderNumber(1), plan, plan))
    assert ledger.bound > BUDGET and ledger.order(NAMES[0], DECLARED) is None
    ordered = ledger.order(NAMES[0], SMALL)
    assert ordered is not None
    smaller = ordered[0].take(MemoryReport(NAMES[0], ordered[1].at, SMALL, SMALL))
    assert smaller.bound == BUDGET and smaller.order(NAMES[1], DECLARED) is None


def test_wrong_uses_are_errors() -> None:
    ledger = new_ledger(1)
    with pytest.raises(KeyError):
        ledger.order(ReplicaId("c"), SMALL)
    with pytest.raises(ValueError, match="more than it declared"):
        ledger.order(NAMES[0], MemoryPlan(Blocks(4)))
    with pytest.raises(ValueError, match="has a seat"):
        ledger.with_seat(Seat(NAMES[0], MODEL, DECLARED))
