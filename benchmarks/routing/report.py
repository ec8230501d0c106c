"""Figures of runs, and tables of them; pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.load import percentile, spread
from benchmarks.routing.case import System
from benchmarks.routing.live import RoutingRun

FIGURES: Mapping[str, tuple[float, int]] = {
    "hit rate, %": (100.0, 1),
    "TTFT p50, ms": (1e3, 0),
    "TTFT p99, ms": (1e3, 0),
    "completion mean, s": (1.0, 2),
    "completion p99, s": (1.0, 2),
    "not delivered, %": (100.0, 2),
}
"""The figures of a run, each with its factor and digits in tables."""
TIMES = ("TTFT p50, ms", "TTFT p99, ms", "completion mean, s", "completion p99, s")


@dataclass(frozen=True, slots=True)
class RoutingFigures:
    """The figures of one run by name, in seconds and as shares."""

    run: RoutingRun
    values: Mapping[str, float]


def figures(run: RoutingRun) -> RoutingFigures:
    """The figures of a run. Tokens that are not delivered are a share of the predicted ones."""
    first = [answer.first_s for answer in run.answers]
    whole = [answer.whole_s for answer in run.answers]
    values = {
        "hit rate, %": sum(answer.cached for answer in run.answers) / sum(answer.prompt for answer in run.answers),
        "TTFT p50, ms": percentile(first, 0.5),
        "TTFT p99, ms": percentile(first, 0.99),
        "completion mean, s": fmean(whole),
        "completion p99, s": percentile(whole, 0.99),
    }
    if run.predicted and run.delivered is not None:
        values["not delivered, %"] = max(0.0, 1 - run.delivered / run.predicted)
    return RoutingFigures(run, values)


def render(runs: Sequence[RoutingRun], baseline: System) -> str:
    """A table per workload: medians and ranges by system, then ratios of times to the baseline's of the same seed."""
    return "\n\n".join("\n".join(_table(workload, runs, baseline)) for workload in _workloads(runs))


def compare(runs: Sequence[RoutingRun], predicted: Sequence[RoutingRun]) -> str:
    """The predictions beside the measurements of the same systems, workloads and seeds."""
    lines = [_line("", ["hit rate, % measured", "predicted", "TTFT p50, ms measured", "predicted", "error, %"])]
    of = {(run.system, run.workload, run.seed): figures(run).values for run in predicted}
    for run in runs:
        if (guess := of.get((run.system, run.workload, run.seed))) is None:
            continue
        found = figures(run).values
        hit, ttft = "hit rate, %", "TTFT p50, ms"
        cells = [f"{100 * found[hit]:.1f}", f"{100 * guess[hit]:.1f}"]
        cells += [
            f"{1e3 * found[ttft]:.0f}",
            f"{1e3 * guess[ttft]:.0f}",
            f"{100 * (guess[ttft] / found[ttft] - 1):+.0f}",
        ]
        lines.append(_line(f"{run.workload}, {run.system}", cells))
    return "\n".join(lines)


def _workloads(runs: Sequence[RoutingRun]) -> list[str]:
    return list(dict.fromkeys(run.workload for run in runs))


def _table(workload: str, runs: Sequence[RoutingRun], baseline: System) -> Iterator[str]:
    found = [figures(run) for run in runs if run.workload == workload]
    requests = spread([len(each.run.answers) for each in found], 0)
    yield f"{workload}: {requests} requests. Median [min, max] of the runs."
    yield _line("", list(FIGURES))
    systems = [system for system in System if any(each.run.system is system for each in found)]
    for system in systems:
        own = [each.values for each in found if each.run.system is system]
        yield _line(system, [_cell([each[name] for each in own if name in each], name) for name in FIGURES])
    base = {each.run.seed: each.values for each in found if each.run.system is baseline}
    for system in systems:
        pairs = [(each.values, base[each.run.seed]) for each in found if each.run.system is system and base]
        ratios = [spread([one[name] / other[name] for one, other in pairs], 2) for name in TIMES]
        if system is not baseline and pairs:
            yield _line(f"{system} / {baseline}", ["", *ratios])


def _cell(values: Sequence[float], name: str) -> str:
    factor, digits = FIGURES[name]
    return spread([value * factor for value in values], digits) if values else ""


def _line(title: str, cells: Sequence[str]) -> str:
    return (f"{title:<34}" + "".join(f"{cell:>24}" for cell in cells)).rstrip()
