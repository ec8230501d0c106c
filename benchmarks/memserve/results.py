"""The figures of cases: means over seeds of what the paper measures."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from benchmarks.instruments.runs import simulate_all
from benchmarks.memserve.case import PaperCase


@dataclass(frozen=True, slots=True)
class PaperFigures:
    """Seconds: job completion time, time to first token and time per output token; and the hit rate of prompt tokens.

    `moved` are bytes per second between instances.
    """

    jct: float
    jct_p99: float
    ttft: float
    ttft_p99: float
    tpot: float
    tpot_p99: float
    hits: float
    moved: float


Figures = Mapping[PaperCase, PaperFigures]
"""The figures of each case, by the case with seed 0."""


def simulated(cases: Sequence[PaperCase], seeds: int, processes: int) -> dict[PaperCase, PaperFigures]:
    """Simulate every case with the seeds from 0 to `seeds` - 1, with a bar of their virtual time."""
    seeded = [replace(case, seed=seed) for case in cases for seed in range(seeds)]
    found = simulate_all([case.run() for case in seeded], processes)
    by_case = defaultdict(list)
    for case, metrics in zip(seeded, found, strict=True):
        by_case[replace(case, seed=0)].append(figures_of(metrics))
    return {case: _mean(each) for case, each in by_case.items()}


def figures_of(metrics: Mapping[str, Any]) -> PaperFigures:
    """The figures of one run."""
    jct, ttft, tpot = metrics["completion_s"], metrics["ttft_s"], metrics["itl_s"]
    times = (jct["mean"], jct["p99"], ttft["mean"], ttft["p99"], tpot["mean"], tpot["p99"])
    return PaperFigures(*times, metrics.get("cache_delivered", 0.0), metrics["bytes_moved_per_s"])


def _mean(each: Sequence[PaperFigures]) -> PaperFigures:
    return PaperFigures(*(statistics.mean(getattr(one, field.name) for one in each) for field in fields(PaperFigures)))
