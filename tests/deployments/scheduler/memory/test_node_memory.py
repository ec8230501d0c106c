"""The memory that replicas of several pools share: orders of operators and of divisions, and replicas that start."""

from dataclasses import replace
from typing import Any

import pytest

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
from deployments.api.report import ElasticMemory
from deployments.config import MemorySettings
from deployments.scheduler.memory.ledgers import CLAIM_S, BudgetedPool, ReportedMemory
from deployments.scheduler.memory.nodes import NodeMemory
from deployments.scheduler.memory.starting import WAIT_S
from deployments.scheduler.memory.view import devices_json
from migration.memory.tables import PoolState
from migration.protocol.errors import PeerLost, Refused
from policies.decision.devices import SeatSize
from policies.memory.ledger import MemoryOrder, MemoryReport, OrderNumber, ReplicaMemory
from policies.memory.plan import ASLEEP, MemoryPlan, ModelMemory
from policies.model import Blocks, Bytes, PoolId, ReplicaId
from tests.deployments.scheduler.fakes import AnsweringReplica, FakeClaims

MIB = 1 << 20
MODEL = ModelMemory(Bytes(100 * MIB), Bytes(100 * MIB), Bytes(20 * MIB), Bytes(MIB), Blocks(50))
MEASURED = MeasuredEngine(MODEL, Blocks(900), Blocks(300))
FENCE, BUDGET = 3, 1000
A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")
ONE, TWO = PoolId("one"), PoolId("two")


