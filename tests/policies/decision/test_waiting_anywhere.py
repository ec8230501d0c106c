"""Requests that no replica accepts: they are demand, for which replicas are opened, and ask again by themselves."""

from policies.cluster.changes import Arrival
from policies.decision.deciding import place
from policies.decision.limits import Limits, LiveLimits, Mode, Terms
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


def test_one_that_waited_and_runs_by_its_first_report_waits_no_more() -> None:
    """Its ingress had seen before the scheduler that the replica runs."""
    watcher = watched(observed(NONE_UP, 1.0, most=4))
    place(watcher.memory, arrival("p"), 1.0)
    watcher.decide(observed("b: p80", 1.5, most=4))
    assert not watcher.decide(observed(NONE_UP, 2.0, most=4)).opened, "it has ended"


def test_one_that_a_silent_replica_may_still_have_waits() -> None:
    watcher = watched(observed("a: p80~", 1.0, most=4))
    assert place(watcher.memory, arrival("p"), 1.0, exclude=[ReplicaId("a")]) == NoReplica()
    assert len(watcher.decide(observed("a: p80", 1.5, most=4)).opened) == 1


def test_a_submitted_one_does_not_wait() -> None:
    """It is on a replica of which the scheduler does not know yet that it runs, and may have ended before a report."""
    watcher = watched(observed("b*:", 1.0, most=4))
    place(watcher.memory, arrival("p"), 1.0)
    place(watcher.memory, arrival("p"), 1.2, submitted=True)
    assert not watcher.decide(observed(NONE_UP, 1.5, most=4)).opened
    assert not watcher.memory.cluster.requests
    watcher.decide(observed("b: x10", 2.0, most=4))
    place(watcher.memory, arrival("q", 20), 2.0, submitted=True)
    assert [q.replica.id for q in watcher.memory.cluster.requests.values() if q.replica] == ["b", "b"]


def sleeping(sleeps: bool = True) -> Watcher:
    """A pool that sleeps without requests, or not, and keeps half a replica free with some."""
    limits = LiveLimits(Limits(slack=0.5), linger_s=5.0, foresight_s=0.0)
    return Watcher(PoolMemory(Terms("pack", limits, mode=Mode.ACT)), sleeps=sleeps)


def test_a_pool_without_requests_closes_its_last_replica_behind_the_linger_and_opens_none() -> None:
    watcher = sleeping()
    watcher.decide(observed("a: p10", 0.0, most=1))
    assert not watcher.decide(observed("a:", 1.0, most=1)).closed
    assert not watcher.decide(observed("a:", 5.0, most=1)).closed
    plan = watcher.decide(observed("a:", 6.5, most=1))
    assert plan.closed == ("a",) and not plan.opened
    assert not watcher.decide(observed("a%:", 7.0, most=1)).opened
    awake = sleeping(sleeps=False)
    for now in (0.0, 6.5):
        assert awake.decide(observed("a:", now, most=1)).closed == (), "others keep their slack"


def test_a_sleeping_replica_is_none_and_a_request_opens_one() -> None:
    watcher = sleeping()
    watcher.decide(observed("a:", 0.0, most=1))
    watcher.decide(observed("a%:", 1.0, most=1))
    assert not watcher.memory.cluster.replicas
    decision = place(watcher.memory, arrival("p", 20), 1.1)
    assert isinstance(decision, NoReplica) and decision.wake_s == watcher.memory.learned.experience.wake_s
    plan = watcher.decide(observed("a%:", 1.5, most=1))
    assert len(plan.opened) == 1, "the sleeper does not count against the maximum"
    assert not watcher.decide(observed("a&:", 2.0, most=1)).opened, "it is on its way"
    watcher.decide(observed("a:", 4.0, most=1))
    assert isinstance(place(watcher.memory, arrival("p", 20), 4.0), Place)
