"""Orders about the KV pools of replicas that share the memory of a node."""

from typing import Any

import pytest

from deployments.api.calls import MoveAccepted, MoveAnswer, MoveRejected
from deployments.api.report import ElasticMemory
from deployments.config import MemorySettings
from deployments.scheduler.node_memory import NodeMemory, ReportedMemory
from migration.protocol.errors import PeerLost
from policies.memory.ledger import MemoryOrder, MemoryReport, OrderNumber, ReplicaMemory
from policies.memory.plan import MemoryPlan, ModelMemory
from policies.model import Blocks, Bytes, ReplicaId
from tests.deployments.scheduler.fakes import AnsweringReplica

MIB = 1 << 20
MODEL = ModelMemory(Bytes(100 * MIB), Bytes(100 * MIB), Bytes(100 * MIB), Bytes(MIB), Blocks(50))
FENCE, BUDGET = 3, 1000
A, B = ReplicaId("a"), ReplicaId("b")


class Node:
    """Implements `RemoteReplicas[ControlApi]`: replicas whose pools follow an order when a test has them do so."""

    def __init__(self, *names: str, blocks: int = 300, budget: int | None = BUDGET, most: int = 2) -> None:
        plan = MemoryPlan(Blocks(blocks))
        self.replicas = {
            ReplicaId(name): ReplicaMemory(ReplicaId(name), OrderNumber(FENCE), plan, plan) for name in names
        }
        self.start = Blocks(blocks)
        self.lost = False
        self.silent: set[ReplicaId] = set()
        settings = MemorySettings(budget_mib=budget, shrink_s=2.0)
        self.devices = NodeMemory(settings, FENCE, self, self.reported, lambda: self.replicas, most)

    def at(self, replica: ReplicaId, routed: bool = True) -> AnsweringReplica:
        return AnsweringReplica(self, replica)

    def forget(self, replica: ReplicaId) -> None: ...

    async def answer(self, replica: ReplicaId, call: str, *args: Any) -> Any:
        order, shrink_s, fence = args
        assert isinstance(order, MemoryOrder) and (call, shrink_s, fence) == ("set_memory", 2.0, FENCE)
        if self.lost:
            raise PeerLost("it is away")
        self.replicas[replica] = self.replicas[replica].obey(order)
        return self.report(replica)

    def report(self, replica: ReplicaId) -> MemoryReport:
        each = self.replicas[replica]
        return MemoryReport(replica, each.at, each.ordered, each.held)

    def reported(self) -> dict[ReplicaId, ReportedMemory]:
        return {
            name: ReportedMemory(
                "n",
                ElasticMemory(
                    self.report(name),
                    MODEL,
                    Blocks(900),
                    self.start,
                    each.held.blocks or Blocks(0),
                    Blocks(9),
                    "settled",
                ),
            )
            for name, each in self.replicas.items()
            if name not in self.silent
        }

    def follow(self, name: ReplicaId) -> None:
        """The replica has the size that it was ordered to have."""
        each = self.replicas[name]
        self.replicas[name] = ReplicaMemory(name, each.at, each.ordered, each.ordered)

    async def order(self, name: ReplicaId, blocks: int | None) -> MoveAnswer:
        return await self.devices.set_blocks(name, blocks)

    def ordered(self, name: ReplicaId) -> int | None:
        return self.replicas[name].ordered.blocks


def refusal(answer: MoveAnswer) -> tuple[int, str]:
    assert isinstance(answer, MoveRejected)
    return answer.status, answer.message


async def test_a_pool_grows_only_into_what_another_one_has_given_back() -> None:
    node = Node("a", "b")
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
    assert node.devices.to_json() == [{"id": "n", "budget_mib": 1000, "ordered_mib": 1000, "held_mib": 1000}]


async def test_the_size_of_the_start_is_ordered_again() -> None:
    node = Node("a", "b")
    await node.order(A, 60)
    node.follow(A)
    await node.order(A, None)
    assert node.ordered(A) == 300


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


async def test_without_a_budget_pools_keep_their_sizes() -> None:
    node = Node("a", budget=None)
    assert refusal(await node.order(A, 100)) == (422, "memory.budget_mib is not set: KV pools keep their sizes")
    assert not node.devices.is_elastic


async def test_the_share_of_a_replica_that_does_not_run_is_kept_free() -> None:
    node = Node("a", most=2)
    assert refusal(await node.order(A, 301))[0] == 422
    assert await Node("a", most=1).order(A, 800) == MoveAccepted("a")


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


async def test_nothing_is_ordered_before_all_replicas_of_the_node_have_reported_to_this_scheduler() -> None:
    node = Node("a", "b")
    plan = MemoryPlan(Blocks(300))
    node.replicas[B] = ReplicaMemory(B, OrderNumber(FENCE - 1, 7), plan, plan)
    assert refusal(await node.order(A, 100))[0] == 503
    node.replicas[B] = ReplicaMemory(B, OrderNumber(FENCE), plan, plan)
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
    assert node.devices.to_json()[0]["ordered_mib"] == 960
    del node.replicas[A]
    assert await node.order(B, 300) == MoveAccepted("b")


async def test_nothing_is_ordered_before_a_replica_that_was_silent_all_the_time_has_reported() -> None:
    node = Node("a", "b")
    node.silent = {B}
    assert refusal(await node.order(A, 100)) == (503, "a replica has not reported to this scheduler yet; try again")
    node.silent = set()
    assert await node.order(A, 100) == MoveAccepted("a")


async def test_a_replica_that_has_not_reported_gets_no_order() -> None:
    assert refusal(await Node("a").order(B, 100)) == (503, "replica b has not reported yet; try again")