class Node:
    """Implements `RemoteReplicas[ControlApi]`: replicas whose pools follow an order when a test has them do so.

    All are of pool `one`, unless `pools` says otherwise.
    """

    def __init__(
        self,
        *names: str,
        blocks: int = 300,
        budget: int = BUDGET,
        pools: dict[ReplicaId, PoolId] | None = None,
        weights: tuple[float, float] = (1.0, 1.0),
        most: int = 1,
    ) -> None:
        plan = MemoryPlan(Blocks(blocks))
        self.replicas = {
            ReplicaId(name): ReplicaMemory(ReplicaId(name), OrderNumber(FENCE), plan, plan) for name in names
        }
        self.start = Blocks(blocks)
        self.model = MODEL
        self.lost = self.acts = False
        self.cause: str | None = None
        self.sleepless: str | None = None
        self.asleep_mib = 20
        self.state = PoolState.SETTLED
        self.silent: set[ReplicaId] = set()
        self.listed: set[ReplicaId] = set()
        self.time = 0.0
        self.pools = pools or {}
        self.least = 1
        self.claims = FakeClaims()
        self._settings = MemorySettings(budget_mib=budget, shrink_s=2.0)
        self._elastic = {
            pool: BudgetedPool(self, weight, lambda: (self.least, most), lambda replica: replica not in self.listed)
            for pool, weight in zip((ONE, TWO), weights, strict=True)
        }
        self.restart(FENCE)

    def restart(self, fence: int) -> None:
        """Another scheduler takes over."""
        nodes = NodeMemory.of(self._settings, fence, self._elastic, self.claims, lambda: self.acts, lambda: self.time)
        assert nodes is not None
        self.nodes = nodes
        self.fence = fence
        self.gather()

    def gather(self) -> None:
        """All replicas report, but for silent ones."""
        for pool in self._elastic:
            here = [replica for replica in self.replicas if self.pools.get(replica, ONE) == pool]
            self.nodes.ledgers.take(pool, {r: self.reported(r) for r in here if r not in self.silent}, here)

    def at(self, replica: ReplicaId, routed: bool = True) -> AnsweringReplica:
        return AnsweringReplica(self, replica)

    def forget(self, replica: ReplicaId) -> None: ...

    async def answer(self, replica: ReplicaId, call: str, *args: Any) -> Any:
        order, shrink_s, fence = args
        assert isinstance(order, MemoryOrder) and (call, shrink_s, fence) == ("set_memory", 2.0, self.fence)
        if self.lost:
            raise PeerLost("it is away")
        self.replicas[replica] = self.replicas[replica].obey(order)
        return self.report(replica)

    def report(self, replica: ReplicaId) -> MemoryReport:
        self.replicas[replica], report = self.replicas[replica].asked(self.fence)
        return report or self.replicas[replica].report

    def reported(self, name: ReplicaId) -> ReportedMemory:
        held = self.replicas[name].held.blocks or Blocks(0)
        report, used, model = self.report(name), Blocks(9), replace(self.model, asleep=Bytes(self.asleep_mib * MIB))
        memory = ElasticMemory(
            report, model, Blocks(900), self.start, held, used, self.state, self.cause, self.sleepless
        )
        return ReportedMemory("n", memory, block_tokens=16)

    def follow(self, name: ReplicaId) -> None:
        """The replica gets the size that it was ordered to have, and reports."""
        each = self.replicas[name]
        self.replicas[name] = ReplicaMemory(name, each.at, each.ordered, each.ordered, each.by_hand)
        self.gather()

    async def order(self, name: ReplicaId, blocks: int | None) -> MoveAnswer:
        self.gather()
        return await self.nodes.orders.set_blocks(name, blocks)

    def ordered(self, name: ReplicaId) -> int | None:
        return self.replicas[name].ordered.blocks

    async def divide(self, acts: bool = True, **blocks: int) -> None:
        """A division, with all orders carried out that follow."""
        self.acts = acts
        self.nodes.division.follow(
            {"n": tuple(SeatSize(ReplicaId(r), Blocks(b), Bytes(b * MIB)) for r, b in blocks.items())}
        )
        for task in list(self.nodes.division._tasks):
            await task

    def seat(self, name: ReplicaId, measured: MeasuredEngine | None = None, pool: PoolId = ONE) -> SeatAnswer:
        return self.nodes.starting.seat(SeatCall(pool, name, "n", measured))

    def begin(self, name: ReplicaId, answer: SeatAnswer) -> None:
        """The replica serves with the memory that it got."""
        assert isinstance(answer, SeatGiven)
        self.replicas[name] = ReplicaMemory(name, answer.at, answer.plan, answer.plan)
        self.gather()

    def shown(self) -> list[dict[str, Any]]:
        """The member `devices` of `/mell/state`."""
        return devices_json(self.nodes, self.acts)

    def seats(self) -> dict[str, dict[str, Any]]:
        """The parts of the replicas, in `/mell/state`."""
        (device,) = self.shown()
        return {seat["replica"]: seat for seat in device["seats"]}


def refusal(answer: MoveAnswer) -> tuple[int, str]:
    assert isinstance(answer, MoveRejected)
    return answer.status, answer.message


async def test_a_pool_grows_only_into_what_another_one_has_given_back() -> None:
    node = Node("a", "b", pools={B: TWO})
    assert refusal(await node.order(A, 301)) == (
        422,
        "301 blocks exceed memory.budget_mib: 0 MiB are free, so the replica can have 300 blocks",
    )
    assert await node.order(B, 100) == MoveAccepted("b")
    assert refusal(await node.order(A, 301))[0] == 422, "b has not given anything back yet"
    node.follow(B)
    assert refusal(await node.order(A, 501)) == (
        422,
        "501 blocks exceed memory.budget_mib: 200 MiB are free, so the replica can have 500 blocks",
    )
    assert await node.order(A, 500) == MoveAccepted("a")
    node.follow(A)
    (device,) = node.shown()
    assert (device["budget_mib"], device["ordered_mib"], device["held_mib"]) == (1000, 1000, 1000)


async def test_without_divisions_the_size_of_the_start_is_ordered_again() -> None:
    node = Node("a", "b")
    await node.order(A, 60)
    node.follow(A)
    await node.order(A, None)
    assert node.ordered(A) == 300 and not node.replicas[A].by_hand


