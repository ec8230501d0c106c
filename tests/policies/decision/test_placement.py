"""Where arriving requests go: properties of best fit over any cluster, and its choices in small ones."""

from collections.abc import Collection

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.cluster.changes import Arrival
from policies.cost.service import ReplicaSpeed
from policies.cost.steps import StepCosts, proportional
from policies.decision.deciding import place
from policies.decision.limits import Terms
from policies.decision.memory import PoolMemory
from policies.decision.placement import (
    Decision,
    NoReplica,
    Place,
    PlacingAlone,
    PlacingView,
    Queue,
    ReplicaView,
    placing_view,
)
from policies.model import (
    Blocks,
    Phase,
    ReplicaId,
    ReplicaLoad,
    ReplicaState,
    RequestId,
    RequestLoad,
    Tokens,
)
from policies.prefix.names import default_naming
from policies.rules.registry import POLICIES
from tests.policies.cluster.named import impose
from tests.policies.decision.observed import Drawn, Watcher

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""


def replica(
    id: str = "a", free: int = 10, requests: int = 0, limit: int = 4, state: ReplicaState = ReplicaState.RUNNING
) -> ReplicaLoad:
    """A replica of blocks of 16 tokens."""
    there = tuple(RequestLoad(RequestId(f"{id}{i}"), "", Tokens(1), Phase.DECODE, 0.0, 0) for i in range(requests))
    return ReplicaLoad(ReplicaId(id), state, "node", Tokens(640), 16, Blocks(free), limit, there)


Cluster = tuple[ReplicaLoad, ...]


def cluster(*replicas: ReplicaLoad) -> Cluster:
    return tuple(sorted(replicas, key=lambda r: r.id))


def running(state: Cluster) -> Cluster:
    return tuple(r for r in state if r.state is ReplicaState.RUNNING)


def choose(state: Cluster, coming: Arrival, exclude: Collection[ReplicaId] = (), headroom: int = 0) -> Decision:
    """What best fit says."""
    return decide("best_fit", state, coming, exclude, headroom)


def decide(
    policy: str, state: Cluster, coming: Arrival, exclude: Collection[ReplicaId] = (), headroom: int = 0
) -> Decision:
    """What a policy says of a cluster that is as observed."""
    made = Watcher(PoolMemory(Terms(policy)))
    made.observe(Drawn(0.0, state))
    impose(made.memory.cluster, headroom=headroom)
    return place(made.memory, coming, 0.0, exclude)


def fits(load: ReplicaLoad, tokens: int, headroom: int) -> bool:
    """The rule in other words: the request, and growth for it and all that are there, in free blocks; a free slot."""
    growth = headroom * (len(load.requests) + 1)
    alone = not load.requests and load.free_tokens == load.capacity_tokens
    return len(load.requests) < load.max_requests and (
        load.free_tokens >= tokens + growth or (alone and load.free_tokens >= tokens)
    )


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
policies = st.sampled_from(sorted(POLICIES))
headrooms = st.integers(0, 64)
arrivals = st.integers(1, 160).map(arrival)
excludes = st.sets(st.sampled_from("abcdef").map(ReplicaId))


@unhurried
@given(policies, replicas, arrivals, excludes, headrooms)
def test_place_means_that_it_fits(
    name: str, loads: list[ReplicaLoad], coming: Arrival, exclude: set[ReplicaId], headroom: int
) -> None:
    state = cluster(*loads)
    allowed = {r.id: r for r in running(state) if r.id not in exclude}
    match decide(name, state, coming, exclude, headroom):
        case Place(chosen):
            assert fits(allowed[chosen], coming.tokens, 0)
        case Queue(chosen):
            assert chosen in allowed
            assert not any(fits(r, coming.tokens, headroom) for r in allowed.values())
        case NoReplica():
            assert not allowed


