"""The live decisions: what becomes of an observed cluster, mode by mode, and that decisions are functions of it."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.causes import PAIR_FAILURES, Cause
from policies.cluster.changes import Arrival
from policies.decision.deciding import SchedulerMemory, decide_pool, order_by_hand, place
from policies.decision.deciding import decide as decide_all
from policies.decision.limits import Limits, LiveLimits, Mode, Terms
from policies.decision.memory import PoolMemory
from policies.decision.observation import Observation, PoolReport
from policies.decision.placement import Decision, NoReplica, Place, Queue
from policies.model import Phase, PoolId, ReplicaId, ReplicaState, RequestId, Tokens
from policies.plan import Move, MoveReport, Path, Plan, Reason
from policies.rules.registry import POLICIES
from tests.counts import scaled
from tests.policies.decision.observed import Drawn, Watcher, observed

A, B, R = ReplicaId("a"), ReplicaId("b"), RequestId("r")
NO_GROWTH = "pack:headroom_s=0,comfort=0,rest=0"


def watcher(
    spec: str = NO_GROWTH,
    limits: Limits | None = None,
    linger_s: float = 5.0,
    by_hand_s: float = 60.0,
    lead_s: float = 0.0,
    mode: Mode = Mode.ACT,
    least: int = 0,
) -> Watcher:
    terms = Terms(spec, LiveLimits(limits or Limits(), linger_s, 0.0, by_hand_s, lead_s), mode=mode)
    return Watcher(PoolMemory(terms), least)


def decide(made: Watcher, seen: Drawn) -> Plan:
    """What is decided about that cluster."""
    return made.decide(seen)


def orders(moves: Sequence[Move]) -> list[str]:
    return sorted(f"{m.request}:{m.source}>{m.target} {m.reason}" for m in moves)


# --- packing ------------------------------------------------------------------------------------------


def test_a_replica_that_can_be_emptied_is_emptied_and_closed_after_a_while() -> None:
    made = watcher()
    decided = decide(made, observed("a: p40 q20 | b: r15"))
    assert orders(decided.moves) == ["r:b>a drain"]
    assert not decided.closed
    moving = observed("a: p40 q20 | b: r15", 1.0, moves="r:b>a")
    assert not decide(made, moving).moves
    assert not decide(made, observed("a: p40 q20 r15 | b:", 2.0)).closed
    assert not decide(made, observed("a: p40 q20 r15 | b:", 6.0)).closed
    assert decide(made, observed("a: p40 q20 r15 | b:", 7.0)).closed == ("b",)


def test_the_fewest_replicas_stay() -> None:
    made = watcher(least=2, linger_s=0.0)
    decided = decide(made, observed("a: p40 | b: | c:"))
    assert len(decided.closed) == 1


def test_what_is_missing_to_the_fewest_is_opened() -> None:
    made = watcher(least=3)
    assert len(decide(made, observed("a: p40", most=5)).opened) == 2


def test_what_will_be_short_of_room_before_the_next_decision_moves_away() -> None:
    """Each request grows by six tokens until then; an engine never reports more than it has."""
    decided = decide(watcher(lead_s=0.2), observed("a: p60 q30 | b: s40"))
    assert orders(decided.moves) == ["q:a>b overload"]
    assert not decide(watcher(lead_s=0.2), observed("a: p60 q28 | b: s40")).moves


def test_what_fits_nowhere_opens_one_replica_and_only_one() -> None:
    made = watcher()
    assert len(decide(made, observed("a: p90 q40?", most=3)).opened) == 1
    assert not decide(made, observed("a: p90 q40?", 1.0, most=3, opening=1)).opened
    assert not decide(made, observed("a: p90 q40? | b*:", 2.0, most=3)).opened


@pytest.mark.parametrize("starting", ["| c*:", ""], ids=["starting", "asked for"])
def test_while_a_replica_starts_none_is_emptied_or_closed(starting: str) -> None:
    opening = 0 if starting else 1
    made = watcher(linger_s=0.0)
    decided = decide(made, observed(f"a: p40! | b: r15 | d: {starting}", most=9, opening=opening))
    assert (decided.moves, decided.closed) == ((), ())
    decided = decide(made, observed("a: p40! | b: r15 | d:", 1.0))
    assert orders(decided.moves) == ["r:b>a drain"]
    assert decided.closed == ("d",)


def test_a_start_that_does_not_end_is_not_waited_for() -> None:
    made = watcher(linger_s=0.0)
    assert not decide(made, observed("a: p40! | b: r15 | c*:", most=9)).moves
    assert decide(made, observed("a: p40! | b: r15 | c*:", 91.0, most=9)).moves


# --- queued requests --------------------------------------------------------------------------------------


def test_a_queued_request_goes_where_there_is_room() -> None:
    decided = decide(watcher(), observed("a: p90 q40? | b: r50"))
    assert orders(decided.moves) == ["q:a>b admit"]


def test_one_that_fits_where_it_is_queued_stays() -> None:
    assert not decide(watcher(), observed("a: p50 q40? | b: r90")).moves


# --- modes, and replicas that are to be gone ------------------------------------------------------------


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_draining_replica_is_evacuated_whatever_the_mode_and_the_policy(mode: Mode, name: str) -> None:
    decided = decide(watcher(name), observed("a^: p40 q20! r5> | b: s10 | c: t30"))
    (move,) = [move for move in decided.moves if move.reason is Reason.EVACUATE]
    assert (move.request, move.source) == ("p", "a")


def test_where_growth_has_no_room_what_is_to_be_gone_goes_all_the_same() -> None:
    made = watcher("pack:headroom_s=100")
    assert orders(decide(made, observed("a^: p40 | b: q30")).moves) == ["p:a>b evacuate"]


def test_what_fits_nowhere_has_a_replica_opened() -> None:
    decided = decide(watcher(), observed("a^: p60 | b: q60", most=3))
    assert not decided.moves
    assert len(decided.opened) == 1


def test_of_two_versions_each_keeps_its_requests() -> None:
    assert orders(decide(watcher(mode=Mode.OFF), observed("a^: p40 | b@v2: q10 | c: r50")).moves) == ["p:a>c evacuate"]
    assert not decide(watcher(mode=Mode.OFF), observed("a^: p40 | b@v2: q10")).moves
    assert not decide(watcher(), observed("a: p40 | b@v2: q10")).moves


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.OBSERVE])
def test_unless_it_is_to_act_nothing_else_is_done(mode: Mode) -> None:
    made = watcher(mode=mode)
    assert replace(decide(made, observed("a: p40 q20 | b: r15")), proposed=None) == Plan()
    cluster = made.memory.cluster
    assert cluster.requests[RequestId("r")].replica is cluster.replicas[ReplicaId("b")]


# --- placing ----------------------------------------------------------------------------------------------


def placed(made: Watcher, names: str, tokens: int = 30, at: float = 0.0) -> list[Decision]:
    return [place(made.memory, Arrival(RequestId(name), Tokens(tokens)), at) for name in names]


def test_arrivals_count_from_then_on() -> None:
    made = watcher("best_fit")
    made.observe(observed("a: p60 | b:"))
    assert placed(made, "xyz") == [Place(ReplicaId("a")), Place(ReplicaId("b")), Place(ReplicaId("b"))]


def test_what_fits_nowhere_is_spread() -> None:
    made = watcher("best_fit")
    made.observe(observed("a: p90 | b: q90"))
    assert placed(made, "xy") == [Queue(ReplicaId("a")), Queue(ReplicaId("b"))]


def test_what_an_engine_has_queued_counts_where_the_next_one_queues() -> None:
    made = watcher("best_fit")
    made.observe(observed("a: p90 v60? | b: q50 r40"))
    assert placed(made, "xy", 70) == [Queue(ReplicaId("b")), Queue(ReplicaId("a"))]


def test_without_a_running_replica_there_is_no_place() -> None:
    made = watcher("best_fit")
    made.observe(observed("a*: | b^:", most=3))
    assert placed(made, "x") == [NoReplica()]


def test_a_placement_counts_until_it_is_reported_or_expires() -> None:
    made = watcher("best_fit")
    made.observe(observed("a: p60 | b:"))
    placed(made, "x")
    replica = made.memory.cluster.replicas[ReplicaId("a")]
    made.observe(observed("a: p60 | b:", 1.0))
    assert (replica.free, list(replica.requests)) == (10, ["p", "x"]), "the report is older than the placement"
    made.observe(observed("a: p60 x30~ | b:", 1.5))
    made.observe(observed("a: p60 | b:", 1.9))
    assert list(replica.requests) == ["p"], "reported, and over"
    placed(made, "y", at=2.0)
    made.observe(observed("a: p60 | b:", 3.9))
    assert list(replica.requests) == ["p", "y"]
    made.observe(observed("a: p60 | b:", 4.0))
    assert list(replica.requests) == ["p"], "expired"


def test_a_request_that_is_placed_again_counts_where_it_goes_and_not_where_it_was() -> None:
    made = watcher("best_fit")
    made.observe(observed("a: p60 | b:"))
    request = Arrival(RequestId("p"), Tokens(60))
    assert place(made.memory, request, 0.0, [ReplicaId("a")]) == Place(ReplicaId("b"))
    made.observe(observed("a: p60 | b:", 0.5))
    assert [len(r.requests) for r in made.memory.cluster.replicas.values()] == [0, 1]
    made.observe(observed("a: | b: p60", 1.0))
    assert [len(r.requests) for r in made.memory.cluster.replicas.values()] == [0, 1]


# --- leaving alone ----------------------------------------------------------------------------------------


def test_a_request_moved_by_hand_is_left_alone_for_a_while() -> None:
    made = watcher(by_hand_s=60.0)
    assert not decide(made, observed("a: p40! | b: r15", by_hand="r")).moves
    assert not decide(made, observed("a: p40! | b: r15", 59.0)).moves
    assert orders(decide(made, observed("a: p40! | b: r15", 61.0)).moves) == ["r:b>a drain"]


def test_what_was_moved_rests() -> None:
    made = watcher(limits=Limits(cooldown_s=100))
    assert decide(made, observed("a: p40! | b: r15")).moves
    assert not decide(made, observed("a: p40! | b: r15", 99.0)).moves
    assert decide(made, observed("a: p40! | b: r15", 100.0)).moves


# --- what may be under way ------------------------------------------------------------------------------


CROWD = "a: p10 q10 r10 s10 t10 | b: u45! | c: v45!"
"""Replica a is emptied for as long as moves may begin."""


def bounded(at_once: int | None = None, per_replica: int | None = None, **limits: Any) -> Watcher:
    made = watcher(limits=Limits(**limits))
    terms = replace(made.memory.terms, moves_at_once=at_once, moves_per_replica=per_replica)
    return Watcher(PoolMemory(terms))


@pytest.mark.parametrize(
    ("at_once", "per_replica", "moves"), [(None, None, 5), (3, None, 3), (None, 2, 2), (0, None, 0)]
)
def test_only_so_many_moves_begin(at_once: int | None, per_replica: int | None, moves: int) -> None:
    made = bounded(at_once, per_replica)
    plan = decide(made, observed(CROWD))
    assert len(plan.moves) == moves
    under_way = " ".join(f"{m.request}:{m.source}>{m.target}" for m in plan.moves)
    again = decide(made, observed(CROWD, 1.0, moves=under_way))
    assert not again.moves or moves == 5, "the first ones are still under way"


def test_a_move_that_is_not_made_leaves_no_trace() -> None:
    made = bounded(0, cooldown_s=100.0)
    for at in range(3):
        assert not decide(made, observed(CROWD, float(at))).moves
        assert [len(r.requests) for r in made.memory.cluster.replicas.values()] == [5, 1, 1]
        assert not made.memory.cluster.resting and not made.memory.cluster.held
        made.memory.cluster.check_integrity()


def test_a_move_that_did_not_begin_is_home_again() -> None:
    made = watcher()
    assert decide(made, observed("a: p40! | b: r15")).moves
    assert made.memory.cluster.replicas[ReplicaId("b")].held == 15
    made.observe(observed("a: p40! | b: r15", 1.0))
    assert [list(r.requests) for r in made.memory.cluster.replicas.values()] == [["p"], ["r"]]
    assert made.memory.cluster.replicas[ReplicaId("b")].held == 0


def failed(made: Watcher, cause: Cause, at: float, drawing: str = "a: p40! | b: r15") -> Plan:
    """What is decided after a move from b to a that failed."""
    seen = observed(drawing, at)
    report = replace(made.report(seen), moves=(MoveReport(R, B, A, moved=False, cause=cause),))
    (plan,) = decide_pool(made.memory, report, at)
    return plan


@pytest.mark.parametrize("cause", Cause)
def test_a_pair_whose_moves_keep_failing_rests_if_it_is_the_pairs_fault(cause: Cause) -> None:
    made = watcher()
    decide(made, observed("a: p40! | b: r15"))
    plans = [failed(made, cause, float(at)) for at in (1, 2, 3)]
    assert [bool(plan.moves) for plan in plans] == [True, True, cause not in PAIR_FAILURES]
    assert decide(made, observed("a: p40! | b: r15", 33.0)).moves


def test_no_failures_bar_an_evacuation() -> None:
    made = watcher()
    decide(made, observed("a: p40! | b: r15"))
    for at in (1, 2):
        failed(made, Cause.PEER_LOST, float(at))
    assert not failed(made, Cause.PEER_LOST, 3.0).moves
    assert orders(decide(made, observed("a: p40! | b^: r15", 4.0)).moves) == ["r:b>a evacuate"]


def test_a_move_by_hand_is_under_way_until_it_is_reported() -> None:
    made = watcher()
    made.observe(observed("a: p40! | b: r15"))
    move = order_by_hand(made.memory, Move(R, B, A, Tokens(15), Reason.MANUAL, 0), 0.5)
    assert move.path is Path.TOKENS and (move.kv_s, move.tokens_s) == (None, None), "no step has been seen"
    assert not decide(made, observed("a: p40! | b: r15", 1.0, moves="r:b>a")).moves
    assert made.memory.cluster.replicas[B].held == 15


# --- pools ------------------------------------------------------------------------------------------------


def test_two_pools_have_nothing_in_common() -> None:
    """Alone, the one pool empties a replica, and the other opens one; together, they decide just that."""

    def seen(name: str, drawing: str, most: int) -> PoolReport:
        watched = Watcher(PoolMemory(Terms()))
        report = watched.report(observed(drawing, most=most))
        return replace(report, pool=replace(report.pool, deployment=PoolId(name), min_replicas=1))

    full, idle = seen("full", "a: p90 q40? | b: s95", 3), seen("idle", "c: t10 | d:", 9)
    terms = Terms(NO_GROWTH, LiveLimits(Limits(slack=0.1), 0.0, 0.0))
    alone = {
        pool.pool.deployment: decide_all(SchedulerMemory(terms), Observation(0.0, (pool,)))[pool.pool.deployment]
        for pool in (full, idle)
    }
    memory = SchedulerMemory(terms)
    together = decide_all(memory, Observation(0.0, (full, idle)))
    assert together == alone
    assert (len(together[PoolId("full")][0].opened), together[PoolId("idle")][0].closed) == (1, ("d",))
    placing = place(memory.pool(PoolId("full")), Arrival(RequestId("x"), Tokens(50)), 0.1)
    assert placing in (Queue(ReplicaId("a")), Queue(ReplicaId("b"))), "the other pool's room is not its room"


class TwoPools:
    """Two pools in one observation, each with a memory of its own that decides on it alone."""

    def __init__(self, terms: Terms, first: str, second: str) -> None:
        self.ids = (PoolId("first"), PoolId("second"))
        self.memory = SchedulerMemory(terms)
        self.alone = [SchedulerMemory(terms) for _ in self.ids]
        self.watchers = [Watcher(self.memory.pool(pool)) for pool in self.ids]
        self.drawings = (first, second)

    def decide(self, now: float, *bounds: tuple[int, int]) -> list[Plan]:
        """The plans of both pools, which have those bounds: what each decides alone."""
        seen = []
        for pool, watched, drawing, (least, most) in zip(self.ids, self.watchers, self.drawings, bounds, strict=True):
            report = watched.report(observed(drawing, now, most=most))
            seen.append(replace(report, pool=replace(report.pool, deployment=pool, min_replicas=least)))
        plans = decide_all(self.memory, Observation(now, tuple(seen)))
        for memory, report in zip(self.alone, seen, strict=True):
            pool = report.pool.deployment
            assert decide_all(memory, Observation(now, (report,))) == {pool: plans[pool]}
        return [plans[pool][0] for pool in self.ids]


def test_no_request_moves_from_one_pool_to_another() -> None:
    """An overloaded replica and one that could be emptied have room only in the other pool."""
    two = TwoPools(
        Terms(NO_GROWTH, LiveLimits(Limits(), 5.0, 0.0, lead_s=0.0)), "a: p60 q45 | b: r90", "c: p40 q20 | d: r15"
    )
    first, second = two.decide(0.0, (2, 2), (1, 2))
    assert not first.moves, "b has no room"
    assert orders(second.moves) == ["r:d>c drain"], "requests of one id in two pools are two requests"
    assert [len(two.memory.pool(pool).locations.under_way) for pool in two.ids] == [0, 1]


@pytest.mark.parametrize(("drawing", "opened"), [("a: p90 | b: q90", 1), ("a: p10 | b:", 0)], ids=["full", "free"])
def test_each_pool_keeps_its_own_slack(drawing: str, opened: int) -> None:
    two = TwoPools(Terms(NO_GROWTH, LiveLimits(Limits(slack=1.0), 99.0, 0.0, lead_s=0.0)), "c: | d: | e:", drawing)
    first, second = two.decide(0.0, (1, 9), (1, 3))
    assert (len(first.opened), len(second.opened)) == (0, opened)


def test_each_pool_has_its_own_minimum_and_maximum() -> None:
    two = TwoPools(Terms(NO_GROWTH, LiveLimits(Limits(), 0.0, 0.0, lead_s=0.0)), "a: | b: | c:", "d: | e: | f:")
    first, second = two.decide(0.0, (3, 3), (1, 3))
    assert (len(first.closed), len(second.closed)) == (0, 2)
    few = TwoPools(Terms(NO_GROWTH, LiveLimits(Limits(), 0.0, 0.0, lead_s=0.0)), "a:", "b:")
    first, second = few.decide(0.0, (3, 3), (1, 3))
    assert (len(first.opened), len(second.opened)) == (2, 0)


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
def histories(draw: st.DrawFn) -> list[Drawn]:
    rng = draw(st.randoms(use_true_random=False))
    alphabet = [a + b for a in "pqrst" for b in "uvwxy"]
    return [
        observed(drawing(rng, rng.sample(alphabet, rng.randrange(0, 14))), float(at), most=6, opening=rng.randrange(2))
        for at in range(draw(st.integers(1, 5)))
    ]


@settings(deadline=None, max_examples=scaled(300), suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(POLICIES)), st.sampled_from(Mode), histories())
def test_whatever_is_observed_moves_can_be_carried_out(name: str, mode: Mode, history: list[Drawn]) -> None:
    made, again = (watcher(name, linger_s=0.0, mode=mode) for _ in range(2))
    for seen in history:
        plan = made.decide(seen)
        assert plan == again.decide(seen), "the same observations, other decisions"
        made.memory.cluster.check_integrity()
        loads = {load.id: load for load in seen.loads}
        for move in plan.moves:
            assert move.source != move.target
            assert loads[move.target].state is ReplicaState.RUNNING
            (request,) = [q for q in loads[move.source].requests if q.id == move.request]
            assert request.immovable is None and request.phase is not Phase.MOVING
            assert move.path is not None
        assert not plan.evicted and not plan.placements
        assert len({move.request for move in plan.moves}) == len(plan.moves)
        assert not {end for move in plan.moves for end in (move.source, move.target)} & set(plan.closed)