@pytest.mark.parametrize(("other", "left"), [(400, 200), (540, 60)], ids=["less than at the start", "what it has"])
async def test_without_divisions_a_replica_gets_what_others_have_left_of_the_size_of_its_start(
    other: int, left: int
) -> None:
    node = Node("a", "b")
    await node.order(A, 60)
    node.follow(A)
    await node.order(B, other)
    node.follow(B)
    assert await node.order(A, None) == MoveAccepted("a")
    assert node.ordered(A) == left and not node.replicas[A].by_hand


async def test_a_size_by_hand_stays_until_the_replica_is_given_back_to_the_division() -> None:
    node = Node("a", "b", pools={B: TWO})
    await node.order(A, 60)
    node.follow(A)
    (device,) = node.nodes.division.devices()
    assert [seat.replica for seat in device.seats] == [B] and device.room == (BUDGET - 260 - 200) * MIB
    await node.divide(a=500, b=500)
    assert (node.ordered(A), node.ordered(B)) == (60, 500)
    node.follow(B)
    node.restart(FENCE + 1)
    assert node.seats()["a"]["by"] == "hand" and node.seats()["b"]["by"] == "start", "reports have it"
    assert await node.order(A, None) == MoveAccepted("a")
    assert node.ordered(A) == 60, "the division decides on another size"
    node.follow(A)
    await node.divide(a=40, b=500)
    assert node.ordered(A) == 40 and node.seats()["a"]["by"] == "demand"


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (49, "a pool of 49 blocks does not hold a request of max_model_len: write 50 or more"),
        (901, "901 blocks are more than the 900 that the replica can have (memory.declared)"),
        (-1, "a pool of -1 blocks does not hold"),
    ],
)
async def test_sizes_out_of_bounds_are_refused(blocks: int, message: str) -> None:
    node = Node("a", "b")
    status, why = refusal(await node.order(A, blocks))
    assert status == 422 and why.startswith(message)


async def test_a_pool_in_a_pair_keeps_room_for_the_layers_that_come_back() -> None:
    node = Node("a")
    node.model = replace(MODEL, layers=10, layer=Bytes(8 * MIB))
    plan = MemoryPlan(Blocks(300), 5)
    node.replicas[A] = ReplicaMemory(A, OrderNumber(FENCE), plan, plan)
    status, why = refusal(await node.order(A, 94))
    assert (status, why) == (422, "a pool of 94 blocks does not have room for layers that come back: write 95 or more")
    assert await node.order(A, 95) == MoveAccepted("a")


async def test_an_order_without_an_answer_counts_until_a_report() -> None:
    node = Node("a", "b")
    await node.order(B, 60)
    node.follow(B)
    node.lost = True
    assert refusal(await node.order(A, 500)) == (503, "it is away")
    node.lost = False
    assert refusal(await node.order(B, 300))[0] == 422, "the order to a may have arrived"
    del node.replicas[A]
    assert (await node.order(B, 300)) == MoveAccepted("b")


async def test_nothing_is_ordered_before_all_replicas_have_reported_to_this_scheduler() -> None:
    node = Node("a", "b", pools={B: TWO})
    node.silent = {B}
    node.restart(FENCE + 1)
    assert refusal(await node.order(A, 100)) == (503, "a replica has not reported to this scheduler yet; try again")
    assert node.nodes.division.devices() == () and node.seat(C) == SeatLater(
        "a replica has not reported to this scheduler yet"
    )
    node.silent = set()
    assert await node.order(A, 100) == MoveAccepted("a")


async def test_a_replica_that_becomes_silent_counts_with_what_it_holds() -> None:
    """The gatherer forgets its report, but its processes have their memory until Serve no longer lists it."""
    node = Node("a", "b")
    await node.order(B, 60)
    node.follow(B)
    await node.order(A, 500)
    node.follow(A)
    node.silent = {A}
    assert refusal(await node.order(B, 300))[0] == 422
    assert node.shown()[0]["ordered_mib"] == 960 and node.seats()["a"]["by"] == "silent"
    del node.replicas[A]
    assert await node.order(B, 300) == MoveAccepted("b")


