"""Section V of the paper at cluster scale: KV or tokens for each migration, on shared links and under real costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from benchmarks.evaluation.plots import PlottedCurve, curves
from benchmarks.evaluation.runs.case import Case, Physics, seeds
from benchmarks.evaluation.runs.eight import A100, MIDDLE, OURS
from benchmarks.evaluation.runs.results import Results
from benchmarks.evaluation.runs.scale import Scale
from benchmarks.evaluation.section import PageSection
from benchmarks.evaluation.style import NEUTRAL, Pictures, drawing, legend
from benchmarks.evaluation.words import share, table
from simulator.costs.costs import PathChoice

GBITS = (1.0, 10.0, 25.0, 100.0)
"""Between machines, in 10**9 bits per second; 10 is the paper's testbed."""
BYTES_PER_GBIT = 1e9 / 8


@dataclass(frozen=True, slots=True)
class Way:
    """A way to choose between KV and tokens."""

    name: str
    path: PathChoice
    consensus: bool = True


WAYS = (
    Way("always KV", PathChoice.KV),
    Way("always tokens", PathChoice.TOKENS),
    Way("adaptive, alone", PathChoice.ADAPTIVE, consensus=False),
    Way("adaptive, consensus", PathChoice.ADAPTIVE),
)
KV, TOKENS, ALONE, TOGETHER = WAYS
PAUSE = "pause_s.p99"
SLOWDOWN = "slowdown.p99"
HEADER = (
    "Gb/s",
    "way",
    "moves/s",
    "by KV",
    "put off",
    "pause p50 s",
    "pause p99 s",
    "slowdown p50",
    "slowdown p99",
    "added p99 s",
    "mean GPUs",
)


def runs(way: Way, gbits: float, scale: Scale) -> list[Case]:
    """The runs of a way with a link of `gbits` between machines, one per seed."""
    physics = Physics(A100.costs, way.path, way.consensus, gbits * BYTES_PER_GBIT)
    return seeds(Case(OURS, MIDDLE.arrivals, scale.costly, A100.capacity, physics), scale.costly_seeds)


def _cases(scale: Scale) -> list[Case]:
    return [case for gbits in GBITS for way in WAYS for case in runs(way, gbits, scale)]


def _parts(results: Results, scale: Scale, pictures: Pictures) -> dict[str, str]:
    rows = [_row(results, runs(way, gbits, scale), way, gbits) for gbits in GBITS for way in WAYS]
    return {"paths-figure": _figure(results, scale, pictures), "paths": table(HEADER, rows)}


def _figure(results: Results, scale: Scale, pictures: Pictures) -> str:
    with drawing(3, width=10, height=3.0) as (figure, axes):
        panels = (
            ("pause of a move, p99 (s)", PAUSE),
            ("slowdown of neighbours, p99", SLOWDOWN),
            ("added to completion, p99 (s)", "added_completion_s.p99"),
        )
        for each, (title, metric) in zip(axes, panels, strict=True):
            curves(
                each, [_curve(results, scale, way, metric, colour) for way, colour in zip(WAYS, NEUTRAL, strict=True)]
            )
            each.set(title=title, xlabel="Gb/s between machines", xscale="log")
            # Over slow links pauses are longer by orders of magnitude.
            if metric == PAUSE and max(results.mean(runs(KV, gbits, scale), metric) for gbits in GBITS) > 0:
                each.set_yscale("log")
            else:
                each.set_ylim(bottom=1 if metric == SLOWDOWN else 0)
            each.set_xticks(GBITS, [f"{gbits:g}" for gbits in GBITS])
            each.xaxis.minorticks_off()
        legend(figure, axes[0], 4)
        return pictures.save(figure, "paths", "Pause, slowdown and delay by what is sent, against the speed of uplinks")


def _curve(results: Results, scale: Scale, way: Way, metric: str, colour: str) -> PlottedCurve:
    heights = [results.mean(runs(way, gbits, scale), metric) for gbits in GBITS]
    return PlottedCurve(way.name, colour, GBITS, heights, dashed=way == ALONE, marker="o")


def _row(results: Results, cases: Sequence[Case], way: Way, gbits: float) -> list[str]:
    def number(metric: str, form: str = ".2f") -> str:
        return format(results.mean(cases, metric), form)

    return [
        f"{gbits:g}",
        way.name,
        number("migrations_per_s"),
        share(mean([_by_kv(results, case) for case in cases]), 0),
        share(mean([_put_off(results, case) for case in cases]), 0),
        number("pause_s.p50", ".3f"),
        number(PAUSE),
        number("slowdown.p50"),
        number(SLOWDOWN),
        number("added_completion_s.p99", ".1f"),
        number("gpus_mean", ".1f"),
    ]


def _by_kv(results: Results, case: Case) -> float:
    """The share of completed moves that sent KV."""
    paths = results.metrics[case]["moves_by_path"]
    completed: dict[str, int] = {path: members["completed"] for path, members in paths.items()}
    return completed.get("kv", 0) / (sum(completed.values()) or 1)


def _put_off(results: Results, case: Case) -> float:
    outcomes: dict[str, int] = results.metrics[case]["moves_by_outcome"]
    return outcomes.get("deferred", 0) / (sum(outcomes.values()) or 1)


SECTION = PageSection(_cases, _parts)
