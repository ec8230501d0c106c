"""The simulated workloads, and the code that made the runs."""

import hashlib
from collections.abc import Iterator

from benchmarks.evaluation.runs.case import Case
from benchmarks.evaluation.runs.eight import POLICIES, WORKLOADS, Workload, name, runs
from benchmarks.evaluation.runs.results import Results
from benchmarks.evaluation.runs.scale import Scale
from benchmarks.evaluation.runs.sources import fingerprint
from benchmarks.evaluation.section import PageSection
from benchmarks.evaluation.style import Pictures
from benchmarks.evaluation.words import share, spread, table

HEADER = ("workload", "seeds", "requests", "cut", "prompt", "output", "L2 mean", "L2 peak", "repack over L2")
REFERENCE = "worst_fit"
"""The policy whose runs are in the table of workloads; requests and bounds are the same for all policies."""


def _cases(scale: Scale) -> list[Case]:
    return [case for workload in WORKLOADS for case in runs(workload, REFERENCE, scale)]


def _parts(results: Results, scale: Scale, pictures: Pictures) -> dict[str, str]:
    return {"workloads": table(HEADER, _rows(results, scale)), "provenance": _provenance(results)}


def _rows(results: Results, scale: Scale) -> Iterator[list[str]]:
    for workload in WORKLOADS:
        yield _row(results, workload, runs(workload, REFERENCE, scale))


def _row(results: Results, workload: Workload, cases: list[Case]) -> list[str]:
    def mean(metric: str) -> float:
        return results.mean(cases, metric)

    return [
        name(workload),
        str(len(cases)),
        f"{mean('workload.requests'):,.0f}",
        share(mean("workload.capped") / mean("workload.requests")),
        f"{mean('workload.prompt_mean'):,.0f}",
        f"{mean('workload.output_mean'):,.0f}",
        spread(results.over(cases, "bound.mean")),
        f"{results.most(cases, 'bound.peak'):,.0f}",
        share(mean("bound.repack_mean") / mean("bound.mean") - 1),
    ]


def _provenance(results: Results) -> str:
    return f"Tables and figures: {len(results.metrics)} runs of the code with the fingerprint `{_fingerprint()}`."


def _fingerprint() -> str:
    return hashlib.sha256("".join(map(fingerprint, POLICIES)).encode()).hexdigest()[:12]


SECTION = PageSection(_cases, _parts)
