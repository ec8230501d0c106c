"""The JSON document of a plan: the input, the cases, comparisons, and the oracle."""

from collections.abc import Sequence
from dataclasses import asdict
from operator import and_
from typing import Any

from simulator.command.document import Document, given
from simulator.command.order import SimulationOrder
from simulator.outcome.service import PlannedLevels, ServiceOutcome, parts
from simulator.outcome.statistics import mean
from simulator.planning.cases import LEVEL, TITLES, Contender
from simulator.planning.frontier import (
    CaseOutcome,
    ContenderComparison,
    at_level,
    averaged,
    compare,
    fewest,
    frontier,
    of_contender,
)
from simulator.planning.oracle import cheapest, least_work, reachable
from simulator.planning.perform import OraclePlan, PlanResult, PlanRuns
from simulator.workload.workload import Workload


def plan_document(
    order: SimulationOrder, levels: PlannedLevels, runs: PlanRuns, candidates: Sequence[Sequence[OraclePlan]]
) -> Document:
    """The JSON document. `candidates` are those of the oracle by workload.

    `cases` are sorted by GPU-seconds, and `fewest` names the first that keeps the level with the given GPUs and links.
    """
    outcomes = runs.outcomes
    best = {each.case.name for contender in Contender for each in frontier(of_contender(outcomes, contender))}
    real = [each for each in outcomes if not each.case.hypothetical]
    hindsight = fewest(real, levels)
    mell = at_level(outcomes).service
    rows = {each.case.name: row for each, row in zip(outcomes, runs.results, strict=True)}
    return {
        **given(order, runs.workloads),
        "cases": [
            {
                **_case(each, levels, each.case.name in best),
                "oracle_gpu_seconds": None if each.case.hypothetical else _at_least(candidates, rows[each.case.name]),
            }
            for each in sorted(outcomes, key=lambda each: each.service.gpu_seconds)
        ],
        "fewest": None if hindsight is None else hindsight.case.name,
        "comparisons": [_comparison(each, mell) for each in compare(outcomes, levels)],
        "oracle": _oracle(order, runs.workloads, rows[LEVEL], candidates, levels),
    }


def _case(outcome: CaseOutcome, levels: PlannedLevels, is_best: bool) -> dict[str, Any]:
    case, service = outcome.case, outcome.service
    measured = asdict(service)
    if service.machine_seconds is None:
        del measured["machine_seconds"]
    return {
        "name": case.name,
        "contender": case.contender.value,
        "policy": case.policy,
        "hypothetical": case.hypothetical,
        **measured,
        "keeps_level": service.keeps(levels),
        "kept_by_class": service.kept_by_class(levels) if service.ttft_p99_by_class_s else {},
        "on_frontier": is_best,
    }


def _comparison(comparison: ContenderComparison, mell: ServiceOutcome) -> dict[str, Any]:
    return {
        "contender": comparison.contender.value,
        "title": TITLES[comparison.contender],
        "at_level": _beside(comparison.at_level, mell),
        "at_equal_service": _beside(comparison.at_equal, mell),
    }


def _beside(outcome: CaseOutcome | None, mell: ServiceOutcome) -> dict[str, Any] | None:
    """A case, and the share of its GPU-seconds that Mell at the level saves; below zero if Mell takes more."""
    if outcome is None:
        return None
    saved = 1 - mell.gpu_seconds / outcome.service.gpu_seconds
    return {"case": outcome.case.name, "gpu_seconds": outcome.service.gpu_seconds, "saved_by_mell": saved}


def _at_least(candidates: Sequence[Sequence[OraclePlan]], results: Sequence[PlanResult]) -> float:
    """The mean of the oracle's fewest GPU-seconds with service equal to the results of a case or better."""
    return mean(
        [
            min(plan.gpu_seconds for plan in row if plan.result.whole.keeps(result.whole.levels))
            for row, result in zip(candidates, results, strict=True)
        ]
    )


def _oracle(
    order: SimulationOrder,
    workloads: Sequence[Workload],
    mell: Sequence[PlanResult],
    candidates: Sequence[Sequence[OraclePlan]],
    levels: PlannedLevels,
) -> dict[str, Any]:
    """The oracle's plan as means over the workloads, and the parts of the window in which it and Mell keep the level.

    Its members are None if no candidate keeps the level in any part.
    """
    chosen = [cheapest([(plan.gpu_seconds, plan.result.parts) for plan in row], levels) for row in candidates]
    possible = [reachable([plan.result.parts for plan in row], levels) for row in candidates]
    kept = [[part.keeps(levels) for part in result.parts] for result in mell]
    plans = [row[index] for row, index in zip(candidates, chosen, strict=True) if index is not None]
    whole = averaged([plan.result.whole for plan in plans]) if len(plans) == len(workloads) else None
    used = mean([plan.gpu_seconds for plan in plans]) if whole is not None else None
    costs = order.costs.compute
    assert costs is not None, "a level needs step times"
    return {
        "gpu_seconds": used,
        "plans": [plan.name for plan in plans],
        "ttft_p99_s": None if whole is None else whole.ttft_p99_s,
        "itl_p99_s": None if whole is None else whole.itl_p99_s,
        "least_work_gpu_seconds": mean(
            [least_work(w.jobs, order.window, order.setup, costs, levels.whole) for w in workloads]
        ),
        "mell_to_oracle": None if used is None else mean([result.whole.gpu_seconds for result in mell]) / used,
        "parts": sum(len(row) for row in possible),
        "parts_possible": sum(map(sum, possible)),
        "parts_planned": sum(part.keeps(levels) for plan in plans for part in plan.result.parts),
        "parts_kept": sum(both for one, other in zip(possible, kept, strict=True) for both in map(and_, one, other)),
        "part_starts_s": [part.warmup_s for part in parts(order.window)],
        "by_seed": [
            {
                "seed": workload.seed,
                "possible": one,
                "kept": other,
                "ttft_p99_s": [p.ttft_p99_s for p in result.parts],
                "itl_p99_s": [p.itl_p99_s for p in result.parts],
                "gpu_seconds": [p.gpu_seconds for p in result.parts],
            }
            for workload, one, other, result in zip(workloads, possible, kept, mell, strict=True)
        ],
    }
