"""Decisions under a service level: a replica is full when its KV cache is, or when its steps are too slow."""

import json
from dataclasses import replace
from math import inf

import pytest

from policies.cluster.changes import Arrival
from policies.cost.fit import LEAST_PREFILLED, StepTotals
from policies.cost.latencies import ERROR, WINDOW_S
from policies.cost.service import ReplicaSpeed, ServiceLevel, strictest
from policies.cost.steps import PrefillChunk, StepCosts, proportional
from policies.decision.deciding import place
from policies.decision.level.scaling import ScaleDownBlock, ScaleUp, scaling_report
from policies.decision.level.service import STATES, service_report
from policies.decision.limits import LiveLimits, Terms
from policies.decision.memory import PoolMemory
from policies.decision.placement import Place, Queue
from policies.model import ReplicaId, RequestId, Tokens
from policies.plan import Reason
from policies.precedence import Precedence, ServiceClass, ServiceClasses
from tests.policies.decision.observed import Watcher, observed

COSTS = StepCosts(proportional(0.001), overhead_s=0.020)
"""A step takes 20 ms and one more per request; a prefill, one per token."""
TWO = ServiceLevel(itl_p99_s=0.0225)
"""Two requests per replica."""
LIMITS = LiveLimits(linger_s=1e9, foresight_s=0.0, lead_s=0.0)


def watcher(level: ServiceLevel | None, costs: StepCosts | None = COSTS, policy: str = "pack:headroom_s=0") -> Watcher:
    speed = None if costs is None else ReplicaSpeed(costs)
    return Watcher(PoolMemory(Terms(policy, LIMITS, service=level, speed=speed)))


def arriving(made: Watcher, tokens: int = 5) -> str:
    """The replica of an arrival; with a question mark if the request queues there."""
    placing = place(made.memory, Arrival(RequestId("new"), Tokens(tokens)), 1.0)
    assert isinstance(placing, Place | Queue)
    return placing.replica + "?" * isinstance(placing, Queue)


@pytest.mark.parametrize(("level", "replica"), [(None, "a"), (TWO, "b"), (ServiceLevel(itl_p99_s=0.5), "a")])
def test_an_arrival_goes_where_steps_stay_fast_enough(level: ServiceLevel | None, replica: str) -> None:
    made = watcher(level, policy="best_fit")
    made.decide(observed("a: p10 q10 | b: r10"))
    assert arriving(made) == replica


def test_an_arrival_queues_where_every_replica_is_too_slow() -> None:
    made = watcher(TWO)
    made.decide(observed("a: p10 q10 | b: r10 s10"))
    assert arriving(made).endswith("?")


def test_requests_leave_a_replica_whose_steps_are_too_slow() -> None:
    crowded = observed("a: p10 q11 r12 | b: s10")
    assert [move.reason for move in watcher(None).decide(crowded).moves] == [Reason.DRAIN]
    (move,) = watcher(TWO).decide(crowded).moves
    assert (move.target, move.reason) == (ReplicaId("b"), Reason.OVERLOAD)


def test_a_replica_opens_when_all_are_too_slow() -> None:
    crowded = observed("a: p10 q10 r10 | b: s10 t10", most=4)
    assert watcher(None).decide(crowded).opened == ()
    assert len(watcher(TWO).decide(crowded).opened) == 1


def test_no_replica_is_emptied_onto_one_that_gets_too_slow() -> None:
    calm = observed("a: p10 q10 | b: r10")
    assert [move.reason for move in watcher(None).decide(calm).moves] == [Reason.DRAIN]
    assert watcher(TWO).decide(calm).moves == ()


def test_a_long_context_counts_by_the_time_to_read_it() -> None:
    made = watcher(ServiceLevel(itl_p99_s=0.03), replace(COSTS, context_s=1e-4), policy="best_fit")
    made.decide(observed("a: p70 | b: q60"))
    assert arriving(made, tokens=20) == "b"


