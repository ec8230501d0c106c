"""The sums of a replica. Here: 100 tokens, of which its three requests hold 60, and others still 10 until they left."""

import pytest

from policies.cluster.replica import Replica
from policies.model import ReplicaState, RequestId, Tokens
from tests.policies.cluster.named import move, named, replica
from tests.policies.stepping import Events, apply


@pytest.fixture
def busy() -> Replica:
    """Reserves 5 tokens for each request's growth, 2 of them until a decision takes effect."""
    cluster = named("A: p30 q20 r10 s10 | B:", holds=True)
    move(cluster, "s", "B")
    cluster.settle()
    cluster.reserve(Tokens(5), lead=Tokens(2))
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
    cluster.reserve(Tokens(5), lead=Tokens(2))
    assert [r.id for r in cluster.strained()] == ["B"]
    apply(cluster, Events({RequestId("p"): Tokens(101)}))
    assert [r.id for r in cluster.strained()] == ["A", "B"]


@pytest.mark.parametrize(("headroom", "lead", "kept"), [(5, 2, 5), (2, 5, 5)], ids=["more than the lead", "no less"])
def test_headroom_is(headroom: int, lead: int, kept: int) -> None:
    cluster = named("A: p10")
    cluster.reserve(Tokens(headroom), Tokens(lead))
    opened = cluster.open()
    assert opened is not None
    assert [(r.headroom, r.lead) for r in cluster.replicas.values()] == [(kept, lead)] * 2
    assert cluster.need(10) == 10 + kept


@pytest.mark.parametrize("state", ReplicaState)
def test_only_a_running_replica_with_place_in_its_batch_accepts(state: ReplicaState, busy: Replica) -> None:
    busy.state = state
    assert busy.accepts is (state is ReplicaState.RUNNING)
    busy.max_requests = 3
    assert not busy.accepts