@unhurried
@given(replicas, arrivals, headrooms)
def test_best_fit_chooses_the_fullest_that_fits(loads: list[ReplicaLoad], coming: Arrival, headroom: int) -> None:
    state = cluster(*loads)
    decision = choose(state, coming, headroom=headroom)
    if isinstance(decision, Place):
        [chosen] = [r for r in state if r.id == decision.replica]
        others = [r for r in running(state) if fits(r, coming.tokens, headroom)]
        assert all(_room(chosen, headroom) <= _room(r, headroom) for r in others)


def _room(load: ReplicaLoad, headroom: int) -> int:
    return load.free_tokens - headroom * len(load.requests)


@unhurried
@given(policies, replicas, arrivals, st.data())
def test_order_of_the_replicas_does_not_matter(
    name: str, loads: list[ReplicaLoad], coming: Arrival, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(loads))
    assert decide(name, cluster(*loads), coming) == decide(name, cluster(*shuffled), coming)


def test_fullest_replica_with_room_is_chosen() -> None:
    state = cluster(replica("a", free=9), replica("b", free=2), replica("c", free=1))
    assert choose(state, arrival(32)) == Place(ReplicaId("b"))


def test_ties_go_to_the_smaller_id() -> None:
    assert choose(cluster(replica("b"), replica("a")), arrival()) == Place(ReplicaId("a"))


@pytest.mark.parametrize(("headroom", "fit"), [(144, True), (145, False)], ids=["just fits", "is a token too much"])
def test_request_needs_room_to_grow(headroom: int, fit: bool) -> None:
    decision = choose(cluster(replica(free=10)), arrival(16), headroom=headroom)
    assert decision == (Place(ReplicaId("a")) if fit else Queue(ReplicaId("a")))


def test_replica_with_a_full_batch_has_no_room() -> None:
    state = cluster(replica("a", free=2, requests=4, limit=4), replica("b", free=9))
    assert choose(state, arrival()) == Place(ReplicaId("b"))


def test_queue_is_where_the_fewest_tokens_are_missing() -> None:
    state = cluster(replica("a", free=1, requests=2), replica("b", free=2, requests=3))
    assert choose(state, arrival(320)) == Queue(ReplicaId("b"))


def test_among_equally_full_replicas_the_queue_is_where_the_fewest_requests_are() -> None:
    state = cluster(replica("a", free=1, requests=3), replica("b", free=1, requests=2))
    assert choose(state, arrival(320)) == Queue(ReplicaId("b"))


def test_queue_is_where_blocks_are_free_without_headroom() -> None:
    state = cluster(replica("a", free=2, requests=1), replica("b", free=4, requests=3))
    assert choose(state, arrival(64), headroom=1000) == Queue(ReplicaId("b"))


def test_queue_avoids_a_full_batch_however_much_is_free() -> None:
    state = cluster(replica("a", free=9, requests=4, limit=4), replica("b", free=1, requests=3))
    assert choose(state, arrival(320)) == Queue(ReplicaId("b"))


def test_excluded_replica_is_not_chosen_even_to_queue() -> None:
    state = cluster(replica("a", free=10), replica("b", free=0))
    assert choose(state, arrival(), {ReplicaId("a")}) == Queue(ReplicaId("b"))
    assert choose(state, arrival(), {ReplicaId("a"), ReplicaId("b")}) == NoReplica()


@pytest.mark.parametrize("state", [ReplicaState.STARTING, ReplicaState.DRAINING, ReplicaState.STOPPED])
def test_replica_that_does_not_run_gets_nothing(state: ReplicaState) -> None:
    assert choose(cluster(replica(state=state)), arrival()) == NoReplica()


# --- without the scheduler ----------------------------------------------------------------------------

A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")
SPEED = ReplicaSpeed(StepCosts(proportional(0.001), overhead_s=0.02, context_s=1e-5), chunk_tokens=100)


def view(speed: ReplicaSpeed | None = None, **replicas: ReplicaView) -> PlacingAlone:
    """Placements with a view of these replicas, as of time 0."""
    return PlacingAlone(PlacingView({ReplicaId(name): seen for name, seen in replicas.items()}, speed), 0.0)


def seen(free: int = 1000, requests: int = 0, context: int = 0, backlog: int = 0) -> ReplicaView:
    return ReplicaView(Tokens(free), requests, context, backlog)