@pytest.mark.parametrize(("drawing", "replica"), [("a: p30 q20 | b: r10", "a"), ("a: p30 q20~ | b: r10", "b")])
def test_an_arrival_avoids_a_queue_of_prefills(drawing: str, replica: str) -> None:
    made = watcher(ServiceLevel(ttft_p99_s=0.05), policy="best_fit")
    made.memory.learned.experience.observe_arrival(5, 0.0)
    made.decide(observed(drawing))
    assert arriving(made) == replica


def test_placements_since_the_last_report_are_prefills_to_wait_for() -> None:
    made = watcher(ServiceLevel(ttft_p99_s=0.06), policy="best_fit")
    made.decide(observed("a: p30 | b: r10"))
    places = [place(made.memory, Arrival(RequestId(name), Tokens(20)), 1.0) for name in "xyz"]
    assert places == [Place(ReplicaId("a")), Place(ReplicaId("b")), Queue(ReplicaId("b"))]


def test_a_stopping_replica_is_evacuated_however_slow_the_others_get() -> None:
    made = watcher(ServiceLevel(ttft_p99_s=0.05, itl_p99_s=0.0215))
    plan = made.decide(observed("a^: p10 q10 | b: r10 s40~", most=2))
    assert sorted((move.request, move.target, move.reason) for move in plan.moves) == [
        ("p", "b", Reason.EVACUATE),
        ("q", "b", Reason.EVACUATE),
    ]


def test_before_step_times_are_known_nothing_is_limited() -> None:
    made = watcher(TWO, costs=None)
    made.decide(observed("a: p10 q10 r10 | b: s10"))
    assert made.memory.cluster.conditions.speed is None
    shown = service_report(made.memory, 0.0, {})
    assert shown is not None and shown.to_json() == {
        "target": {"ttft_p99_s": None, "itl_p99_ms": 22.5},
        "reached": {"ttft_p99_s": None, "itl_p99_ms": None, "first_tokens": 0, "gaps": 0},
        "window_s": WINDOW_S,
        "state": "measuring",
    }


def test_reports_of_steps_make_the_limit() -> None:
    made, totals = watcher(TWO, costs=None), StepTotals()
    for now in range(9):
        batch = now % 3 + 1
        prompt = [PrefillChunk(LEAST_PREFILLED, 0)] if now == 1 else []
        totals = totals.add(COSTS.step_s(batch, 0, prompt), batch, 0, prompt, steps=40)
        drawn = observed("a: p10 q10 r10 | b: s10", float(now))
        a, b = drawn.loads
        made.decide(replace(drawn, loads=(replace(a, steps=totals, step_tokens=64), b)))
    limited = made.memory.cluster.conditions.speed
    assert limited is not None and limited.speed.chunk_tokens == 64
    assert limited.speed.costs.step_s(2, 20) == pytest.approx(0.022, rel=1e-3)


@pytest.mark.parametrize(
    ("level", "drawing", "state"),
    [
        (TWO, "a: p10 q10 | b: r10", "held"),
        (TWO, "a: p10! q10! r10! | b: s10", "slow"),
        (ServiceLevel(ttft_p99_s=0.05), "a: p10 q40~", "slow"),
        (ServiceLevel(itl_p99_s=0.01), "a: p10", "unreachable"),
    ],
)
def test_the_state_is_shown_with_its_reasons(level: ServiceLevel, drawing: str, state: str) -> None:
    made = watcher(level)
    made.decide(observed(drawing))
    report = service_report(made.memory, 0.0, {})
    assert report is not None
    shown = report.to_json()
    assert (shown["state"], bool(shown["why"])) == (state, state == "unreachable") and state in STATES
    json.dumps(shown, allow_nan=False)


