"""Frontiers and comparisons."""

from dataclasses import replace

from policies.cost.service import ServiceLevel
from policies.model import Tokens
from simulator.costs.costs import IDEAL
from simulator.outcome.service import PlannedLevels, ServiceOutcome
from simulator.planning.cases import LEVEL, Contender, PlanCase
from simulator.planning.frontier import CaseOutcome, averaged, compare, frontier
from simulator.world.setup import Setup

SETUP = Setup(Tokens(1000))


def outcome(
    name: str,
    gpu_seconds: float,
    ttft_s: float | None = None,
    itl_s: float | None = None,
    contender: Contender = Contender.SERVE,
    hypothetical: bool = False,
) -> CaseOutcome:
    case = PlanCase(name, contender, "pack", SETUP, IDEAL, hypothetical)
    return CaseOutcome(case, ServiceOutcome(gpu_seconds, 1.0, 1, ttft_s, ttft_s, itl_s, 0, 0, 0))


def test_a_frontier_has_no_case_that_another_one_beats() -> None:
    outcomes = [
        outcome("slow", 10, 5.0, 0.05),
        outcome("worse", 11, 5.0, 0.06),
        outcome("equal", 12, 5.0, 0.05),
        outcome("quick", 20, 1.0, 0.05),
        outcome("smooth", 30, 2.0, 0.03),
    ]
    assert [each.case.name for each in frontier(outcomes)] == ["slow", "quick", "smooth"]


def test_contenders_are_compared_at_the_level_and_at_equal_service() -> None:
    outcomes = [
        outcome(LEVEL, 100, 1.0, 0.04, Contender.MELL),
        outcome("dearer, as good", 130, 1.0, 0.04),
        outcome("within the level", 90, 1.9, 0.05),
        outcome("beyond it", 80, 2.1, 0.05),
        outcome("kv", 300, 9.0, 0.01, Contender.KV),
        outcome("faster GPUs", 10, 0.1, 0.01, hypothetical=True),
    ]
    serve, kv = compare(outcomes, PlannedLevels(ServiceLevel(2.0, 0.05)))
    assert serve.at_level is not None and serve.at_level.case.name == "within the level"
    assert serve.at_equal is not None and serve.at_equal.case.name == "dearer, as good"
    assert (kv.contender, kv.at_level, kv.at_equal) == (Contender.KV, None, None)


def test_outcomes_of_seeds_are_averaged() -> None:
    one, other = outcome("a", 10, 1.0, 0.02).service, outcome("b", 20, 3.0).service
    both = averaged(
        [replace(one, ttft_p99_by_class_s={"chat": 1.0}), replace(other, ttft_p99_by_class_s={"chat": 2.0})]
    )
    assert both.ttft_p99_by_class_s == {"chat": 1.5}
    assert (both.gpu_seconds, both.ttft_p99_s, both.itl_p99_s) == (15, 2.0, None)
