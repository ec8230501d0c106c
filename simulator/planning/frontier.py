"""The frontier of every contender, and comparisons of contenders with Mell at equal service."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from policies.plan import Reason
from simulator.outcome.service import PlannedLevels, ServiceOutcome
from simulator.outcome.statistics import mean
from simulator.planning.cases import LEVEL, Contender, PlanCase


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """A case and its service, as means over the workloads."""

    case: PlanCase
    service: ServiceOutcome


@dataclass(frozen=True, slots=True)
class ContenderComparison:
    """The best cases of a contender, with hindsight.

    `at_level` has the fewest GPU-seconds of the cases that keep the level, `at_equal` of those in which neither p99 is
    longer than Mell's. None without such a case.
    """

    contender: Contender
    at_level: CaseOutcome | None
    at_equal: CaseOutcome | None


def averaged(outcomes: Sequence[ServiceOutcome]) -> ServiceOutcome:
    """The means over several workloads, and the largest peak; None where a workload lacks a time."""
    return ServiceOutcome(
        gpu_seconds=mean([each.gpu_seconds for each in outcomes]),
        gpus_mean=mean([each.gpus_mean for each in outcomes]),
        gpus_peak=max(each.gpus_peak for each in outcomes),
        ttft_p50_s=_mean([each.ttft_p50_s for each in outcomes]),
        ttft_p99_s=_mean([each.ttft_p99_s for each in outcomes]),
        itl_p99_s=_mean([each.itl_p99_s for each in outcomes]),
        preemptions=round(mean([each.preemptions for each in outcomes])),
        moves=round(mean([each.moves for each in outcomes])),
        moves_by_reason={
            reason: round(mean([each.moves_by_reason.get(reason, 0) for each in outcomes]))
            for reason in Reason
            if any(reason in each.moves_by_reason for each in outcomes)
        },
        unfinished=round(mean([each.unfinished for each in outcomes])),
        machine_seconds=_mean([each.machine_seconds for each in outcomes]),
        ttft_p99_by_class_s={
            name: mean([each.ttft_p99_by_class_s[name] for each in outcomes if name in each.ttft_p99_by_class_s])
            for name in sorted({name for each in outcomes for name in each.ttft_p99_by_class_s})
        },
    )


def frontier(outcomes: Sequence[CaseOutcome]) -> list[CaseOutcome]:
    """The outcomes that no other one matches or beats in GPU-seconds and both p99, by ascending GPU-seconds."""
    ordered = sorted(outcomes, key=lambda each: _key(each.service))
    kept: list[CaseOutcome] = []
    for each in ordered:
        if not any(other.service.is_as_good_as(each.service) for other in kept):
            kept.append(each)
    return kept


def of_contender(outcomes: Sequence[CaseOutcome], contender: Contender) -> list[CaseOutcome]:
    """The contender's outcomes with the given GPUs and links."""
    return [each for each in outcomes if each.case.contender is contender and not each.case.hypothetical]


def fewest(outcomes: Sequence[CaseOutcome], levels: PlannedLevels) -> CaseOutcome | None:
    """The outcome with the fewest GPU-seconds that keeps the levels."""
    kept = [each for each in outcomes if each.service.keeps(levels)]
    return min(kept, key=lambda each: each.service.gpu_seconds, default=None)


def compare(outcomes: Sequence[CaseOutcome], levels: PlannedLevels) -> list[ContenderComparison]:
    """Every other contender beside Mell at the level."""
    same = at_level(outcomes).service.levels
    return [
        ContenderComparison(contender, fewest(members, levels), fewest(members, same))
        for contender in Contender
        if contender is not Contender.MELL and (members := of_contender(outcomes, contender))
    ]


def at_level(outcomes: Sequence[CaseOutcome]) -> CaseOutcome:
    """The outcome of Mell with the level itself."""
    return next(each for each in outcomes if each.case.name == LEVEL)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == len(values) else None


def _key(service: ServiceOutcome) -> tuple[float, float, float]:
    ttft_s, itl_s = (inf if time is None else time for time in (service.ttft_p99_s, service.itl_p99_s))
    return service.gpu_seconds, ttft_s, itl_s
