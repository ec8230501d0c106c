"""The picture of a plan: GPU-seconds against both p99, one line for the frontier of every contender."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.command.document import Document
from simulator.planning.cases import LEVEL, TITLES, Contender

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = (
    ("ttft_p99_s", 1.0, "TTFT p99 (s, logarithmic)", "ttft_p99_s"),
    ("itl_p99_s", 1e3, "ITL p99 (ms, logarithmic)", "itl_p99_s"),
)
"""The member of a case, its factor, the label of the axis, and the member of the set-up with the level."""


def draw_plan(path: Path, plan: Document) -> None:
    """Write the picture as a PNG file."""
    # Imported here: the import is slow, and a plan works without matplotlib.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    workload = plan["workload"]
    figure, panels = plt.subplots(1, len(PANELS), figsize=(13, 6), layout="constrained")
    figure.suptitle(f"GPU-seconds and service: {workload['trace'] or 'Poisson arrivals'}")
    for axes, (member, factor, label, target) in zip(panels, PANELS, strict=True):
        _draw_panel(axes, plan, member, factor, plan["setup"][target])
        axes.set(xlabel="GPU-seconds", ylabel=label)
        axes.set_yscale("log")
        axes.grid(alpha=0.3, which="both")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=120, format="png")
    plt.close(figure)


def _draw_panel(axes: "Axes", plan: Document, member: str, factor: float, most: float | None) -> None:
    cases = [case for case in plan["cases"] if case[member] is not None and not case["hypothetical"]]
    for number, contender in enumerate(Contender):
        own = [case for case in cases if case["contender"] == contender]
        points = _points(own, member, factor)
        axes.plot(*_columns(points), "o", color=f"C{number}", markersize=3, alpha=0.3)
        best = _staircase(points)
        axes.plot(*_columns(best), "o-", color=f"C{number}", markersize=5, label=TITLES[contender])
    level = next((case for case in cases if case["name"] == LEVEL), None)
    if level is not None:
        axes.plot(
            *_columns(_points([level], member, factor)), "*", color="C0", markersize=18, label="Mell at the level"
        )
    if most is not None:
        axes.axhline(factor * most, color="black", linestyle="--", linewidth=1, label="the level")
    if plan["oracle"]["gpu_seconds"] is not None:
        axes.axvline(plan["oracle"]["gpu_seconds"], color="black", linestyle=":", linewidth=1, label="oracle")


def _points(cases: Sequence[Mapping[str, Any]], member: str, factor: float) -> list[tuple[float, float]]:
    return sorted((case["gpu_seconds"], max(factor * case[member], 1e-3)) for case in cases)


def _staircase(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that are lower than all with fewer GPU-seconds."""
    kept: list[tuple[float, float]] = []
    for point in points:
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
