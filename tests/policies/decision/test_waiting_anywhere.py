"""Requests that no replica accepts: they are demand, for which replicas are opened, and ask again by themselves."""

from policies.cluster.changes import Arrival
from policies.decision.deciding import place
from policies.decision.limits import LiveLimits, Terms
from policies.decision.memory import PoolMemory
from policies.decision.placement import NoReplica, Place
from policies.model import RETRY_S, ReplicaId, RequestId, Tokens
from tests.policies.decision.observed import Drawn, Watcher, observed

TERMS = Terms("pack", LiveLimits(linger_s=0.0, foresight_s=0.0))
NONE_UP = ""
LONG_AFTER_S = TERMS.placement_ttl_s + RETRY_S


def arrival(name: str, tokens: int = 80) -> Arrival:
    return Arrival(RequestId(name), Tokens(tokens))


def watched(drawn: Drawn) -> Watcher:
    """After an epoch with that cluster, whose replicas have 100 tokens each."""
    watcher = Watcher(PoolMemory(TERMS))
    # A pool that has had a replica knows what one holds.
    watcher.decide(observed("a:", most=4))
    watcher.decide(drawn)
    return watcher


def test_a_replica_is_opened_for_each_that_fits_beside_no_other() -> None:
    watcher = watched(observed(NONE_UP, 1.0, most=4))
    for name in ("p", "q", "r"):
        assert place(watcher.memory, arrival(name), 1.0) == NoReplica()
    plan = watcher.decide(observed(NONE_UP, 1.5, most=4))
    assert (len(plan.opened), plan.placements, plan.moves) == (3, (), ())


def test_without_requests_no_replica_is_opened() -> None:
    watcher = watched(observed(NONE_UP, 1.0, most=4))
    assert not watcher.decide(observed(NONE_UP, 1.5, most=4)).opened


def test_each_try_renews_its_demand_and_counts_once() -> None:
    watcher = watched(observed(NONE_UP, 1.0, most=4))
    for now in (1.0, 2.0, 4.0):
        place(watcher.memory, arrival("p"), now)
    watcher.decide(observed(NONE_UP, 1.0 + LONG_AFTER_S, most=4))
    assert list(watcher.memory.cluster.waiting | watcher.memory.cluster.requests) == ["p"]


def test_who_no_longer_asks_is_no_demand() -> None:
    watcher = watched(observed(NONE_UP, 1.0, most=4))
    place(watcher.memory, arrival("p"), 1.0)
    assert not watcher.decide(observed(NONE_UP, 1.0 + LONG_AFTER_S, most=4)).opened
    assert not watcher.memory.cluster.requests


def test_the_first_replica_takes_it_and_it_waits_no_more() -> None:
    watcher = watched(observed(NONE_UP, 1.0, most=4))
    place(watcher.memory, arrival("p"), 1.0)
    watcher.decide(observed("b*:", 2.0, most=4))
    watcher.decide(observed("b:", 3.0, most=4))
    decision = place(watcher.memory, arrival("p"), 3.0)
    assert isinstance(decision, Place) and decision.replica == "b"
    assert not watcher.memory.cluster.waiting
    assert not watcher.decide(observed("b: p80", 3.5, most=4)).opened


def test_refused_by_all_it_is_demand_too() -> None:
    watcher = watched(observed("a: x90", 1.0, most=4))
    assert place(watcher.memory, arrival("p"), 1.0, exclude=[ReplicaId("a")]) == NoReplica()
    assert len(watcher.decide(observed("a: x90", 1.5, most=4)).opened) == 1
