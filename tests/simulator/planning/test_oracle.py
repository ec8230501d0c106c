"""The oracle's arithmetic."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cost.service import ServiceLevel
from policies.cost.steps import interpolate
from policies.model import RequestId, Tokens
from simulator.autoscaling.fleet import SimulatedFleet
from simulator.autoscaling.rule import FleetRouter, ScalingRule
from simulator.costs.costs import ComputeCosts, Costs
from simulator.outcome.metrics import Window
from simulator.outcome.service import PlannedLevels, ServiceOutcome
from simulator.planning.oracle import cheapest, least_work, minorants, provisioned, reachable, without_peaks
from simulator.workload.workload import Job
from simulator.world.setup import Setup
from tests.simulator.physics import FleetLog

WINDOW = Window(0.0, 100.0)
SETUP, HUGE = Setup(Tokens(1000)), Setup(Tokens(10**9))
PEAKS = [(0.0, 1), (30.0, 3), (32.0, 1), (50.0, 2), (80.0, 1)]


def service(ttft_s: float, gpu_seconds: float = 1.0) -> ServiceOutcome:
    return ServiceOutcome(gpu_seconds, 1.0, 1, 0.0, ttft_s, None, 0, 0, 0)


@pytest.mark.parametrize(
    ("startup_s", "used"),
    [
        (0.0, 100 + (2 + 30) + 2),
        (10.0, 100 + (10 + 2 + 10 + 30) + (10 + 2)),
        (18.0, 100 + (18 + 2 + 18 + 30) + (18 + 2)),  # as long as the idle time between two uses
        (25.0, 100 + (25 + 50) + (25 + 2)),  # longer: the second replica stays
        (60.0, 100 + (30 + 50) + (30 + 2)),  # nothing starts before the beginning
    ],
)
def test_a_replica_is_charged_with_its_start_or_with_the_idle_time(startup_s: float, used: float) -> None:
    assert provisioned(PEAKS, startup_s, WINDOW) == pytest.approx(used)


def test_only_the_window_is_charged() -> None:
    assert provisioned(PEAKS, 10.0, Window(25.0, 60.0)) == pytest.approx(35 + (5 + 2 + 20) + (5 + 2))
    assert provisioned([(0.0, 2)], 10.0, WINDOW) == 200.0


def test_short_peaks_are_cut_and_long_ones_stay() -> None:
    cut = dict(without_peaks(PEAKS, 5.0))
    assert [cut[second] for second in (0.0, 29.0, 30.0, 31.0, 49.0, 50.0, 79.0)] == [1, 1, 1, 1, 1, 2, 2]
    assert max(dict(without_peaks(PEAKS, 1.0)).values()) == 3
    assert max(dict(without_peaks(PEAKS, 40.0)).values()) == 1


@given(st.lists(st.tuples(st.floats(0.1, 20.0), st.integers(1, 5)), min_size=1, max_size=20), st.floats(1.0, 30.0))
def test_a_cut_never_exceeds_the_counts(steps: list[tuple[float, int]], shortest_s: float) -> None:
    counts, now = [], 0.0
    for passed_s, gpus in steps:
        counts.append((now, gpus))
        now += passed_s
    whole, cut = without_peaks(counts, 1.0), without_peaks(counts, shortest_s)
    assert all(gpus <= most for (_, gpus), (_, most) in zip(cut, whole, strict=True))


def test_the_minorants_are_below_the_knots() -> None:
    knots = ((1, 0.02), (64, 0.021), (128, 0.04), (512, 0.05), (1024, 0.2))
    lines = list(minorants(knots))
    assert lines[0] == (0.02, 0.0) and len(lines) == 4
    for base_s, token_s in lines:
        gaps = [interpolate(knots, n) - base_s - token_s * n for n in range(1, 4000)]
        assert min(gaps) == pytest.approx(0.0, abs=1e-9)


def test_the_least_work_of_full_steps_is_that_of_the_steps() -> None:
    # Ten requests of one token and 99 more fill a replica of 1,000 tokens only at their end: each token takes the
    # share of a step that it would have on a full replica.
    costs = ComputeCosts(((1, 0.1),))
    jobs = [Job(RequestId(f"q{n}"), 1.0, Tokens(1), Tokens(100)) for n in range(10)]
    contexts = 10 * sum(range(1, 101))
    assert least_work(jobs, WINDOW, SETUP, costs, ServiceLevel()) == pytest.approx(0.1 * contexts / 1000)
    assert least_work(jobs, Window(5.0, 9.0), SETUP, costs, ServiceLevel()) == 0.0


def test_the_step_time_of_the_level_bounds_the_least_work() -> None:
    costs = ComputeCosts(((1, 0.1), (2, 0.11)), sequence_s=0.01)
    jobs = [Job(RequestId(f"q{n}"), 1.0, Tokens(1), Tokens(101)) for n in range(10)]
    loose = least_work(jobs, WINDOW, HUGE, costs, ServiceLevel())
    tight = least_work(jobs, WINDOW, HUGE, costs, ServiceLevel(itl_p99_s=0.15))
    # At most three requests fit into a step of 150 ms.
    assert tight == pytest.approx(loose + 0.99 * 1000 * 0.09 / 3, rel=0.01)


def test_one_replica_that_is_always_full_takes_a_little_more_than_the_least_work() -> None:
    compute = ComputeCosts(((1, 0.02), (50, 0.03)), sequence_s=1e-4, context_s=1e-6, attention_s=1e-8)
    jobs = [Job(RequestId(f"q{n}"), 0.0, Tokens(100), Tokens(60)) for n in range(120)]
    log, setup = FleetLog(), replace(SETUP, min_replicas=1, max_gpus=1, horizon_s=900.0)
    costs = Costs(slots=False, compute=compute)
    SimulatedFleet(ScalingRule(router=FleetRouter.LEAST_KV), setup, costs, log, lambda now: None).run(jobs)
    assert len(log.lives) == len(jobs)
    used_s = max(life.finished_s for life in log.lives.values())
    least_s = least_work(jobs, Window(0.0, 900.0), setup, compute, ServiceLevel())
    assert least_s < used_s < 1.5 * least_s


def test_requests_that_share_a_cached_prompt_hold_it_once() -> None:
    # The KV of one prompt serves both of its requests: only what they generate is work for sure.
    costs = ComputeCosts(((1, 0.1),))
    jobs = [Job(RequestId(f"q{n}"), 1.0, Tokens(500), Tokens(100)) for n in range(2)]
    cached = least_work(jobs, WINDOW, replace(SETUP, block_tokens=10), costs, ServiceLevel())
    assert cached == pytest.approx(0.1 * 2 * sum(range(100)) / 1000)


def test_the_cheapest_candidate_keeps_the_level_wherever_any_does() -> None:
    level = PlannedLevels(ServiceLevel(ttft_p99_s=1.0))
    good, bad = service(0.9), service(1.1)
    candidates = [(30.0, [good, good, bad]), (20.0, [good, bad, bad]), (25.0, [good, good, bad]), (10.0, [bad] * 3)]
    assert cheapest(candidates, level) == 2
    assert reachable([row for _, row in candidates], level) == [True, True, False]
    assert cheapest([(10.0, [bad])], level) is None


def test_where_no_candidate_keeps_the_level_in_all_parts_the_cheapest_of_those_with_the_most_is_chosen() -> None:
    level = PlannedLevels(ServiceLevel(ttft_p99_s=1.0))
    good, bad = service(0.9), service(1.1)
    candidates = [(10.0, [good, bad, bad]), (12.0, [bad, good, good]), (11.0, [good, good, bad]), (9.0, [bad] * 3)]
    assert cheapest(candidates, level) == 2
    assert reachable([row for _, row in candidates], level) == [True, True, True]
