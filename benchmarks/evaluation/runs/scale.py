"""Lengths and seeds of all runs."""

from dataclasses import dataclass

from benchmarks.evaluation.runs.case import Span


@dataclass(frozen=True, slots=True)
class Scale:
    """The number of seeds of every Poisson workload, and the span of each kind of run.

    `poisson` and `azure` are for the eight workloads, `held` for runs with a fixed number of GPUs, `tuned` and
    `tuned_azure` for the comparison of many tunings, `unbatched_azure` for decisions operation by operation, `costly`
    for runs under real costs, and `varied` for the sensitivity analysis under real costs; the last two have
    `costly_seeds` seeds.
    """

    name: str
    seeds: int
    costly_seeds: int
    poisson: Span
    azure: Span
    held: Span
    tuned: Span
    tuned_azure: Span
    unbatched_azure: Span
    costly: Span
    varied: Span


FULL = Scale(
    "full",
    seeds=3,
    costly_seeds=4,
    poisson=Span(3600, 600),
    azure=Span(1800, 600),
    held=Span(900, 300),
    tuned=Span(1400, 600),
    tuned_azure=Span(600, 200),
    unbatched_azure=Span(600, 200),
    costly=Span(1400, 600),
    varied=Span(1100, 500),
)
FAST = Scale(
    "fast",
    seeds=2,
    costly_seeds=1,
    poisson=Span(600, 200),
    azure=Span(300, 100),
    held=Span(400, 150),
    tuned=Span(400, 150),
    tuned_azure=Span(200, 80),
    unbatched_azure=Span(200, 80),
    costly=Span(400, 150),
    varied=Span(400, 150),
)
