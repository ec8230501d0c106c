"""Replicas whose capacity changes: each has its own, and the unit of a pool is that of a new replica."""

from dataclasses import replace

import pytest

from policies.cluster.capacity import close_idle, dispensable
from policies.decision.limits import Limits, Terms, as_given
from policies.decision.memory import PoolMemory
from policies.model import Blocks, ReplicaId, Tokens
from policies.plan import Plan
from tests.policies.cluster.named import impose, named, replica
from tests.policies.decision.observed import C, Drawn, Watcher, observed
from tests.policies.stepping import begin_epoch

STILL = Terms("pack:headroom_s=0,comfort=0,rest=0", as_given(Limits()), decode_rate=0.0)


def resized(drawn: Drawn, **capacities: int) -> Drawn:
    """The drawn cluster in which replicas have other capacities than a new one."""
    loads = []
    for load in drawn.loads:
        capacity = capacities.get(load.id, C)
        free = Blocks(load.free_blocks + capacity - C)
        loads.append(replace(load, capacity_tokens=Tokens(capacity), nominal_tokens=C, free_blocks=free))
    return replace(drawn, loads=tuple(loads))


def decided(drawn: Drawn) -> tuple[Plan, PoolMemory]:
    watcher = Watcher(PoolMemory(STILL), len(drawn.loads))
    return watcher.decide(drawn), watcher.memory


def test_a_replica_that_shrinks_below_its_use_is_overloaded_and_requests_leave() -> None:
    plan, memory = decided(resized(observed("a: p50 q40 | b: r20"), a=60))
    (move,) = plan.moves
    assert (move.source, move.target) == (ReplicaId("a"), ReplicaId("b"))
    assert memory.cluster.replicas[ReplicaId("a")].load <= 60


def test_room_is_below_zero_if_requests_have_nowhere_to_go() -> None:
    plan, memory = decided(resized(observed("a: p50! q40!"), a=60))
    assert not plan.moves and memory.cluster.replicas[ReplicaId("a")].room == -30


@pytest.mark.parametrize("capacity", [40, 160])
def test_the_unit_of_the_pool_is_the_capacity_of_a_new_replica(capacity: int) -> None:
    _, memory = decided(resized(observed("a: p30 | b: r20"), a=capacity))
    assert memory.cluster.capacity == C
    assert memory.cluster.replicas[ReplicaId("a")].capacity == capacity


def test_a_replica_that_starts_gets_the_capacity_of_a_new_one_as_soon_as_that_is_known() -> None:
    watcher = Watcher(PoolMemory(STILL), 2)
    watcher.observe(observed("a*: | b*:"))
    watcher.observe(observed("a: p30 | b*:", 1.0))
    assert watcher.memory.cluster.replicas[ReplicaId("b")].capacity == C


def test_blocks_that_requests_share_are_not_mistaken_for_an_overload() -> None:
    """By the engine's count, 60 tokens are used by requests of 90."""
    drawn = resized(observed("a: p50 q40"), a=60)
    _, memory = decided(replace(drawn, loads=(replace(drawn.loads[0], free_blocks=Blocks(0)),)))
    there = memory.cluster.replicas[ReplicaId("a")]
    assert there.overload == there.room == 0


@pytest.mark.parametrize(("capacity", "slack", "closes"), [(50, 0.6, True), (200, 1.0, False)])
def test_a_closing_takes_the_replicas_own_capacity_away(capacity: int, slack: float, closes: bool) -> None:
    cluster = named("A: p40 | B:")
    replica(cluster, "B").capacity = Tokens(capacity)
    begin_epoch(cluster, Limits(slack=slack), 0.0)
    close_idle(cluster, 0.0, 0.0)
    assert (ReplicaId("B") not in cluster.replicas) is closes


@pytest.mark.parametrize(
    ("drawn", "waiting", "least", "sleeps", "slack", "found"),
    [
        ("A: | B:", "", 0, True, 300, "BA"),
        ("A: p40 | B:", "", 0, True, 0, "B"),
        ("A: p40 | B: | C:", "", 0, True, 100, "C"),
        ("A: | B:", "p40", 0, True, 0, ""),
        ("A: | B:", "", 1, False, 0, "B"),
        ("A: | B:", "", 2, False, 0, ""),
    ],
    ids=["all rest", "one has a request", "a reserve stays", "a request waits", "a minimum of 1", "a minimum of 2"],
)
def test_idle_replicas_are_dispensable_beyond_what_their_pool_needs(
    drawn: str, waiting: str, least: int, sleeps: bool, slack: int, found: str
) -> None:
    cluster = named(drawn, waiting)
    impose(cluster, slack=slack, min_replicas=least)
    cluster.note_idle(1.0)
    assert not dispensable(cluster, 1.0, sleeps), "they are idle since this epoch"
    assert [replica.id for replica in dispensable(cluster, 2.0, sleeps)] == list(found)
