"""The stages of a plan's sweep, and what holds between all runs of small plans."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.cost.service import ServiceLevel
from policies.model import RequestId, Tokens
from simulator.autoscaling.rule import FleetRouter, ScalingRule
from simulator.costs.costs import ComputeCosts, Costs
from simulator.outcome.metrics import Window
from simulator.outcome.service import PlannedLevels, ServiceOutcome
from simulator.planning.cases import (
    LEVEL,
    MEASURES,
    ONE_BY_ONE,
    ROUTERS,
    SHORT,
    SLACKS,
    STEPS,
    Contender,
    Delays,
    PlanCase,
    plan_cases,
)
from simulator.planning.frontier import CaseOutcome, of_contender
from simulator.planning.oracle import CUTS_S, cheapest, least_work
from simulator.planning.perform import ROUGH_RUNS, PlanRuns, perform_plan
from simulator.planning.sweep import best_delays, price, representative_cases, second_stage, spread, third_stage
from simulator.workload.workload import Job, Workload
from simulator.world.setup import Setup
from tests.counts import scaled
from tests.simulator.physics import MIGRATION

LEVELS = PlannedLevels(ServiceLevel(2.0, 0.2))
SETUP = Setup(Tokens(1000), service=LEVELS.whole, horizon_s=300.0)
PRICED = Costs(
    slots=False, startup_s=20.0, compute=ComputeCosts(((1, 0.02), (50, 0.03)), context_s=1e-6), migration=MIGRATION
)
JOBS = [Job(RequestId("q"), 0.0, Tokens(100), Tokens(100))]


def served(gpu_seconds: float = 100.0, ttft_s: float = 1.0, peak: int = 1) -> ServiceOutcome:
    return ServiceOutcome(gpu_seconds, 1.0, peak, ttft_s, ttft_s, 0.1, 0, 0, 0)


def first_stage(priced: dict[Delays, float], peak: int = 1) -> list[CaseOutcome]:
    """The outcomes of the first stage: these GPU-seconds at these delays, 100 at all others."""

    def delays(case: PlanCase) -> Delays | None:
        rule = case.rule
        if case.contender not in MEASURES or not isinstance(rule, ScalingRule):
            return None
        return Delays(rule.upscale_delay_s, rule.downscale_delay_s, rule.look_back_s)

    return [
        CaseOutcome(case, served(next((used for each, used in priced.items() if each == delays(case)), 100.0), 1, peak))
        for case in plan_cases(SETUP, PRICED, JOBS)
    ]


def names(cases: Iterable[PlanCase], contender: Contender) -> list[str]:
    return [case.name for case in cases if case.contender is contender]


def numbers(cases: Iterable[PlanCase]) -> list[int]:
    """The constant numbers of replicas, each of which has both routers."""
    own = [case for case in cases if case.contender is Contender.CONSTANT]
    assert all(case.setup.min_replicas == case.setup.max_gpus for case in own)
    assert len(own) == len(FleetRouter) * len({case.setup.min_replicas for case in own})
    return list(dict.fromkeys(case.setup.min_replicas for case in own))


def test_every_contender_is_swept() -> None:
    cases = representative_cases(SETUP, PRICED, JOBS)
    counts = Counter(case.contender for case in cases)
    assert counts.keys() == set(Contender)
    assert counts[Contender.WORST_FIT] == len(SLACKS)
    assert counts[Contender.WORST_FIT_LEVEL] == counts[Contender.PACK_UNMOVED] == 1 + len(STEPS)
    assert {case.name for case in cases if case.hypothetical} == {
        "level, starts in half the time",
        "level, links twice as fast",
    }
    assert len(cases) + len(CUTS_S) < ROUGH_RUNS + 10


def test_placements_with_mells_forecast_have_its_level_and_its_limits() -> None:
    cases = {case.name: case for case in plan_cases(SETUP, PRICED, JOBS)}
    for contender in (Contender.WORST_FIT_LEVEL, Contender.LOAD_BALANCE_LEVEL):
        assert cases[f"{contender}, level"].setup == cases[LEVEL].setup == SETUP
    unmoved = cases[f"{Contender.PACK_UNMOVED}, level"]
    assert (unmoved.policy, unmoved.setup.limits.moves_per_epoch) == (cases[LEVEL].policy, 0)
    assert replace(unmoved.setup, limits=SETUP.limits) == SETUP


def test_every_delay_is_tried_at_the_middle_target_with_the_usual_router() -> None:
    for contender, measure in MEASURES.items():
        rules = [case.rule for case in plan_cases(SETUP, PRICED, JOBS) if case.contender is contender]
        assert len(rules) == len(ONE_BY_ONE) == 11
        assert all(isinstance(rule, ScalingRule) for rule in rules)
        assert {(rule.measure, rule.router) for rule in rules if isinstance(rule, ScalingRule)} == {
            (measure, ROUTERS[contender])
        }
        assert len({rule.target for rule in rules if isinstance(rule, ScalingRule)}) == 1


def test_the_best_times_are_combined() -> None:
    late, held = replace(SHORT, up_s=10.0), replace(SHORT, down_s=600.0)
    outcomes = of_contender(first_stage({late: 90.0, held: 80.0}), Contender.KV)
    assert best_delays(outcomes, LEVELS) == [replace(SHORT, up_s=10.0, down_s=600.0), held]
    assert best_delays(of_contender(first_stage({}), Contender.KV), LEVELS) == [SHORT]


def test_all_targets_are_tried_at_the_best_delays_and_with_both_routers() -> None:
    found = second_stage(first_stage({replace(SHORT, up_s=10.0): 90.0}), SETUP, PRICED, JOBS, LEVELS, 1.0)
    own = names(found, Contender.KV)
    assert {name.split(", ")[1] for name in own} == {f"target {share}%" for share in (40, 50, 60, 70, 85)}
    assert sum("two choices, up 10 s" in name for name in own) == 5
    # The middle target has been tried.
    assert sum("least KV, up 10 s" in name for name in own) == 4
    assert sum("up 30 s, down 600 s" in name for name in own) == 5
    assert any("at most" in name for name in names(found, Contender.SERVE))


def test_constant_numbers_reach_from_the_least_work_to_the_largest_number() -> None:
    assert numbers(second_stage(first_stage({}, 5), SETUP, PRICED, JOBS, LEVELS, 1.9)) == [1, 2, 3, 4, 5]
    assert numbers(second_stage(first_stage({}, 44), SETUP, PRICED, JOBS, LEVELS, 14.2)) == [14, 20, 26, 32, 38, 44]
    assert numbers(second_stage(first_stage({}, 1), SETUP, PRICED, JOBS, LEVELS, 4.0)) == [4]
    bounded = replace(SETUP, min_replicas=2, max_gpus=4)
    assert numbers(second_stage(first_stage({}, 6), bounded, PRICED, JOBS, LEVELS, 1.0)) == [2, 3, 4]


def test_constant_numbers_close_in_on_the_smallest_that_keeps_the_level() -> None:
    def after(kept: int) -> list[int]:
        outcomes = [
            CaseOutcome(case, served(ttft_s=1.0 if case.setup.min_replicas >= kept else 9.0))
            for case in second_stage(first_stage({}, 44), SETUP, PRICED, JOBS, LEVELS, 14.2)
        ]
        return numbers(third_stage(outcomes, SETUP, PRICED, LEVELS))

    assert after(23) == [21, 22, 23, 24, 25]
    assert after(1) == after(50) == []


def test_a_price_grows_with_the_excess_over_the_level() -> None:
    assert price(served(100.0, 2.0), LEVELS) == 100.0
    assert price(served(100.0, 3.0), LEVELS) == pytest.approx(150.0)
    of_class = replace(served(100.0, 2.0), ttft_p99_by_class_s={"chat": 2.0, "batch": 9.0})
    strict = PlannedLevels(LEVELS.whole, {"chat": ServiceLevel(0.5), "batch": ServiceLevel(90.0)})
    assert price(of_class, strict) == pytest.approx(400.0)


@pytest.mark.parametrize(
    ("least", "most", "found"), [(1, 1, [1]), (1, 6, [1, 2, 3, 4, 5, 6]), (1, 11, [1, 3, 5, 7, 9, 11]), (3, 2, [])]
)
def test_numbers_are_spread(least: int, most: int, found: list[int]) -> None:
    assert spread(least, most, 6) == found


@pytest.mark.slow
@given(
    arrivals=st.lists(
        st.tuples(st.floats(0.0, 60.0), st.integers(10, 400), st.integers(1, 60)), min_size=3, max_size=30
    ),
    ttft_s=st.sampled_from([0.3, 1.0, 5.0]),
    itl_s=st.sampled_from([0.04, 0.2]),
    startup_s=st.sampled_from([0.0, 10.0]),
)
@pytest.mark.timeout(1800)
@settings(max_examples=scaled(20), deadline=None)
def test_no_run_beats_the_oracle_where_it_keeps_the_level_nor_the_least_work(
    arrivals: list[tuple[float, int, int]], ttft_s: float, itl_s: float, startup_s: float
) -> None:
    jobs = tuple(
        Job(RequestId(f"q{n}"), at_s, Tokens(prompt), Tokens(output))
        for n, (at_s, prompt, output) in enumerate(sorted(arrivals))
    )
    levels, window = PlannedLevels(ServiceLevel(ttft_s, itl_s)), Window(0.0, 90.0)
    setup, costs = replace(SETUP, service=levels.whole, horizon_s=90.0), replace(PRICED, startup_s=startup_s)
    runs = PlanRuns([Workload(0, jobs, 0)], window, 1, lambda done_s: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("simulator.outcome.service.PART_S", 30.0)
        patch.setattr("simulator.planning.cases.SLACKS", (0.0,))
        patch.setattr("simulator.planning.cases.STEPS", (2.0,))
        patch.setattr("simulator.planning.cases.FILLS", (0.4, 0.7))
        (candidates,) = perform_plan((setup, costs), levels, runs)
    assert {case.contender for case in runs.cases} == set(Contender)
    chosen = cheapest([(plan.gpu_seconds, plan.result.parts) for plan in candidates], levels)
    assert costs.compute is not None
    least = least_work(jobs, window, setup, costs.compute, levels.whole)
    for case, (result,) in zip(runs.cases, runs.results, strict=True):
        if case.hypothetical:
            continue
        if chosen is not None:
            oracle = candidates[chosen]
            kept = zip(result.parts, oracle.result.parts, strict=True)
            if all(own.keeps(levels) for own, other in kept if other.keeps(levels)):
                assert result.whole.gpu_seconds >= oracle.gpu_seconds, case.name
        if not result.whole.unfinished and (result.whole.itl_p99_s or 0.0) <= itl_s:
            assert result.whole.gpu_seconds >= least, case.name
