"""The result at a glance: GPUs over the lower bound, and the moves needed for it."""

from benchmarks.evaluation.runs.case import Case
from benchmarks.evaluation.runs.eight import POLICIES, WORKLOADS, averaged, every, name, runs
from benchmarks.evaluation.runs.results import Results
from benchmarks.evaluation.runs.scale import Scale
from benchmarks.evaluation.section import PageSection
from benchmarks.evaluation.style import Pictures
from benchmarks.evaluation.words import spread, table
from simulator.outcome.statistics import Interval


def _cases(scale: Scale) -> list[Case]:
    return every(POLICIES, scale)


def _parts(results: Results, scale: Scale, pictures: Pictures) -> dict[str, str]:
    return {
        "excess": table(("policy", *map(name, WORKLOADS), "average"), _excess(results, scale)),
        "moved": table(("policy", *map(name, WORKLOADS)), _moved(results, scale)),
    }


def _excess(results: Results, scale: Scale) -> list[list[str]]:
    return [
        [f"`{policy}`"]
        + [_over(results, runs(workload, policy, scale)) for workload in WORKLOADS]
        + [f"{averaged(results, scale, policy) * 100:.1f}"]
        for policy in POLICIES
    ]


def _over(results: Results, cases: list[Case]) -> str:
    found = results.over(cases, "ratio_to_bound")
    return spread(Interval(found.mean - 1, found.ci95), 1, 100)


def _moved(results: Results, scale: Scale) -> list[list[str]]:
    return [
        [f"`{policy}`"] + [_uprooted(results, runs(workload, policy, scale)) for workload in WORKLOADS]
        for policy in POLICIES
    ]


def _uprooted(results: Results, cases: list[Case]) -> str:
    return f"{results.mean(cases, 'migrations_per_s') + results.mean(cases, 'evictions_per_s'):.2f}"


SECTION = PageSection(_cases, _parts)
