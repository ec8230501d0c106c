"""Orders about pairs: refused with a reason, or given to the replica that leads."""

from dataclasses import replace
from typing import Any

import pytest

from deployments.api.calls import MoveAccepted, MoveRejected, PairOrder
from deployments.api.report import ElasticMemory, PairReport
from deployments.config import MemorySettings
from deployments.scheduler.memory.ledgers import ReportedMemory
from deployments.scheduler.pairs import PairOrders, pairs_json, unpairable_json
from migration.memory.pair_tables import HalfState
from migration.memory.tables import PoolState
from migration.protocol.errors import PeerLost, Refused
from policies.causes import Cause
from policies.memory.ledger import MemoryReport, OrderNumber
from policies.memory.plan import MemoryPlan, ModelMemory
from policies.model import Blocks, Bytes, ReplicaId, ReplicaState
from tests.deployments.scheduler.fakes import AnsweringReplica

MODEL = ModelMemory(Bytes(100), Bytes(10), Bytes(10), Bytes(1), Blocks(4), 4, Bytes(20))
A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")
FENCE = 3


class Node:
    """Implements `RemoteReplicas[ControlApi]`: replicas a and b on one node, c on another."""

    def __init__(self, budget_mib: int | None = 1000) -> None:
        plan = MemoryPlan(Blocks(300))
        self.memories = {
            name: ReportedMemory(
                "other" if name == C else "n",
                ElasticMemory(
                    MemoryReport(name, OrderNumber(FENCE), plan, plan),
                    MODEL,
                    Blocks(900),
                    Blocks(300),
                    Blocks(300),
                    Blocks(0),
                    PoolState.SETTLED,
                ),
            )
            for name in (A, B, C)
        }
        self.states = dict.fromkeys((A, B, C), ReplicaState.RUNNING)
        self.calls: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        settings = MemorySettings(budget_mib=budget_mib, shrink_s=2.0)
        self.orders = PairOrders(settings, FENCE, self, lambda: self.memories, lambda: self.states)

    def at(self, replica: ReplicaId, routed: bool = True) -> AnsweringReplica:
        return AnsweringReplica(self, replica)

    def forget(self, replica: ReplicaId) -> None: ...

    async def answer(self, replica: ReplicaId, call: str, *args: Any) -> Any:
        self.calls.append((replica, call, *args))
        if self.error is not None:
            raise self.error

    def put(self, replica: ReplicaId, **members: Any) -> None:
        found = self.memories[replica]
        self.memories[replica] = replace(found, memory=replace(found.memory, **members))


def half(buddy: ReplicaId, state: HalfState) -> PairReport:
    return PairReport(1, buddy, state, (0, 2), 2)


async def test_an_order_goes_to_the_lower_replica_under_an_epoch_of_its_own() -> None:
    node = Node()
    for _ in range(2):
        assert await node.orders.pair(A, B) == MoveAccepted(A)
    first, second = (call[2] for call in node.calls)
    assert first == PairOrder(first.epoch, B, 2.0, by_hand=True)
    assert first.epoch < second.epoch
    assert [call[:2] for call in node.calls] == [(A, "pair")] * 2


async def test_an_order_ends_the_pair_that_is_reported() -> None:
    node = Node()
    for pair in (None, half(A, HalfState.OVER)):
        node.put(B, pair=pair)
        answer = await node.orders.unpair(B)
        assert isinstance(answer, MoveRejected)
        assert answer.status == 409
    node.put(B, pair=replace(half(A, HalfState.PAIRED), epoch=7))
    assert await node.orders.unpair(B) == MoveAccepted(B)
    assert node.calls == [(B, "unpair", 7, FENCE)]


async def test_an_order_that_is_followed_already_is_given_once() -> None:
    node = Node()
    node.put(A, pair=replace(half(B, HalfState.GIVING), by_hand=True))
    node.put(B, pair=half(A, HalfState.PAIRED))
    assert await node.orders.pair(A, B) == MoveAccepted(A)
    assert not node.calls


async def test_a_pair_of_the_policy_becomes_the_operators() -> None:
    node = Node()
    node.put(A, pair=half(B, HalfState.PAIRED))
    node.put(B, pair=half(A, HalfState.PAIRED))
    assert await node.orders.pair(A, B, by_hand=False) == MoveAccepted(A) and not node.calls
    assert await node.orders.pair(A, B) == MoveAccepted(A)
    ((_, _, order, *_),) = node.calls
    assert order.by_hand


def test_a_pair_is_shown_by_the_half_that_has_furthest_to_go() -> None:
    node = Node()
    node.put(A, pair=half(B, HalfState.PAIRED))
    node.put(B, pair=replace(half(A, HalfState.RETURNING), layers=(2, 4), cause="the replica drains"))
    node.put(C, unpairable="it keeps no layers")
    (shown,) = pairs_json(node.memories)
    assert (shown["lower"], shown["upper"], shown["boundary"]) == (A, B, 2)
    assert (shown["phase"], shown["cause"]) == ("undoing", "the replica drains")
    assert unpairable_json(node.memories) == {C: "it keeps no layers"}


@pytest.mark.parametrize(
    ("change", "upper", "status", "message"),
    [
        ({}, A, 422, "two replicas"),
        ({}, C, 422, "two nodes"),
        ({"unpairable": "it decodes speculatively"}, B, 422, "cannot be paired: it decodes speculatively"),
        ({"pair": half(C, HalfState.PAIRED)}, B, 409, "is in a pair with replica c"),
        ({"pair": half(A, HalfState.RETURNING)}, B, 409, "is in a pair with replica a"),
    ],
)
async def test_replicas_that_cannot_be_paired_are_refused(
    change: dict[str, Any], upper: ReplicaId, status: int, message: str
) -> None:
    node = Node()
    node.put(B, **change)
    answer = await node.orders.pair(A, upper)
    assert isinstance(answer, MoveRejected)
    assert answer.status == status
    assert message in answer.message
    assert not node.calls


async def test_a_replica_that_drains_or_sleeps_or_has_not_reported_is_not_paired() -> None:
    node = Node()
    for state in (ReplicaState.DRAINING, ReplicaState.ASLEEP):
        node.states[B] = state
        answer = await node.orders.pair(A, B)
        assert isinstance(answer, MoveRejected)
        assert answer.status == 409
    del node.memories[B]
    answer = await node.orders.pair(A, B)
    assert isinstance(answer, MoveRejected)
    assert answer.status == 503
    answer = await Node(budget_mib=None).orders.pair(A, B)
    assert isinstance(answer, MoveRejected)
    assert answer.status == 422


@pytest.mark.parametrize(("error", "status"), [(PeerLost("away"), 503), (Refused("no", Cause.UNEXPECTED), 409)])
async def test_a_refusal_of_the_replica_is_the_answer(error: Exception, status: int) -> None:
    node = Node()
    node.error = error
    node.put(C, pair=half(B, HalfState.PAIRED))
    for answer in (await node.orders.pair(A, B), await node.orders.unpair(C)):
        assert isinstance(answer, MoveRejected)
        assert answer.status == status


async def test_requests_in_the_way_of_a_pair_of_the_policy_are_not_waited_for() -> None:
    node = Node()
    assert await node.orders.pair(A, B, by_hand=False) == MoveAccepted(A)
    ((_, _, order, *_),) = node.calls
    assert order == PairOrder(order.epoch, B, 0.0, by_hand=False)
