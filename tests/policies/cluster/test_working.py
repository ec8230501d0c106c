"""The sums of a replica. Here: 100 tokens, of which its three requests hold 60, and others still 10 until they left."""

import pytest

from policies.cluster.capacity import strained
from policies.cluster.replica import Replica
from policies.cluster.search import needed_room
from policies.cost.service import ReplicaSpeed, SpeedLimit
from policies.cost.steps import StepCosts, proportional
from policies.model import ReplicaState, RequestId, Tokens
from tests.policies.cluster.named import impose, move, named, replica
from tests.policies.stepping import Events, apply


@pytest.fixture
def busy() -> Replica:
    """Reserves 5 tokens for each request's growth, 2 of them until a decision takes effect."""
    cluster = named("A: p30 q20 r10 s10 | B:", holds=True)
    move(cluster, "s", "B")
    cluster.decisions.settle()
    impose(cluster, headroom=5, lead=2)
    return replica(cluster, "A")


@pytest.mark.parametrize("shared", [-5, 0, 5], ids=["blocks are shared", "as reported", "blocks are lost"])
def test_sums(busy: Replica, shared: int) -> None:
    busy.shared = shared
    assert busy.free == 100 - 60 - 10 - shared
    assert busy.room == busy.free - 3 * 5
    assert busy.overload == 60 + shared - 100, "what leaves is no load"
    assert busy.strain == busy.overload + 3 * 2


def test_a_request_that_is_alone_strains_nothing_by_its_growth() -> None:
    cluster = named("A: p100 | B: q60 r39")
    impose(cluster, headroom=5, lead=2)
    assert [r.id for r in strained(cluster)] == ["B"]
    apply(cluster, Events({RequestId("p"): Tokens(101)}))
    assert [r.id for r in strained(cluster)] == ["A", "B"]


def test_replicas_there_and_new_ones_keep_the_headroom_of_the_epoch() -> None:
    cluster = named("A: p10")
    impose(cluster, headroom=5, lead=2)
    opened = cluster.decisions.open()
    assert opened is not None
    assert [(r.headroom, r.lead) for r in cluster.replicas.values()] == [(5, 2)] * 2
    assert needed_room(cluster, 10) == 15


def test_waits_are_longer_within_a_block_and_as_before_after_an_exception() -> None:
    cluster = named("A: p10 | B:")
    limited = SpeedLimit(ReplicaSpeed(StepCosts(proportional(0.001))), wait_s=1.0)
    impose(cluster, speed=limited)
    waits: list[float] = []

    def fail() -> None:
        waits.extend(r.speed.wait_s for r in cluster.replicas.values() if r.speed is not None)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), cluster.longer_waits(3.0):
        fail()
    assert waits == [3.0] * 2
    assert [r.speed for r in cluster.replicas.values()] == [limited] * 2 and cluster.conditions.speed is limited
    with cluster.longer_waits(0.5):
        assert cluster.conditions.speed is limited


@pytest.mark.parametrize("state", ReplicaState)
def test_only_a_running_replica_with_place_in_its_batch_accepts(state: ReplicaState, busy: Replica) -> None:
    busy.state = state
    assert busy.accepts is (state is ReplicaState.RUNNING)
    busy.max_requests = 3
    assert not busy.accepts