async def test_a_replica_that_has_not_reported_gets_no_order() -> None:
    assert refusal(await Node("a").order(B, 100)) == (503, "replica b has not reported yet; try again")


async def test_a_division_shrinks_first_and_grows_into_what_is_given_back() -> None:
    node = Node("a", "b", pools={B: TWO})
    await node.divide(a=500, b=100)
    assert (node.ordered(A), node.ordered(B)) == (300, 100), "b still has its memory"
    node.follow(B)
    await node.divide(a=500, b=100)
    assert node.ordered(A) == 500
    before = node.replicas[A].at
    node.follow(A)
    await node.divide(a=500, b=100)
    assert node.replicas[A].at == before, "nothing is ordered twice"
    assert node.seats()["a"]["target_mib"] == 500 and "prefix cache" in node.seats()["a"]["why"]


async def test_a_lost_order_of_a_division_is_ordered_again() -> None:
    node = Node("a", "b")
    node.lost = True
    await node.divide(a=300, b=100)
    node.lost = False
    await node.divide(a=300, b=100)
    assert node.ordered(B) == 100


async def test_a_resize_that_keeps_failing_is_ordered_again_now_and_then() -> None:
    node = Node("a", "b")
    await node.divide(a=300, b=100)
    node.cause = "the machine does not take it"
    node.gather()
    await node.divide(a=300, b=100)
    first = node.replicas[B].at
    await node.divide(a=300, b=100)
    assert node.replicas[B].at == first > OrderNumber(FENCE, 1)
    node.time += 10.0
    await node.divide(a=300, b=100)
    assert node.replicas[B].at > first


async def test_a_sleeping_replica_counts_with_what_it_keeps() -> None:
    node = Node("a", "b")
    node.replicas[B] = ReplicaMemory(B, OrderNumber(FENCE), ASLEEP, ASLEEP)
    node.gather()
    (device,) = node.nodes.division.devices()
    assert [seat.replica for seat in device.seats] == [A] and device.room == (BUDGET - 20 - 200) * MIB
    await node.divide(a=780, b=100)
    assert node.ordered(A) == 780 and node.ordered(B) is None and node.seats()["b"]["by"] == "asleep"


def test_a_replica_starts_with_its_share_and_its_engine_then_gets_what_fits() -> None:
    node = Node(weights=(3.0, 1.0))
    assert node.seat(A) == SeatGiven(MemoryPlan(Blocks(0)), OrderNumber(FENCE))
    assert node.seats()["a"] == {
        "replica": "a",
        "pool": "one",
        "by": "starts",
        "held_mib": 750,
        "ordered_mib": 750,
        "why": "it starts",
    }
    answer = node.seat(A, MEASURED)
    assert answer == SeatGiven(MemoryPlan(Blocks(300)), OrderNumber(FENCE)) == node.seat(A, MEASURED)
    node.begin(A, answer)
    assert node.seats()["a"]["held_mib"] == 500 and not node.claims.kept
    node.seat(B, pool=TWO)
    answer = node.seat(B, MEASURED, TWO)
    assert answer == SeatGiven(MemoryPlan(Blocks(50)), OrderNumber(FENCE)), "its share is that of weight 1"


async def test_a_replica_starts_only_once_others_have_made_room_for_it() -> None:
    node = Node("a", blocks=700, most=2)
    answer = node.seat(B)
    assert answer == SeatLater("it needs 250 MiB of memory.budget_mib, and 100 MiB are free")
    assert node.seats()["b"]["by"] == "waits" and node.nodes.starting.waiting() == (B,)
    (device,) = node.nodes.division.devices()
    assert device.room == (BUDGET - 200 - 250) * MIB, "kept for it"
    await node.divide(a=550)
    assert node.seat(B) == answer, "a has not given it back yet"
    node.follow(A)
    assert isinstance(node.seat(B), SeatGiven) and not node.nodes.starting.waiting()
    (device,) = node.nodes.division.devices()
    assert device.room == (BUDGET - 200 - 250) * MIB, "and now it counts"
    assert node.seat(B, MEASURED) == SeatGiven(MemoryPlan(Blocks(50)), OrderNumber(FENCE, 1)), "a has the rest"


