"""The live decisions: what becomes of an observed cluster, mode by mode, and that decisions are functions of it."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.cluster.changes import Arrival
from policies.decision.limits import Limits
from policies.decision.observation import Observation
from policies.decision.placement import Place, Queue
from policies.decision.planner import Decided, LiveLimits, Mode, Planner
from policies.model import Phase, ReplicaId, ReplicaState, RequestId, Tokens
from policies.plan import Move, Reason
from policies.rules.registry import POLICIES, policy
from tests.policies.observed import observed
from tests.policies.rehearsal import before, violations

NO_GROWTH = "pack:headroom_s=0,comfort=0,rest=0"


def planner(
    spec: str = NO_GROWTH,
    limits: Limits | None = None,
    linger_s: float = 5.0,
    by_hand_s: float = 60.0,
    epoch_s: float = 0.0,
) -> Planner:
    return Planner(policy(spec), LiveLimits(limits or Limits(), linger_s, 0.0, by_hand_s), epoch_s)


def decide(planner: Planner, *seen: Observation, mode: Mode = Mode.ACT) -> Decided:
    """The decision on the last of these observations."""
    for observation in seen:
        planner.observe(observation)
        decided = planner.decide(mode)
    return decided


def orders(moves: Sequence[Move]) -> list[str]:
    return sorted(f"{m.request}:{m.source}>{m.target} {m.reason}" for m in moves)


# --- packing ------------------------------------------------------------------------------------------


def test_a_replica_that_can_be_emptied_is_emptied_and_closed_after_a_while() -> None:
    made = planner()
    decided = decide(made, observed("a: p40 q20 | b: r15"))
    assert orders(decided.orders) == ["r:b>a drain"]
    assert not decided.plan.closed
    moving = observed("a: p40 q20 | b: r15", 1.0, moves="r:b>a")
    assert decide(made, moving) == Decided(decide(made, moving).plan, ())
    assert not decide(made, observed("a: p40 q20 r15 | b:", 2.0)).plan.closed
    assert not decide(made, observed("a: p40 q20 r15 | b:", 6.0)).plan.closed
    assert decide(made, observed("a: p40 q20 r15 | b:", 7.0)).plan.closed == ("b",)


def test_the_fewest_replicas_stay() -> None:
    made = planner(limits=Limits(min_replicas=2), linger_s=0.0)
    decided = decide(made, observed("a: p40 | b: | c:"))
    assert len(decided.plan.closed) == 1


def test_what_is_missing_to_the_fewest_is_opened() -> None:
    made = planner(limits=Limits(min_replicas=3))
    assert len(decide(made, observed("a: p40", most=5)).plan.opened) == 2


def test_what_will_be_short_of_room_before_the_next_decision_moves_away() -> None:
    """Each request grows by six tokens until then; an engine never reports more than it has."""
    decided = decide(planner(epoch_s=0.1), observed("a: p60 q30 | b: s40"))
    assert orders(decided.orders) == ["q:a>b overload"]
    assert not decide(planner(epoch_s=0.1), observed("a: p60 q28 | b: s40")).orders


def test_what_fits_nowhere_opens_one_replica_and_only_one() -> None:
    made = planner()
    assert len(decide(made, observed("a: p90 q40?", most=3)).plan.opened) == 1
    assert not decide(made, observed("a: p90 q40?", 1.0, most=3, opening=1)).plan.opened
    assert not decide(made, observed("a: p90 q40? | b*:", 2.0, most=3)).plan.opened


@pytest.mark.parametrize("starting", ["| c*:", ""], ids=["starting", "asked for"])
def test_while_a_replica_starts_none_is_emptied_or_closed(starting: str) -> None:
    opening = 0 if starting else 1
    made = planner(linger_s=0.0)
    decided = decide(made, observed(f"a: p40! | b: r15 | d: {starting}", most=9, opening=opening))
    assert (decided.orders, decided.plan.closed) == ((), ())
    decided = decide(made, observed("a: p40! | b: r15 | d:", 1.0))
    assert orders(decided.orders) == ["r:b>a drain"]
    assert decided.plan.closed == ("d",)


def test_a_start_that_does_not_end_is_not_waited_for() -> None:
    made = planner(linger_s=0.0)
    assert not decide(made, observed("a: p40! | b: r15 | c*:", most=9)).orders
    assert decide(made, observed("a: p40! | b: r15 | c*:", 91.0, most=9)).orders


# --- queued requests --------------------------------------------------------------------------------------


def test_a_queued_request_goes_where_there_is_room() -> None:
    decided = decide(planner(), observed("a: p90 q40? | b: r50"))
    assert orders(decided.orders) == ["q:a>b admit"]


def test_one_that_fits_where_it_is_queued_stays() -> None:
    assert not decide(planner(), observed("a: p50 q40? | b: r90")).orders


# --- modes, and replicas that are to be gone ------------------------------------------------------------


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_draining_replica_is_evacuated_whatever_the_mode_and_the_policy(mode: Mode, name: str) -> None:
    decided = decide(planner(name), observed("a^: p40 q20! r5> | b: s10 | c: t30"), mode=mode)
    (move,) = [move for move in decided.orders if move.reason is Reason.EVACUATE]
    assert (move.request, move.source) == ("p", "a")


def test_where_growth_has_no_room_what_is_to_be_gone_goes_all_the_same() -> None:
    made = planner("pack:headroom_s=100")
    assert orders(decide(made, observed("a^: p40 | b: q30"), mode=Mode.OFF).orders) == ["p:a>b evacuate"]


def test_what_fits_nowhere_has_a_replica_opened() -> None:
    decided = decide(planner(), observed("a^: p60 | b: q60", most=3))
    assert not decided.orders
    assert len(decided.plan.opened) == 1


def test_of_two_versions_each_keeps_its_requests() -> None:
    assert orders(decide(planner(), observed("a^: p40 | b@v2: q10 | c: r50"), mode=Mode.OFF).orders) == [
        "p:a>c evacuate"
    ]
    assert not decide(planner(), observed("a^: p40 | b@v2: q10"), mode=Mode.OFF).orders
    assert not decide(planner(), observed("a: p40 | b@v2: q10")).orders


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.OBSERVE])
def test_unless_it_is_to_act_nothing_else_is_done(mode: Mode) -> None:
    made = planner()
    decided = decide(made, observed("a: p40 q20 | b: r15"), mode=mode)
    assert not decided.orders
    assert bool(decided.plan.moves) is (mode is Mode.OBSERVE)
    assert made.cluster.requests[RequestId("r")].replica is made.cluster.replicas[ReplicaId("b")]


# --- placing ----------------------------------------------------------------------------------------------


def test_arrivals_count_from_then_on() -> None:
    made = planner("best_fit")
    made.observe(observed("a: p60 | b:"))
    places = [made.place(Arrival(RequestId(name), Tokens(30))) for name in "xyz"]
    assert places == [Place(ReplicaId("a")), Place(ReplicaId("b")), Place(ReplicaId("b"))]


def test_what_fits_nowhere_is_spread() -> None:
    made = planner("best_fit")
    made.observe(observed("a: p90 | b: q90"))
    places = [made.place(Arrival(RequestId(name), Tokens(30))) for name in "xy"]
    assert places == [Queue(ReplicaId("a")), Queue(ReplicaId("b"))]


# --- leaving alone ----------------------------------------------------------------------------------------


def test_a_request_moved_by_hand_is_left_alone_for_a_while() -> None:
    made = planner(by_hand_s=60.0)
    assert not decide(made, observed("a: p40! | b: r15", by_hand="r")).orders
    assert not decide(made, observed("a: p40! | b: r15", 59.0)).orders
    assert orders(decide(made, observed("a: p40! | b: r15", 61.0)).orders) == ["r:b>a drain"]


def test_an_order_that_was_put_off_is_given_again() -> None:
    made = planner(limits=Limits(cooldown_s=100))
    seen = observed("a: p40! | b: r15")
    assert decide(made, seen).orders
    assert not decide(made, seen).orders, "it rests, as if it had moved"
    made = planner(limits=Limits(cooldown_s=100))
    assert decide(made, seen).orders
    made.put_off([RequestId("r")])
    assert decide(made, seen).orders


# --- everything -------------------------------------------------------------------------------------------


def drawing(draw: random.Random, names: list[str]) -> str:
    """A cluster of up to five replicas with those requests, each somewhere."""
    replicas = [f"{name}{draw.choice(['', '', '', '', '*', '^'])}:" for name in "abcde"[: draw.randrange(1, 6)]]
    for name in names:
        index = draw.randrange(len(replicas))
        if "*" not in replicas[index]:
            replicas[index] += f" {name}{draw.randrange(1, 60)}{draw.choice(['', '', '', '?', '~', '>', '!'])}"
    return " | ".join(replicas)


@st.composite
def histories(draw: st.DrawFn) -> list[Observation]:
    rng = draw(st.randoms(use_true_random=False))
    alphabet = [a + b for a in "pqrst" for b in "uvwxy"]
    return [
        observed(drawing(rng, rng.sample(alphabet, rng.randrange(0, 14))), float(at), most=6, opening=rng.randrange(2))
        for at in range(draw(st.integers(1, 5)))
    ]


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(POLICIES)), st.sampled_from(Mode), histories())
def test_whatever_is_observed_orders_can_be_carried_out(name: str, mode: Mode, history: list[Observation]) -> None:
    made, again = planner(name, linger_s=0.0), planner(name, linger_s=0.0)
    for seen in history:
        made.observe(seen)
        was = before(made.cluster)
        decided = made.decide(mode)
        assert decided == decide(again, seen, mode=mode), "the same observations, other decisions"
        if not any(load.state is ReplicaState.DRAINING for load in seen.state.replicas):
            assert not violations(decided.plan, was) or mode is Mode.OFF
        made.cluster.check_integrity()
        loads = {load.id: load for load in seen.state.replicas}
        for order in decided.orders:
            assert order.source != order.target
            assert loads[order.target].state is ReplicaState.RUNNING
            (request,) = [q for q in loads[order.source].requests if q.id == order.request]
            assert request.immovable is None and request.phase is not Phase.MOVING
        assert len({order.request for order in decided.orders}) == len(decided.orders)
        assert not {order.source for order in decided.orders} & set(decided.plan.closed)
        assert not {order.target for order in decided.orders} & set(decided.plan.closed)
