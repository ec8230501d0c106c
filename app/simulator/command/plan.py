"""A plan: the GPUs that a workload needs at a service level, with Mell and with simpler rules for the reserve.

Every case plays the same requests. Its rule for the reserve is the level itself (Mell's forecast), the largest recent
rise, or a fixed slack under one of several policies. Two more cases have the level with starts and links of half the
time. A case keeps the level if its p99 of both times do, over the whole window.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.simulator.command.document import Document, given
from app.simulator.command.order import SimulationOrder
from app.simulator.command.runs import SimulationRun
from app.simulator.costs.costs import Costs, LinkCosts
from app.simulator.errors import BadInput
from app.simulator.outcome.metrics import Metrics
from app.simulator.outcome.statistics import mean
from app.simulator.workload.workload import Workload
from app.simulator.world.setup import Setup
from policies.cost.service import ServiceLevel
from policies.decision.limits import Limits

SLACKS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
"""The fixed reserves, as numbers of GPUs."""
FIXED = ("pack", "load_balance:drain=true", "worst_fit")
"""The policies with a fixed reserve."""
LEVEL = "level"
"""The name of the case in which the reserve follows from the level."""


@dataclass(frozen=True, slots=True)
class PlanCase:
    """A rule for the reserve under a policy; `hypothetical` if GPUs or links are not the given ones."""

    name: str
    policy: str
    setup: Setup
    costs: Costs
    hypothetical: bool = False


def plan_cases(order: SimulationOrder) -> list[PlanCase]:
    """All cases. Raises `BadInput` without a service level."""
    setup, costs = order.setup, order.costs
    if setup.service is None:
        raise BadInput("A plan needs a service level: give --ttft-p99 or --itl-p99.")

    def fixed(limits: Limits) -> Setup:
        return replace(setup, service=None, limits=replace(limits, linger_s=costs.startup_s))

    cases = [
        PlanCase(LEVEL, "pack", setup, costs),
        PlanCase("largest rise", "pack", fixed(replace(setup.limits, foresight_s=costs.startup_s)), costs),
    ]
    for policy in FIXED:
        for slack in SLACKS:
            limits = replace(setup.limits, slack=slack)
            cases.append(PlanCase(f"{policy.partition(':')[0]}, slack {slack:g}", policy, fixed(limits), costs))
    if costs.startup_s:
        faster = replace(costs, startup_s=costs.startup_s / 2)
        cases.append(PlanCase("level, starts in half the time", "pack", setup, faster, hypothetical=True))
    if costs.migration is not None:
        moving = replace(costs.migration, intra=_twice(costs.migration.intra), inter=_twice(costs.migration.inter))
        faster = replace(costs, migration=moving)
        cases.append(PlanCase("level, links twice as fast", "pack", setup, faster, hypothetical=True))
    return cases


def plan_runs(order: SimulationOrder, cases: Sequence[PlanCase], workloads: Sequence[Workload]) -> list[SimulationRun]:
    """Every case with every workload."""
    return [
        SimulationRun(case.policy, workload.seed, workload.jobs, case.setup, order.window, case.costs)
        for case in cases
        for workload in workloads
    ]


def plan_document(
    order: SimulationOrder, cases: Sequence[PlanCase], workloads: Sequence[Workload], results: Sequence[Metrics]
) -> Document:
    """The JSON document: `cases` by ascending GPU-seconds, and the `fewest` GPU-seconds of those that keep the level.

    `results` are in the order of `plan_runs`; a case has the mean over its workloads.
    """
    level, seeds = order.setup.service, len(workloads)
    assert level is not None, "the cases have one"
    shown = [_case(case, results[index * seeds : (index + 1) * seeds], level) for index, case in enumerate(cases)]
    kept = [case for case in shown if case["keeps_level"] and not case["hypothetical"]]
    return {
        **given(order, workloads),
        "cases": sorted(shown, key=lambda case: float(case["gpu_seconds"])),
        "fewest": min(kept, key=lambda case: float(case["gpu_seconds"]))["name"] if kept else None,
    }


def render_plan(plan: Document) -> str:
    """The plan as a table, and the answer as a sentence."""
    return "\n".join(_lines(plan))


def _twice(link: LinkCosts) -> LinkCosts:
    return replace(link, bytes_per_s=2 * link.bytes_per_s, latency_s=link.latency_s / 2)


def _case(case: PlanCase, runs: Sequence[Metrics], level: ServiceLevel) -> dict[str, Any]:
    ttft_s, itl_s = (_p99(runs, metric) for metric in ("ttft_s", "itl_s"))
    pairs = ((ttft_s, level.ttft_p99_s), (itl_s, level.itl_p99_s))
    return {
        "name": case.name,
        "policy": case.policy,
        "hypothetical": case.hypothetical,
        "gpu_seconds": mean([run["gpu_seconds"] for run in runs]),
        "gpus_mean": mean([run["gpus_mean"] for run in runs]),
        "gpus_peak": max(run["gpus_peak"] for run in runs),
        "ttft_p99_s": ttft_s,
        "itl_p99_s": itl_s,
        "keeps_level": all(most is None or (found is not None and found <= most) for found, most in pairs),
    }


def _p99(runs: Sequence[Metrics], metric: str) -> float | None:
    """The mean of a metric's p99 over the runs; None if a run lacks it."""
    spreads = [run[metric] for run in runs]
    return None if None in spreads else mean([spread["p99"] for spread in spreads])


def _lines(plan: Document) -> Iterator[str]:
    cases = plan["cases"]
    width = max(len(case["name"]) for case in cases)
    yield f"{'':<{width}}  GPU-seconds  GPUs mean  peak  TTFT p99  ITL p99  level"
    for case in cases:
        ttft, itl = (
            "-" if case[name] is None else f"{case[name] * factor:,.{digits}f}"
            for name, factor, digits in (("ttft_p99_s", 1.0, 2), ("itl_p99_s", 1e3, 1))
        )
        kept = "kept" if case["keeps_level"] else "missed"
        yield (
            f"{case['name']:<{width}}  {case['gpu_seconds']:>11,.0f}  {case['gpus_mean']:>9.2f}  {case['gpus_peak']:>4}"
            f"  {ttft:>8}  {itl:>7}  {kept}"
        )
    yield ""
    level = next(case for case in cases if case["name"] == LEVEL)
    fewest = next((case for case in cases if case["name"] == plan["fewest"]), None)
    keeps = "keeps the level" if level["keeps_level"] else "misses the level"
    yield f"Mell with this level {keeps} on {level['gpus_mean']:.2f} GPUs on average, {level['gpus_peak']} at peak."
    if fewest is None:
        yield "No case keeps the level."
    elif fewest is not level:
        share = 1 - fewest["gpu_seconds"] / level["gpu_seconds"]
        yield f"With hindsight, {fewest['name']} keeps it with {share:.0%} fewer GPU-seconds."