def test_a_replica_that_no_longer_asks_keeps_nothing_from_others() -> None:
    node = Node("a", blocks=700, most=2)
    node.seat(B)
    node.time += WAIT_S
    assert node.nodes.division.devices()[0].room == (BUDGET - 200) * MIB


def test_of_two_replicas_that_wait_the_first_one_gets_the_room() -> None:
    node = Node("a", blocks=700, most=3)
    for name in (B, C):
        assert isinstance(node.seat(name), SeatLater)
    node.replicas[A] = ReplicaMemory(A, OrderNumber(FENCE), MemoryPlan(Blocks(550)), MemoryPlan(Blocks(550)))
    node.gather()
    assert isinstance(node.seat(C), SeatLater) and isinstance(node.seat(B), SeatGiven)


async def test_an_engine_that_needs_more_than_expected_waits_and_others_shrink() -> None:
    node = Node("a", blocks=700, pools={B: TWO}, weights=(9.0, 1.0))
    assert isinstance(node.seat(B, pool=TWO), SeatGiven), "its share fits: nobody knows better"
    lacks = "it needs 250 MiB of memory.budget_mib, and 100 MiB are free"
    assert node.seat(B, MEASURED, TWO) == SeatLater(lacks)
    assert (node.seats()["b"]["by"], node.seats()["b"]["why"]) == ("waits", lacks)
    assert node.nodes.starting.waiting() == (B,)
    (device,) = node.nodes.division.devices()
    assert device.room == (BUDGET - 250 - 200) * MIB
    await node.divide(a=550)
    node.follow(A)
    assert node.seat(B, MEASURED, TWO) == SeatGiven(MemoryPlan(Blocks(50)), OrderNumber(FENCE, 1))
    assert node.seats()["b"]["why"] == "it starts"


def test_floors_above_the_budget_are_refused_with_the_sum() -> None:
    node = Node("a", budget=480, blocks=50, pools={B: TWO})
    node.seat(B, pool=TWO)
    answer = node.seat(B, MEASURED, TWO)
    assert isinstance(answer, SeatRefused)
    assert answer.reason == (
        "memory.budget_mib: a replica needs 100 (parameters) + 100 (processes) + 50 (KV of one request of "
        "max_model_len) = 250 MiB, the fewest replicas 1 x 250 (one) + 1 x 250 (two) MiB, and the budget is 480 MiB: "
        "raise it, or lower min_replicas or max_model_len"
    )
    node.least = 0
    assert isinstance(node.seat(B, MEASURED, TWO), SeatLater), "it waits until a sleeps or stops"


def test_a_new_scheduler_counts_the_replicas_that_start() -> None:
    node = Node("a", blocks=500, most=2)
    node.seat(B)
    node.seat(B, MEASURED)
    node.restart(FENCE + 1)
    assert node.seats()["b"]["ordered_mib"] == 250 and node.seats()["b"]["by"] == "starts"
    assert node.seat(C) == SeatLater("it needs 250 MiB of memory.budget_mib, and 50 MiB are free")
    node.begin(B, SeatGiven(MemoryPlan(Blocks(50)), OrderNumber(FENCE)))
    assert node.seats()["b"]["by"] == "start" and not node.claims.kept


def test_a_start_that_fails_gives_its_memory_back() -> None:
    node = Node("a", blocks=300, most=2)
    node.listed = {B}
    node.seat(B)
    node.time += CLAIM_S
    node.gather()
    assert "b" in node.seats(), "Serve lists it"
    node.listed = set()
    node.gather()
    assert "b" not in node.seats() and not node.claims.kept


def test_memory_is_given_only_once_the_next_scheduler_would_find_it() -> None:
    node = Node("a", blocks=300, most=2)
    node.claims.lost = True
    for _ in range(2):
        with pytest.raises(ConnectionError):
            node.seat(B)
    assert "b" not in node.seats()
    node.claims.lost = False
    answer = node.seat(B)
    node.restart(FENCE + 1)
    assert isinstance(answer, SeatGiven) and "b" in node.seats()


