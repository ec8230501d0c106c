"""One or several replays side by side, as one HTML file: `python -m simulator.replay.page RUN.json ... --html FILE`.

The page is made from JSON reports (`simulator.replay.report`), so that replays of different days, clusters and
settings can be compared. The file is self-contained: plots are SVG, and there is no script.
"""

import argparse
import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.errors import BadInput
from simulator.replay.measurements import RUNNING
from simulator.replay.report import Document

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .9rem .25rem 0; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
th:first-child { text-align: left; font-weight: normal; }
figure { margin: 1rem 0; } svg { width: 100%; height: auto; }
"""
_GREY = "#808080"
"""Legible on light and dark pages."""

Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class NamedReport:
    """A report and its name on the page."""

    name: str
    report: Document


def render(runs: Sequence[NamedReport]) -> str:
    """The page. Raises ImportError without matplotlib, and KeyError or TypeError for an invalid report."""
    title = " against ".join(run.name for run in runs)
    names = "".join(f"<th scope='col'>{escape(run.name)}</th>" for run in runs)
    rows = "".join(_row(name, runs, cell) for name, cell in _ROWS)
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>"
        f"<div class='scroll'><table><thead><tr><th></th>{names}</tr></thead><tbody>{rows}</tbody></table></div>"
        f"<h2>Over time</h2>{_figure(runs, _OVER_TIME, 'seconds since the start')}"
        f"<h2>Latencies</h2>{_figure(runs, _LATENCIES, 'milliseconds', log=True)}"
        "</body></html>\n"
    )


# --- the table ----------------------------------------------------------------------------------------


def _row(name: str, runs: Sequence[NamedReport], cell: Callable[[Document], str]) -> str:
    cells = "".join(f"<td>{escape(cell(run.report))}</td>" for run in runs)
    return f"<tr><th scope='row'>{escape(name)}</th>{cells}</tr>"


def _trace(report: Document) -> str:
    trace, factor = report["trace"], report["options"]["time_scale"]
    return f"{trace['file']}, {trace['minutes']:g} min from {trace['start_minute']:g}, times x {factor:g}"


def _outcomes(report: Document) -> str:
    summary = report["summary"]
    whole = f"{summary['ok']} of {report['trace']['requests']}"
    return f"{whole}, interrupted" if summary["interrupted"] else whole


def _times(name: str) -> Callable[[Document], str]:
    def cell(report: Document) -> str:
        values = report["summary"][name]
        return "-" if values is None else f"{1000 * values['p50']:,.1f} / {1000 * values['p99']:,.1f} ms"

    return cell


def _replica_seconds(report: Document) -> str:
    """Replica-seconds: each sample counts until the next one."""
    points = _running_replicas(report)
    if len(points) < 2:
        return "-"
    return f"{sum((later - at_s) * count for (at_s, count), (later, _) in pairwise(points)):,.0f}"


def _migrations(report: Document) -> str:
    groups = report["migrations"]["groups"]
    return ", ".join(f"{g['count']} by {g['path']} {g['outcome']}" for g in groups) or "none"


def _pauses(report: Document) -> str:
    pause = report["migrations"]["pause_s"]
    return "-" if pause is None else f"{1000 * pause['p50']:,.1f} / {1000 * pause['p99']:,.1f} ms"


_ROWS: tuple[tuple[str, Callable[[Document], str]], ...] = (
    ("trace", _trace),
    ("complete answers", _outcomes),
    ("time to first token, p50 / p99", _times("ttft_s")),
    ("between chunks, p50 / p99", _times("gap_s")),
    ("end to end, p50 / p99", _times("total_s")),
    ("output tokens per second", lambda report: f"{report['summary']['output_tokens_per_s']:,.1f}"),
    ("replica-seconds", _replica_seconds),
    ("migrations", _migrations),
    ("pause of a migration, p50 / p99", _pauses),
)


# --- the plots ----------------------------------------------------------------------------------------


def _running_replicas(report: Document) -> Points:
    timeline = (sample for sample in report["timeline"] if sample["replicas"] is not None)
    return [(s["at_s"], float(sum(r["state"] == RUNNING for r in s["replicas"]))) for s in timeline]


def _running_requests(report: Document) -> Points:
    return [(sample["at_s"], sample["running"]) for sample in report["timeline"]]


def _kv_percent(report: Document) -> Points:
    points = []
    for sample in report["timeline"]:
        replicas = sample["replicas"] or ()
        capacity = sum(r["capacity_tokens"] for r in replicas)
        if capacity:
            points.append((sample["at_s"], 100 * sum(r["used_tokens"] for r in replicas) / capacity))
    return points


def _moved(report: Document) -> Points:
    timeline = report["timeline"]
    sums = accumulate(sample["moved"] for sample in timeline)
    return [(sample["at_s"], float(moved)) for sample, moved in zip(timeline, sums, strict=True)]


def _curve(name: str) -> Callable[[Document], Points]:
    def points(report: Document) -> Points:
        values = report["distributions"][name] or []
        # Chunks read at once have a gap of 0, which a logarithmic axis cannot show.
        return [(max(1000 * value, 0.001), 100 * at / (len(values) - 1)) for at, value in enumerate(values)]

    return points


Plots = Sequence[tuple[str, Callable[[Document], Points]]]

_OVER_TIME: Plots = (
    ("running replicas", _running_replicas),
    ("running requests", _running_requests),
    ("KV cache in use (% of all replicas')", _kv_percent),
    ("migrations so far", _moved),
)
_LATENCIES: Plots = (
    ("time to first token (% below)", _curve("ttft_s")),
    ("between chunks (% below)", _curve("gap_s")),
    ("end to end (% below)", _curve("total_s")),
)


def _figure(runs: Sequence[NamedReport], plots: Plots, below: str, log: bool = False) -> str:
    import matplotlib

    grey = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color")
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "mell", **dict.fromkeys(grey, _GREY)}
    with matplotlib.rc_context(settings):
        from matplotlib.figure import Figure

        rows = (len(plots) + 1) // 2
        figure = Figure(figsize=(11, 3.2 * rows), layout="constrained")
        for index, (title, points_of) in enumerate(plots):
            _plot(figure.add_subplot(rows, 2, index + 1), title, runs, points_of, below, log)
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper right", frameon=False)
        svg = io.StringIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    # Without the prolog of a standalone SVG file.
    _, tag, element = svg.getvalue().partition("<svg")
    return f"<figure>{tag}{element}</figure>"


def _plot(
    axes: "Axes",
    title: str,
    runs: Sequence[NamedReport],
    points_of: Callable[[Document], Points],
    below: str,
    log: bool,
) -> None:
    for number, run in enumerate(runs):
        points = points_of(run.report)
        axes.plot([x for x, _ in points], [y for _, y in points], color=f"C{number % 10}", label=run.name)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(below, fontsize=9)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if log and any(line.get_xdata().size for line in axes.get_lines()):  # type: ignore[union-attr]
        axes.set_xscale("log")


# --- the command line ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; the exit status: 0, or 2 if a report cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m simulator.replay.page", description="Compare replays side by side."
    )
    parser.add_argument("reports", nargs="+", type=Path, help="JSON reports of simulator.replay")
    parser.add_argument("--html", type=Path, default=Path("replay.html"), help="output file (default: replay.html)")
    options = parser.parse_args(argv)
    try:
        options.html.write_text(render([_read(path) for path in options.reports]))
    except (BadInput, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _read(path: Path) -> NamedReport:
    try:
        report = json.loads(path.read_text())
        for part in ("trace", "options", "summary", "migrations", "timeline", "distributions"):
            report[part]
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path} is not a report of this version of simulator.replay: {error!r}") from None
    return NamedReport(path.stem, report)


if __name__ == "__main__":
    sys.exit(main())
