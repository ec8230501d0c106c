"""The cases of a plan that depend on the outcomes of others: delays of autoscalers, and constant numbers of replicas.

All targets with all delays and both routers would be more than a thousand runs. Instead, in stages:

    1  for every autoscaler with delays, `ONE_BY_ONE` at its middle target
    2  all targets at the best of these delays, at the best values of the three times together, and at Serve's defaults;
       at the second of these also with the other router and with limits of requests. Constant numbers of replicas from
       what the least work takes to the largest number in stage 1
    3  constant numbers between the largest that misses the level and the smallest above it that keeps it
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf

from policies.cost.service import strictest
from policies.precedence import DEFAULT_CLASS
from simulator.autoscaling.rule import ScalingRule
from simulator.costs.costs import Costs
from simulator.outcome.service import PlannedLevels, ServiceOutcome
from simulator.planning.cases import (
    DOWNS_S,
    MEASURES,
    ONE_BY_ONE,
    PUSHES_S,
    SHORT,
    UPS_S,
    Contender,
    Delays,
    PlanCase,
    constant_cases,
    plan_cases,
    targeted_cases,
)
from simulator.planning.frontier import CaseOutcome, of_contender
from simulator.workload.workload import Job
from simulator.world.setup import Setup

CONSTANTS = 6
"""The most constant numbers of replicas in each of two stages."""


def second_stage(
    outcomes: Sequence[CaseOutcome],
    setup: Setup,
    costs: Costs,
    jobs: Sequence[Job],
    levels: PlannedLevels,
    least_gpus: float,
) -> list[PlanCase]:
    """The cases of the second stage, after the outcomes of the first. The least work takes `least_gpus` replicas."""
    chosen = {each: best_delays(of_contender(outcomes, each), levels) for each in MEASURES}
    least = max(1, setup.min_replicas, int(least_gpus))
    most = max(least, *(each.service.gpus_peak for each in outcomes if not each.case.hypothetical))
    # Stopping replicas count in a peak, but not in the maximum.
    least, most = (number if setup.max_gpus is None else min(number, setup.max_gpus) for number in (least, most))
    found = [
        *targeted_cases(setup, costs, jobs, chosen),
        *constant_cases(setup, costs, spread(least, most, CONSTANTS)),
    ]
    names = {each.case.name for each in outcomes}
    return [case for case in found if case.name not in names]


def third_stage(outcomes: Sequence[CaseOutcome], setup: Setup, costs: Costs, levels: PlannedLevels) -> list[PlanCase]:
    """The cases of the third stage, after the outcomes of the first two."""
    constant = of_contender(outcomes, Contender.CONSTANT)
    kept = {each.case.setup.min_replicas for each in constant if each.service.keeps(levels)}
    if not kept:
        return []
    missed = [each.case.setup.min_replicas for each in constant if each.case.setup.min_replicas < min(kept)]
    return list(constant_cases(setup, costs, spread(max(missed) + 1, min(kept) - 1, CONSTANTS) if missed else ()))


def representative_cases(setup: Setup, costs: Costs, jobs: Sequence[Job]) -> list[PlanCase]:
    """Cases for the cost of a plan before it is made: about as many of every contender as all stages have."""
    chosen = dict.fromkeys(MEASURES, ONE_BY_ONE[-2:])
    return [
        *plan_cases(setup, costs, jobs),
        *targeted_cases(setup, costs, jobs, chosen),
        *constant_cases(setup, costs, range(1, CONSTANTS + 1)),
    ]


def best_delays(outcomes: Iterable[CaseOutcome], levels: PlannedLevels) -> list[Delays]:
    """The best values of the three times together, then the best of the delays that were tried; one if these agree.

    `outcomes` are those of the `ONE_BY_ONE` delays.
    """
    prices = {delays: inf for delays in ONE_BY_ONE}
    for each in outcomes:
        rule = each.case.rule
        assert isinstance(rule, ScalingRule), "an autoscaler has a rule"
        prices[Delays(rule.upscale_delay_s, rule.downscale_delay_s, rule.look_back_s)] = price(each.service, levels)
    together = Delays(
        min([SHORT, *(replace(SHORT, up_s=up_s) for up_s in UPS_S)], key=prices.__getitem__).up_s,
        min([SHORT, *(replace(SHORT, down_s=down_s) for down_s in DOWNS_S)], key=prices.__getitem__).down_s,
        min([SHORT, *(replace(SHORT, look_back_s=s) for s in PUSHES_S)], key=prices.__getitem__).look_back_s,
    )
    return list(dict.fromkeys([together, min(prices, key=prices.__getitem__)]))


def price(service: ServiceOutcome, levels: PlannedLevels) -> float:
    """GPU-seconds, times the largest ratio of a p99 to its level where that is above 1."""
    firsts: Mapping[str, float | None] = service.ttft_p99_by_class_s or {DEFAULT_CLASS: service.ttft_p99_s}
    pairs = [
        *((ttft_s, levels.of(name).ttft_p99_s) for name, ttft_s in firsts.items()),
        (service.itl_p99_s, strictest([levels.whole, *levels.classes.values()]).itl_p99_s),
    ]
    return service.gpu_seconds * max([1.0, *(found / most for found, most in pairs if found is not None and most)])


def spread(least: int, most: int, count: int) -> list[int]:
    """At most `count` (two or more) whole numbers from `least` to `most`, evenly spaced, with both of these."""
    if most - least < count:
        return list(range(least, most + 1))
    return [round(least + (most - least) * number / (count - 1)) for number in range(count)]
