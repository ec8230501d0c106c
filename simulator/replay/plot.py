"""The plot of a replay: load and replicas, KV use with migrations, and latencies."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from simulator.outcome.statistics import quantile
from simulator.replay.measurements import RUNNING, ReplayMeasurements, ReplaySample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

CURVE_POINTS = 500
MAX_NAMED_REPLICAS = 6


def draw(path: Path, title: str, measured: ReplayMeasurements) -> None:
    """Write the plot as a PNG file."""
    # Imported here: the import is slow, and a replay works without matplotlib.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (load, cache, latency) = plt.subplots(3, 1, figsize=(10, 12), layout="constrained")
    figure.suptitle(title)
    _draw_load(load, measured.samples)
    _draw_cache(cache, measured.samples)
    _draw_latency(latency, measured)
    cache.sharex(load)
    figure.savefig(path, dpi=120, format="png")
    plt.close(figure)


def _draw_load(axes: "Axes", samples: Sequence[ReplaySample]) -> None:
    times = [sample.at_s for sample in samples]
    axes.plot(times, [sample.running for sample in samples], color="C0", label="running requests")
    axes.set_title("Load", loc="left")
    axes.set(xlabel="time since start (s)", ylabel="running requests")
    axes.set_ylim(bottom=0)
    known = [(s.at_s, sum(r.state == RUNNING for r in s.replicas)) for s in samples if s.replicas is not None]
    axes.grid(alpha=0.3)
    if not known:
        _legend(axes)
        return
    from matplotlib.ticker import MaxNLocator

    right = axes.twinx()
    right.step(*zip(*known, strict=True), where="post", color="C1", label="running replicas")
    right.set_ylabel("running replicas")
    right.set_ylim(0, max(count for _, count in known) + 1)
    right.yaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes, *right.get_lines())


def _draw_cache(axes: "Axes", samples: Sequence[ReplaySample]) -> None:
    curves: dict[str, list[tuple[float, float]]] = {}
    for sample in samples:
        for replica in sample.replicas or ():
            curves.setdefault(replica.id, []).append((sample.at_s, replica.used_percent))
    for name, points in sorted(curves.items()):
        axes.plot(*zip(*points, strict=True), label=name)
    moved = [sample.at_s for sample in samples if sample.moved]
    for number, at_s in enumerate(moved):
        axes.axvline(at_s, ymax=0.06, color="black", linewidth=1, label="_again" if number else "migrations")
    axes.set_title("KV cache in use, by replica", loc="left")
    axes.set(xlabel="time since start (s)", ylabel="used (% of capacity)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if not curves:
        axes.text(0.5, 0.5, "not reported by the endpoint", transform=axes.transAxes, ha="center")
    elif len(curves) <= MAX_NAMED_REPLICAS:
        _legend(axes)


def _draw_latency(axes: "Axes", measured: ReplayMeasurements) -> None:
    records = measured.records
    _draw_curve(axes, "time to first token", (r.ttft_s for r in records if r.ttft_s is not None))
    _draw_curve(axes, "between chunks", (gap for record in records for gap in record.gaps_s))
    axes.set_title("Latency", loc="left")
    axes.set(xlabel="milliseconds (logarithmic)", ylabel="share below (%)", ylim=(0, 100))
    axes.grid(alpha=0.3, which="both")
    if axes.get_lines():
        axes.set_xscale("log")
        _legend(axes)


def _draw_curve(axes: "Axes", name: str, values: Iterable[float]) -> None:
    # Chunks read at once have a gap of 0, which a logarithmic axis cannot show.
    ordered = sorted(max(1000 * value, 0.001) for value in values)
    if ordered:
        shares = [step / CURVE_POINTS for step in range(CURVE_POINTS + 1)]
        axes.plot([quantile(ordered, share) for share in shares], [100 * share for share in shares], label=name)


def _legend(axes: "Axes", *others: "Line2D") -> None:
    # Beside the title, so that the legend hides no curve.
    lines = [line for line in (*axes.get_lines(), *others) if not str(line.get_label()).startswith("_")]
    names = [str(line.get_label()) for line in lines]
    axes.legend(lines, names, loc="lower right", bbox_to_anchor=(1, 1), ncols=7, frameon=False)