def prefilling(rate: float, most: int = 9) -> Watcher:
    """A replica on which prompts of 99 ms arrive, under a level of 100 ms; the cluster has `most` replicas at most."""
    made = watcher(ServiceLevel(itl_p99_s=0.1))
    for number in range(round(60 * rate)):
        made.memory.learned.experience.observe_arrival(100, number / rate)
    made.decide(observed("a: p10", 60.0, most=most))
    return made


def test_replicas_open_until_prefills_are_rare_enough_and_stay_for_the_time_of_a_start() -> None:
    made = prefilling(2.0)
    assert made.memory.scaled is not None and made.memory.cluster.conditions.level_replicas == 5
    assert (made.memory.scaled.up, made.memory.scaled.opened) == (ScaleUp.PREFILLS, 4)
    report = service_report(made.memory, 60.0, {})
    assert report is not None and report.state == "slow"
    assert report.reasons == ("on fewer than 5 replicas, prefills lengthen too many steps; 1 are running",)
    found = []
    for now in 90.0, 361.0, 392.0:  # the last prompt arrives after a minute
        made.decide(observed("a: p10 | b: | c: | d: | e:", now))
        least = made.memory.cluster.conditions.level_replicas
        found.append((least, scaling_report(made.memory.cluster, made.memory.scaled).kept))
    assert found == [(5, ScaleDownBlock.PREFILLS), (1, ScaleDownBlock.LINGER), (1, ScaleDownBlock.LINGER)]


def test_where_prefills_cannot_become_rare_enough_the_level_limits_decoding_alone() -> None:
    made = prefilling(2.0, most=3)
    report = service_report(made.memory, 60.0, {})
    assert report is not None and report.state == "unreachable" and "5 replicas would keep" in report.reasons[0]
    assert made.memory.cluster.conditions.level_replicas == 0 and step_limit(made) == pytest.approx(0.1)


def test_without_a_level_there_is_no_state() -> None:
    assert service_report(watcher(None).memory, 0.0, {}) is None


def test_the_prediction_is_of_what_clients_should_get() -> None:
    made = watcher(ServiceLevel(2.0, 0.5))
    for now in range(4):
        made.decide(observed("a: p10 q10 r10 | b: s10", float(now)))
    found = made.memory.learned.predicted.window.quantiles(3.0)
    # In three seconds 130 steps of three requests, and 143 of one.
    assert found.gaps == pytest.approx(3 * 3 / 0.023 + 3 / 0.021, rel=0.01)
    assert found.itl_p99_s == pytest.approx(0.023, rel=ERROR) and found.first_tokens == 0
    place(made.memory, Arrival(RequestId("x"), Tokens(50)), 3.0)
    found = made.memory.learned.predicted.window.quantiles(3.0)
    # Half a step, its own prefill, and the tokens of the others in that step; all of it is one step of the others.
    beside = {"a": 3, "b": 1}[str(made.memory.locations.placed[RequestId("x")].replica)]
    decode_s = 0.020 + 0.001 * beside
    assert found.ttft_p99_s == pytest.approx(decode_s / 2 + 0.070 + 0.001 * (beside - 1), rel=2 * ERROR)
    within = made.memory.learned.predicted.window.itl.latencies(3.0).share_within(0.06)
    assert within is not None and 0.9 < within < 1


def test_a_prompt_behind_others_is_predicted_to_wait_for_them() -> None:
    made = watcher(ServiceLevel(2.0))
    made.decide(observed("a: p10"))
    place(made.memory, Arrival(RequestId("x"), Tokens(20)), 0.0)
    first = made.memory.learned.predicted.window.quantiles(0.0).ttft_p99_s
    place(made.memory, Arrival(RequestId("y"), Tokens(20)), 0.0)
    both = made.memory.learned.predicted.window.quantiles(0.0)
    assert first is not None and both.ttft_p99_s is not None and both.ttft_p99_s > 1.8 * first


