"""The kinds of plots in the figures; all take plain numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from benchmarks.evaluation.points import Point
from benchmarks.evaluation.style import BOUND, MARKERS, PALE, colour, name


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar per group: its height, and its error if it is known."""

    label: str
    colour: str
    heights: Sequence[float]
    errors: Sequence[float] = ()
    hatch: str = ""


@dataclass(frozen=True, slots=True)
class PlottedCurve:
    """One curve of a plot."""

    label: str
    colour: str
    xs: Sequence[float]
    ys: Sequence[float]
    dashed: bool = False
    marker: str = ""


def bars(policy: str, heights: Sequence[float], errors: Sequence[float] = (), label: str = "", hatch: str = "") -> Bars:
    """The bars of a policy, in its colour."""
    return Bars(label or policy, colour(policy), heights, errors, hatch)


def grouped(axes: Axes, groups: Sequence[str], all_bars: Sequence[Bars]) -> None:
    """Draw groups of bars side by side."""
    width = 0.84 / len(all_bars)
    for number, each in enumerate(all_bars):
        offset = (number - (len(all_bars) - 1) / 2) * width
        axes.bar(
            [place + offset for place in range(len(groups))],
            each.heights,
            width * 0.92,
            yerr=each.errors or None,
            label=each.label,
            color=each.colour,
            hatch=each.hatch,
            edgecolor="white",
            linewidth=0,
            error_kw={"elinewidth": 0.8, "ecolor": "#444444"},
        )
    axes.set_xticks(range(len(groups)), groups)
    axes.tick_params(axis="x", length=0)


def steps_at(axes: Axes, levels: Sequence[float], label: str) -> None:
    """Draw a horizontal level across each group."""
    for place, level in enumerate(levels):
        axes.plot([place - 0.46, place + 0.46], [level, level], color=BOUND, linewidth=1, label="" if place else label)


def curves(axes: Axes, all_curves: Sequence[PlottedCurve]) -> None:
    """Draw curves."""
    for each in all_curves:
        style = "--" if each.dashed else "-"
        axes.plot(each.xs, each.ys, style, color=each.colour, label=each.label, marker=each.marker, markersize=4)


def cloud(axes: Axes, points: Sequence[Point], front: Sequence[Point]) -> None:
    """Draw points by policy, and the line through the Pareto front."""
    ordered = sorted(front, key=lambda point: point.x)
    xs, ys = [point.x for point in ordered], [point.y for point in ordered]
    axes.plot(xs, ys, color=PALE, drawstyle="steps-post", linewidth=4, zorder=1, label="not dominated")
    for policy in dict.fromkeys(name(point.policy) for point in points):
        own = [point for point in points if name(point.policy) == policy]
        axes.scatter(
            [point.x for point in own],
            [point.y for point in own],
            s=26,
            marker=MARKERS[policy],
            color=colour(policy),
            label=policy,
            zorder=2,
        )
    for point in points:
        axes.annotate(point.label, (point.x, point.y), (4, 4), textcoords="offset points", fontsize=7)
    axes.grid(axis="both")


def logarithmic(axes: Axes) -> None:
    """Make the horizontal axis logarithmic, with plain numbers."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
