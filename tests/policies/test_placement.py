"""Where arriving requests go: properties of best fit over any cluster, and its choices in small ones."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.model import (
    Blocks,
    ClusterState,
    Phase,
    ReplicaId,
    ReplicaLoad,
    ReplicaState,
    RequestId,
    RequestLoad,
    Tokens,
)
from policies.placement import POLICIES, Arrival, BestFit, NoReplica, Place, Queue, fits, least_loaded

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""

NO_HEADROOM = BestFit(Tokens(0))


def replica(
    id: str = "a", free: int = 10, requests: int = 0, limit: int = 4, state: ReplicaState = ReplicaState.RUNNING
) -> ReplicaLoad:
    """A replica of blocks of 16 tokens."""
    there = tuple(RequestLoad(RequestId(f"{id}{i}"), "", Tokens(1), Phase.DECODE, 0.0, 0) for i in range(requests))
    return ReplicaLoad(ReplicaId(id), state, "node", Tokens(640), 16, Blocks(free), limit, there)


def cluster(*replicas: ReplicaLoad) -> ClusterState:
    return ClusterState(replicas)


def arrival(tokens: int = 16) -> Arrival:
    return Arrival(RequestId("r"), Tokens(tokens))


replicas = st.lists(
    st.builds(
        replica,
        id=st.sampled_from("abcdef"),
        free=st.integers(0, 8),
        requests=st.integers(0, 3),
        limit=st.integers(1, 3),
        state=st.sampled_from(ReplicaState),
    ),
    unique_by=lambda r: r.id,
    max_size=6,
)
policies = st.builds(BestFit, st.integers(0, 64).map(Tokens))
arrivals = st.integers(0, 160).map(arrival)
excludes = st.sets(st.sampled_from("abcdef").map(ReplicaId))


@unhurried
@given(policies, replicas, arrivals, excludes)
def test_place_means_that_it_fits(
    policy: BestFit, loads: list[ReplicaLoad], coming: Arrival, exclude: set[ReplicaId]
) -> None:
    state = cluster(*loads)
    allowed = [r for r in state.running() if r.id not in exclude]
    fitting = [r for r in allowed if fits(r, coming.tokens, policy.headroom)]
    match policy.place(state, coming, exclude):
        case Place(chosen):
            assert chosen in {r.id for r in fitting}
        case Queue(chosen):
            assert not fitting and chosen in {r.id for r in allowed}
        case NoReplica():
            assert not allowed


@unhurried
@given(policies, replicas, arrivals)
def test_no_other_replica_that_fits_is_fuller(policy: BestFit, loads: list[ReplicaLoad], coming: Arrival) -> None:
    state = cluster(*loads)
    decision = policy.place(state, coming)
    if isinstance(decision, Place):
        chosen = state.replica(decision.replica)
        assert chosen is not None
        others = [r for r in state.running() if fits(r, coming.tokens, policy.headroom)]
        assert all((chosen.free_tokens, chosen.id) <= (r.free_tokens, r.id) for r in others)


@unhurried
@given(policies, replicas, arrivals, st.data())
def test_order_of_the_replicas_does_not_matter(
    policy: BestFit, loads: list[ReplicaLoad], coming: Arrival, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(loads))
    assert policy.place(cluster(*loads), coming) == policy.place(cluster(*shuffled), coming)


def test_fullest_replica_with_room_is_chosen() -> None:
    state = cluster(replica("a", free=9), replica("b", free=2), replica("c", free=1))
    assert NO_HEADROOM.place(state, arrival(32)) == Place(ReplicaId("b"))


def test_ties_go_to_the_smaller_id() -> None:
    assert NO_HEADROOM.place(cluster(replica("b"), replica("a")), arrival()) == Place(ReplicaId("a"))


@pytest.mark.parametrize(("headroom", "fit"), [(144, True), (145, False)], ids=["just fits", "is a token too much"])
def test_request_needs_room_to_grow(headroom: int, fit: bool) -> None:
    decision = BestFit(Tokens(headroom)).place(cluster(replica(free=10)), arrival(16))
    assert decision == (Place(ReplicaId("a")) if fit else Queue(ReplicaId("a")))


def test_replica_with_a_full_batch_has_no_room() -> None:
    state = cluster(replica("a", free=2, requests=4, limit=4), replica("b", free=9))
    assert NO_HEADROOM.place(state, arrival()) == Place(ReplicaId("b"))


def test_queue_is_where_the_fewest_requests_are() -> None:
    state = cluster(replica("a", free=1, requests=3), replica("b", free=0, requests=2))
    assert NO_HEADROOM.place(state, arrival(320)) == Queue(ReplicaId("b"))


def test_of_equal_queues_the_one_with_more_room_is_chosen() -> None:
    state = cluster(replica("a", free=1), replica("b", free=2))
    assert NO_HEADROOM.place(state, arrival(320)) == Queue(ReplicaId("b"))


def test_excluded_replica_is_not_chosen_even_to_queue() -> None:
    state = cluster(replica("a", free=10), replica("b", free=0))
    assert NO_HEADROOM.place(state, arrival(), {ReplicaId("a")}) == Queue(ReplicaId("b"))
    assert NO_HEADROOM.place(state, arrival(), {ReplicaId("a"), ReplicaId("b")}) == NoReplica()


@pytest.mark.parametrize("state", [ReplicaState.STARTING, ReplicaState.DRAINING, ReplicaState.STOPPED])
def test_replica_that_does_not_run_gets_nothing(state: ReplicaState) -> None:
    assert NO_HEADROOM.place(cluster(replica(state=state)), arrival()) == NoReplica()


def test_every_policy_is_made_from_its_headroom() -> None:
    assert POLICIES["best_fit"](Tokens(7)) == BestFit(Tokens(7))


A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")


def test_least_loaded_has_the_most_room_as_last_known() -> None:
    assert least_loaded(cluster(replica("a", free=1), replica("b", free=2)), [A, B], {B: 9}) == B


def test_replicas_with_equal_room_are_told_apart_by_what_was_sent() -> None:
    assert least_loaded(cluster(replica("a"), replica("b")), [A, B], {A: 1}) == B


def test_without_any_report_requests_are_spread_by_count() -> None:
    assert least_loaded(cluster(), [A, B, C], {A: 2, B: 1, C: 1}) == B


def test_known_room_comes_before_a_replica_of_which_nothing_is_known() -> None:
    assert least_loaded(cluster(replica("b", free=1)), [A, B], {B: 5}) == B


def test_only_running_replicas_are_chosen() -> None:
    assert least_loaded(cluster(replica("a", free=99)), [B], {}) == B
    assert least_loaded(cluster(replica("a")), [], {}) is None
