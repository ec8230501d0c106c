"""`disaggregation.mode` auto beside static and off, simulated: is auto as good as the better of them at every load?

    python -m benchmarks.memserve.disaggregated [--seeds 3] [--traces DIR] [--page]

Every workload is played at several loads with equal requests: without replicas for prefills (off), with 1 and with 2 of
4, and with as many as the decision wants (auto). The table has the job completion times, and auto's beside the best of
the others; `--page` writes it into docs/evaluation.md. Azure's traces are among the workloads if DIR has them; there a
seed is another part of the trace.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from benchmarks.evaluation.page import fill
from benchmarks.evaluation.words import table
from benchmarks.instruments.runs import simulate_all
from benchmarks.memserve.case import BLOCK, CAPACITY, POLICY, TURNS, costs
from benchmarks.memserve.results import PaperFigures, figures_of
from simulator.command.runs import SimulationRun, available_processors
from simulator.outcome.metrics import Window
from simulator.workload.sessions import SHAPES
from simulator.workload.workload import ArrivalTrace, Poisson, Recipe, draw, read_trace
from simulator.world.setup import Setup

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"
WINDOW = Window(60.0, 300.0)
REPLICAS = 4
PART_S = 300.0
"""The distance of the parts of a trace, in seconds."""
AUTO = "auto"
TOLERANCE = 0.05
"""The share of the best mode's completion time by which auto may exceed it, if the runs do not differ by more."""
MODES: Mapping[str, tuple[int, bool]] = {
    "off": (0, False),
    "static 1": (1, False),
    "static 2": (2, False),
    AUTO: (3, True),
}
"""The number of replicas for prefills, and whether that is their maximum."""

RATES: Mapping[str, tuple[float, ...]] = {
    "sharegpt_like": (1.0, 2.0, 4.0, 6.0),
    "loogle_like": (1.0, 2.0, 4.0, 6.0),
    "react_like": (0.5, 1.0, 1.5, 2.5),
}
"""Requests per second and replica."""
SPEEDS: Mapping[str, tuple[float, ...]] = {"azure2023_code": (1.0, 2.0, 4.0), "azure2023_conv": (0.5, 1.0, 1.5)}
"""Multiples of the rates of traces."""


@dataclass(frozen=True, slots=True)
class ModeCase:
    """A workload at a `load`: requests per second and replica, or a multiple of the rate of the trace in `folder`."""

    workload: str
    load: float
    cached: bool
    folder: Path | None = None

    def run(self, mode: str, seed: int, policy: str = POLICY) -> SimulationRun:
        """The simulation with a mode."""
        prefills, auto = MODES[mode]
        setup = Setup(
            CAPACITY,
            horizon_s=WINDOW.horizon_s,
            min_replicas=REPLICAS,
            max_gpus=REPLICAS,
            block_tokens=BLOCK if self.cached else 0,
            prefill_gpus=prefills,
            auto_prefills=auto,
        )
        return SimulationRun(policy, seed, draw(self._recipe(seed), seed).jobs, setup, WINDOW, costs())

    def _recipe(self, seed: int) -> Recipe:
        block = BLOCK if self.cached else 0
        if self.folder is None:
            arrivals = Poisson(self.load * REPLICAS / TURNS[self.workload], SHAPES[self.workload])
            return Recipe(arrivals, None, WINDOW.horizon_s, CAPACITY, block_tokens=block)
        rows = read_trace(self.folder / f"{self.workload}.csv.gz").rows
        begins_s = seed * PART_S * self.load
        part = (replace(row, at_s=row.at_s - begins_s) for row in rows if row.at_s >= begins_s)
        kept = tuple(takewhile(lambda row: row.at_s < WINDOW.horizon_s * self.load, part))
        return Recipe(ArrivalTrace(kept), None, WINDOW.horizon_s, CAPACITY, time_scale=1 / self.load)


def cases(folder: Path | None) -> list[ModeCase]:
    """All workloads at all loads."""
    made = [ModeCase(name, rate, cached) for cached in (True, False) for name, rates in RATES.items() for rate in rates]
    traced = [ModeCase(name, speed, False, folder) for name, speeds in SPEEDS.items() for speed in speeds]
    return [*made, *(traced if folder is not None else ())]