def test_a_claim_that_could_not_be_removed_is_removed_later() -> None:
    node = Node("a", blocks=300, most=2)
    node.seat(B)
    node.time += CLAIM_S
    node.claims.lost = True
    with pytest.raises(ConnectionError):
        node.gather()
    node.claims.lost = False
    node.gather()
    assert not node.claims.kept and "b" not in node.seats()


def test_a_scheduler_that_has_been_replaced_ends_no_claim() -> None:
    node = Node("a", blocks=300, most=2)
    answer = node.seat(B)
    node.claims.replaced = True
    with pytest.raises(Refused):
        node.begin(B, answer)
    assert B in node.claims.kept


def test_a_replica_counts_until_serve_no_longer_lists_it() -> None:
    """Serve's router drops a replica that stops before Serve's list, which is read once an epoch, shows it as such."""
    node = Node("a", "b")
    node.listed = {B}
    gone = node.replicas.pop(B)
    node.gather()
    assert node.seats()["b"]["ordered_mib"] == 500 and node.seats()["b"]["by"] == "silent"
    node.replicas[B] = gone
    node.gather()
    assert node.seats()["b"]["by"] == "start"
    del node.replicas[B]
    node.listed = set()
    node.gather()
    assert "b" not in node.seats()


async def test_a_failed_resize_is_repeated_with_the_newest_order() -> None:
    """A replica may answer an order, and then miss to report: its last report has the order before."""
    node = Node("a", "b")
    node.cause = "the machine does not take it"
    node.gather()
    await node.divide(a=300, b=100)
    await node.divide(a=300, b=100)
    assert node.ordered(B) == 100


async def test_an_operator_takes_no_memory_that_is_kept_for_a_replica_that_starts() -> None:
    node = Node("a", blocks=700, most=2)
    assert isinstance(node.seat(B), SeatLater)
    await node.divide(a=550)
    node.follow(A)
    assert refusal(await node.order(A, 600)) == (
        422,
        "600 blocks exceed memory.budget_mib: 250 MiB are free, 250 MiB are kept for replicas that start, so the "
        "replica can have 550 blocks",
    )
    assert await node.order(A, 550) == MoveAccepted("a"), "it keeps what it has"
    node.time += WAIT_S
    assert await node.order(A, 600) == MoveAccepted("a")


def test_a_share_that_others_can_never_leave_does_not_keep_a_model_from_starting() -> None:
    node = Node("a", blocks=800, weights=(1.0, 9.0))
    assert node.seat(B, pool=TWO) == SeatLater("it needs 750 MiB of memory.budget_mib, and 0 MiB are free")
    node.replicas[A] = ReplicaMemory(A, OrderNumber(FENCE), MemoryPlan(Blocks(50)), MemoryPlan(Blocks(50)))
    node.gather()
    assert isinstance(node.seat(B, pool=TWO), SeatGiven) and node.seats()["b"]["ordered_mib"] == 750


def test_engines_that_wait_for_what_the_other_one_has_do_not_wait_for_ever() -> None:
    """Nobody knew what they need: the second one ends, and its successor waits before it starts an engine."""
    large = MeasuredEngine(replace(MODEL, parameters=Bytes(450 * MIB)), Blocks(900), Blocks(300))
    node = Node(most=2, weights=(1.0, 0.001))
    for name in (A, B):
        assert isinstance(node.seat(name), SeatGiven)
    for _ in range(2):
        assert isinstance(node.seat(A, large), SeatLater)
    answer = node.seat(B, large)
    assert isinstance(answer, SeatRefused) and answer.reason.endswith("replica a waits with its engine, too")
    node.listed = {A}
    node.time += CLAIM_S
    node.gather()
    assert isinstance(node.seat(A, large), SeatGiven) and isinstance(node.seat(C), SeatLater)
