"""Every policy under real costs: GPU-seconds against delay."""

from collections.abc import Sequence

from benchmarks.evaluation.plots import cloud
from benchmarks.evaluation.points import Point, front
from benchmarks.evaluation.runs.case import Case, Physics, seeds
from benchmarks.evaluation.runs.eight import A100, BASELINES, HIGH, MIDDLE, OURS, PAPERS, RTX4090, STALL, Workload, name
from benchmarks.evaluation.runs.results import Results
from benchmarks.evaluation.runs.scale import Scale
from benchmarks.evaluation.section import PageSection
from benchmarks.evaluation.style import Pictures, drawing, legend
from benchmarks.evaluation.words import spread, table

STALLING = (f"best_fit{STALL}", f"worst_fit{STALL}")
"""Variants in which requests wait on full GPUs while others are empty: they serve less, and are not comparable."""
SERVING = (*BASELINES, "load_balance:drain=true", *PAPERS, OURS)
WORKLOADS: tuple[Workload, ...] = ((A100, MIDDLE), (RTX4090, HIGH))
SLACKS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Free room, in GPUs, for requests that would otherwise wait for a GPU to start."""
TABLED = (1.0, 4.0)
"""The slacks in the tables."""
DELAY = "added_completion_s.p99"
HEADER = (
    "policy",
    "slack",
    "GPU-seconds / 1,000",
    "served/s",
    "waiting",
    "moves/s",
    "evicted/s",
    "preempted/s",
    "stall p99 s",
    "TTFT+ p99 s",
    "done+ p99 s",
)


def runs(workload: Workload, policy: str, scale: Scale, slack: float) -> list[Case]:
    """The runs of a workload under real costs, one per seed, with the free room of `slack` GPUs."""
    hardware, load = workload
    case = Case(policy, load.arrivals, scale.costly, hardware.capacity, Physics(hardware.costs), slack=slack)
    return seeds(case, scale.costly_seeds)


def _cases(scale: Scale) -> list[Case]:
    compared = _compared(SLACKS)
    return [
        case for workload in WORKLOADS for policy, slack in compared for case in runs(workload, policy, scale, slack)
    ]


def _compared(slacks: Sequence[float]) -> list[tuple[str, float]]:
    return [(policy, slack) for policy in SERVING for slack in slacks] + [(policy, slacks[0]) for policy in STALLING]


def _parts(results: Results, scale: Scale, pictures: Pictures) -> dict[str, str]:
    found = {workload: _outcomes(results, workload, scale) for workload in WORKLOADS}
    return {
        "costs-figure": _figure(found, pictures),
        **{f"costs-{number}": _table(results, workload, scale) for number, workload in enumerate(WORKLOADS, 1)},
    }


def _outcomes(results: Results, workload: Workload, scale: Scale) -> list[Point]:
    def outcome(policy: str, slack: float) -> Point:
        cases = runs(workload, policy, scale, slack)
        label = f"{'drains, ' if 'drain=true' in policy else ''}{slack:g}"
        return Point(policy, results.mean(cases, DELAY), results.mean(cases, "gpu_seconds") / 1000, label)

    return [outcome(policy, slack) for policy in SERVING for slack in SLACKS]


def _figure(found: dict[Workload, list[Point]], pictures: Pictures) -> str:
    with drawing(2, height=3.6) as (figure, axes):
        for each, (workload, outcomes) in zip(axes, found.items(), strict=True):
            cloud(each, outcomes, front(outcomes))
            each.set(title=name(workload), xlabel="added to completion, p99 (s)", xlim=(0, None))
        axes[0].set_ylabel("GPU-seconds / 1,000")
        legend(figure, axes[0], 7)
        return pictures.save(figure, "costs", "GPU-seconds against delay under real costs; lower left is better")


def _table(results: Results, workload: Workload, scale: Scale) -> str:
    rows = [_row(results, policy, slack, runs(workload, policy, scale, slack)) for policy, slack in _compared(TABLED)]
    return table(HEADER, rows)


def _row(results: Results, policy: str, slack: float, cases: Sequence[Case]) -> list[str]:
    def number(metric: str, digits: int, factor: float = 1.0) -> str:
        return spread(results.over(cases, metric), digits, factor)

    def middle(metric: str) -> str:
        return f"{results.mean(cases, metric):.2f}"

    return [
        f"`{policy}`",
        f"{slack:g}",
        number("gpu_seconds", 1, 1 / 1000),
        middle("requests_finished_per_s"),
        middle("requests_waiting_mean"),
        middle("migrations_per_s"),
        middle("evictions_per_s"),
        middle("preemptions_per_s"),
        number("stall_s.p99", 1),
        number("added_ttft_s.p99", 1),
        number(DELAY, 1),
    ]


SECTION = PageSection(_cases, _parts)