class ModeComparison(NamedTuple):
    """The figures of each mode at one load, one per seed."""

    figures: Mapping[str, Sequence[PaperFigures]]

    def jct(self, mode: str) -> float:
        """The mean job completion time in seconds."""
        return mean(each.jct for each in self.figures[mode])

    @property
    def best(self) -> str:
        """The mode other than auto with the shortest jobs."""
        return min((mode for mode in self.figures if mode != AUTO), key=self.jct)

    @property
    def ratios(self) -> list[float]:
        """Auto's completion times, of each seed, as multiples of those of the best mode with that seed."""
        runs = zip(self.figures[AUTO], self.figures[self.best], strict=True)
        return [auto.jct / best.jct for auto, best in runs]

    @property
    def verdict(self) -> str:
        """`yes` if auto is within TOLERANCE of the best mode, `spread` if within the range of that mode's runs."""
        auto, best = self.jct(AUTO), self.figures[self.best]
        if auto <= (1 + TOLERANCE) * self.jct(self.best):
            return "yes"
        return "spread" if auto <= max(each.jct for each in best) else "no"


def compared(found: Sequence[ModeCase], seeds: int, processes: int) -> dict[ModeCase, ModeComparison]:
    """Simulate every case in every mode with the seeds from 0 to `seeds` - 1, with a bar of their virtual time."""
    keys = [(case, mode, seed) for case in found for mode in MODES for seed in range(seeds)]
    metrics = simulate_all([case.run(mode, seed) for case, mode, seed in keys], processes)
    by_case: dict[ModeCase, dict[str, list[PaperFigures]]] = defaultdict(lambda: defaultdict(list))
    for (case, mode, _), each in zip(keys, metrics, strict=True):
        by_case[case][mode].append(figures_of(each))
    return {case: ModeComparison(by_mode) for case, by_mode in by_case.items()}


def tables(found: Mapping[ModeCase, ModeComparison]) -> dict[str, str]:
    """The parts of the page by name."""
    header = ["workload", "load", "caches", *(f"{mode}, s" for mode in MODES), "auto/best", "as good"]
    rows = [
        [
            case.workload,
            f"{case.load:g}",
            "yes" if case.cached else "no",
            *(_cell(each.figures[mode]) for mode in MODES),
            f"{each.jct(AUTO) / each.jct(each.best):.2f} ({min(each.ratios):.2f} to {max(each.ratios):.2f})",
            each.verdict,
        ]
        for case, each in found.items()
    ]
    verdicts = Counter(each.verdict for each in found.values())
    worst = max(each.jct(AUTO) / each.jct(each.best) for each in found.values())
    summary = (
        f"Auto is within {TOLERANCE:.0%} of the best other mode in {verdicts['yes']} of {len(found)} cases, and within "
        f"the range of its runs in {verdicts['spread']} more; the largest ratio is {worst:.2f}."
    )
    return {"disaggregation-modes": f"{table(header, rows)}\n\n{summary}"}


def _cell(figures: Sequence[PaperFigures]) -> str:
    return f"{mean(each.jct for each in figures):.2f}, {mean(each.jct_p99 for each in figures):.1f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate, print, and renew the page if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memserve.disaggregated", description=__doc__)
    add = parser.add_argument
    add("--seeds", type=int, default=3, metavar="N", help="runs of each case (default: %(default)s)")
    add("--traces", type=Path, metavar="DIR", help="folder with traces: NAME.csv.gz")
    add("--processes", type=int, default=available_processors(), metavar="N", help="parallel simulations")
    add("--page", action="store_true", help="write the table into docs/evaluation.md")
    given = parser.parse_args(argv)
    parts = tables(compared(cases(given.traces), given.seeds, given.processes))
    print("\n\n".join(parts.values()))
    if given.page:
        PAGE.write_text(fill(PAGE.read_text(), parts))


if __name__ == "__main__":
    main()