@pytest.mark.slow
def test_the_forecast_is_the_reserve_unless_foresight_is_configured() -> None:
    def slack(limits: LiveLimits, level: ServiceLevel | None) -> int:
        made = Watcher(PoolMemory(Terms("pack", limits, service=level, speed=ReplicaSpeed(COSTS))))
        for now in range(400):
            burst = " b40" if now == 200 else ""
            made.decide(observed(f"a: p10{burst} | b:", float(now)))
        return made.memory.cluster.conditions.slack

    measured, by_hand = LiveLimits(lead_s=0.0), LiveLimits(foresight_s=30.0, lead_s=0.0)
    far, half = ServiceLevel(ttft_p99_s=60.0), LiveLimits(lead_s=0.0, slack=0.5)
    assert (slack(measured, None), slack(by_hand, far)) == (40, 40)
    assert slack(measured, far) == 0, "a burst of one second, for which requests may wait"
    assert (slack(half, far), slack(half, None)) == (50, 90), "a slack set by hand replaces the forecast, not the rise"
    assert slack(replace(by_hand, slack=0.5), far) == 90


# --- levels of classes ------------------------------------------------------------------------------------

CHAT = Precedence("chat", 100.0)
CLASSES = ServiceClasses({"chat": ServiceClass(1, TWO), "batch": ServiceClass(-1, ServiceLevel(itl_p99_s=0.5))})


def classed(level: ServiceLevel | None = None) -> Watcher:
    terms = Terms("pack:headroom_s=0", LIMITS, service=level, speed=ReplicaSpeed(COSTS), classes=CLASSES)
    return Watcher(PoolMemory(terms))


def step_limit(made: Watcher) -> float:
    """The limit of a decoding step of all replicas, in seconds."""
    speed = made.memory.cluster.conditions.speed
    assert speed is not None
    return speed.step_s


def test_the_level_of_a_class_counts_while_it_has_requests_and_ten_minutes_longer() -> None:
    made = classed()
    found = []
    for now, drawing in (0.0, "a: p10 q10"), (1.0, "a: p10 q10 r10"), (600.0, "a: p10 q10"), (602.0, "a: p10 q10"):
        made.decide(observed(drawing, now, classed={"r": CHAT}))
        found.append(step_limit(made))
    assert found == [inf, pytest.approx(0.0225), pytest.approx(0.0225), inf]


def test_the_strictest_level_of_pool_and_active_classes_counts() -> None:
    made = classed(ServiceLevel(2.0, 0.030))
    made.decide(observed("a: p10 q10"))
    assert step_limit(made) == pytest.approx(0.030)
    made.decide(observed("a: p10 q10 r10", 1.0, classed={"q": Precedence("batch"), "r": CHAT}))
    assert step_limit(made) == pytest.approx(0.0225)
    assert strictest([ServiceLevel(2.0, 0.03), ServiceLevel(None, 0.02), ServiceLevel(1.0)]) == ServiceLevel(1.0, 0.02)


def test_lower_ranks_leave_a_replica_that_is_too_slow_for_a_higher_one() -> None:
    batch = dict.fromkeys("pq", Precedence("batch"))
    made = classed()
    assert not made.decide(observed("a: p10 q10 r10! | b: s10!", classed=batch)).moves
    (move,) = made.decide(observed("a: p10 q10 r8 | b: s10!", 1.0, classed={**batch, "r": CHAT})).moves
    assert (move.request, move.target, move.reason) == ("p", "b", Reason.OVERLOAD)


def test_the_report_has_the_levels_of_classes_also_without_one_of_the_pool() -> None:
    made = classed()
    made.decide(observed("a: p10 r10", classed={"r": CHAT}))
    report = service_report(made.memory, 1.0, {})
    assert report is not None and report.state == "held"
    document = report.to_json()
    assert document["target"] == {"ttft_p99_s": None, "itl_p99_ms": None}
    assert document["classes"]["chat"]["target"] == {"ttft_p99_s": None, "itl_p99_ms": 22.5}