def sent(alone: PlacingAlone, *tokens: int, running: Collection[ReplicaId] = (A, B), now: float = 0.0) -> str:
    """The replicas of requests of these sizes, one after the other."""
    return "".join(alone.place(RequestId(f"r{n}"), size, running, now) or "-" for n, size in enumerate(tokens))


def test_before_step_times_are_known_the_most_free_tokens_count() -> None:
    assert sent(view(a=seen(10), b=seen(20)), 5) == "b"
    assert sent(view(a=seen(12), b=seen(20)), 5, 5, 5, 5) == "bbab", "its own requests count"
    assert sent(view(), 5, 5, 5, 5, running=(A, B, C)) == "abca", "nothing is known of any"
    assert sent(view(b=seen(1)), 1) == "b"


def test_the_soonest_first_token_is_behind_the_prefills_of_the_replica_that_is_free_first() -> None:
    speed = ReplicaSpeed(StepCosts(proportional(0.001), 0.02), chunk_tokens=100)
    alone = view(speed, a=seen(backlog=300), b=seen(backlog=200, requests=10))
    # Steps of a hundred tokens take 0.12 s, beside ten requests 0.13 s; the last one has one token beside them.
    assert alone.soonest_s((A, B), 0.0) == pytest.approx(2 * 0.13 + 0.031)
    assert alone.soonest_s((A,), 0.1) == pytest.approx(3 * 0.12 - 0.1 + 0.021)
    assert alone.soonest_s((A,), 9.0) == pytest.approx(0.021), "as of the last view, they are over by now"
    assert alone.soonest_s((), 0.0) == view(a=seen(backlog=300)).soonest_s((A,), 0.0) == 0.0
    assert alone.soonest_s((C,), 0.0) == pytest.approx(0.021), "a new replica has no prefills"


def test_only_running_replicas_are_chosen() -> None:
    assert sent(view(a=seen(99), b=seen(1)), 1, running=[B]) == "b"
    assert sent(view(a=seen(99)), 1, running=[]) == "-"


@pytest.mark.parametrize("speed", [None, SPEED])
def test_an_ended_request_counts_no_more(speed: ReplicaSpeed | None) -> None:
    alone = view(speed, a=seen(50), b=seen(49))
    first = sent(alone, 40)
    alone.ended(RequestId("r0"))
    alone.ended(RequestId("another"))
    assert sent(alone, 40, now=9.0) == first == "a"


def test_the_soonest_first_token_counts() -> None:
    assert sent(view(SPEED, a=seen(500, backlog=400), b=seen(400, 5, 300)), 50) == "b", "a queue of prefills"
    assert sent(view(SPEED, a=seen(500, 9, 40_000), b=seen(400, 9, 300)), 50) == "b", "slower steps"
    assert sent(view(SPEED, a=seen(500, backlog=400), b=seen(49)), 50) == "a", "no room"


def test_a_queue_of_prefills_is_over_after_its_time() -> None:
    alone = view(SPEED, a=seen(1000, backlog=400), b=seen(1000, 5, 300))
    assert [sent(alone, 50, now=now) for now in (0.0, 9.0)] == ["b", "a"]


def test_prompts_queue_where_they_were_sent() -> None:
    assert sent(view(SPEED, a=seen(), b=seen()), 100, 100, 100, 100) == "abab"


def test_the_view_is_of_the_present_cluster() -> None:
    made = Watcher(PoolMemory(Terms("best_fit")))
    made.observe(Drawn(0.0, cluster(replica("a", free=10, requests=2), replica("b", state=ReplicaState.STARTING))))
    naming = default_naming(16)
    seen_a = ReplicaView(Tokens(160), 2, 2)
    ttft_s = {"default": 2.0}
    assert placing_view(made.memory.cluster, SPEED, naming, ttft_s) == PlacingView({A: seen_a}, SPEED, naming, ttft_s)
    place(made.memory, arrival(32), 0.0)
    assert placing_view(made.memory.cluster, None, naming, {}).replicas == {A: ReplicaView(Tokens(128), 3, 34)}
