"""The picture of the Grafana dashboard: every query of its panels, asked of a Prometheus, and drawn by matplotlib.

    python -m benchmarks.dashboard --prometheus http://127.0.0.1:9090 --minutes 5

The panels are where Grafana has them, with their titles, legends and units. The rest of Grafana's look is not copied.
The exit status is 1 if a query has no data; such queries are printed.
"""

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

GRAFANA = Path(__file__).parents[1] / "docs" / "grafana"
DASHBOARD = GRAFANA / "mell.json"

STEP_S = 2
RATE = "20s"
"""The value of Grafana's `$__rate_interval`: several scrapes of a Prometheus that is there for the picture."""

MOST_IN_LEGEND = 6
UNIT_INCHES = 0.23
"""The height of a unit of the dashboard's grid."""

SHOWN = {
    "s": "s",
    "percentunit": "share",
    "ops": "per s",
    "reqps": "per s",
    "Bps": "bytes per s",
    "bytes": "bytes",
    "h": "h",
    "short": "",
}
"""The axis label of a unit of Grafana's."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a panel; `times` are seconds before the end, `values` in the panel's unit."""

    legend: str
    times: Sequence[float]
    values: Sequence[float]


def legends() -> dict[str, str]:
    """The legend of every expression."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return {target["expr"]: target["legendFormat"] for panel in panels for target in panel.get("targets", ())}


def query_of(expression: str, span_s: int) -> str:
    """The query of Grafana for an expression, where it shows `span_s` seconds."""
    return expression.replace("$__rate_interval", RATE).replace("$__range", f"{span_s}s")


def ask(http: httpx.Client, query: str, legend: str, end: float, span_s: int) -> list[Series]:
    """The series of a query with a number in them. Raises httpx.HTTPError."""
    period = {"start": end - span_s, "end": end, "step": STEP_S}
    answer = http.get("/api/v1/query_range", params={"query": query, **period}).raise_for_status()
    found = []
    for series in answer.json()["data"]["result"]:
        points = [(at - end, float(value)) for at, value in series["values"] if math.isfinite(float(value))]
        if points:
            times, values = zip(*points, strict=True)
            found.append(Series(_named(legend, series["metric"]), times, values))
    return found


def _named(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"{{\s*(\w+)\s*}}", lambda name: labels.get(name[1], ""), legend)


def draw(path: Path, found: Mapping[str, Sequence[Series]], span_s: int) -> None:
    """Write the picture, a PNG file, of the series by expression in the last `span_s` seconds."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    lowest = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = plt.figure(figsize=(15, lowest * UNIT_INCHES))
    for panel in panels:
        place = panel["gridPos"]
        top = 1 - place["y"] / lowest
        if panel["type"] == "row":
            figure.text(0.01, top - 0.6 / lowest, panel["title"], fontsize=11, weight="bold", va="center")
            continue
        left, width = place["x"] / 24, place["w"] / 24
        area = (left + 0.025, top - (place["h"] - 1.4) / lowest, width - 0.035, (place["h"] - 2.8) / lowest)
        series = [each for target in panel["targets"] for each in found[target["expr"]]]
        _draw_panel(figure.add_axes(area), panel, series, span_s)
    figure.savefig(path, dpi=80, format="png", metadata={"Software": None})
    plt.close(figure)


def _draw_panel(axes: Axes, panel: Mapping[str, Any], series: Sequence[Series], span_s: int) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    unit = SHOWN[defaults["unit"]]
    axes.set_title(panel["title"] + (f" ({unit})" if unit else ""), fontsize=8, loc="left")
    axes.tick_params(labelsize=6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if panel["type"] == "stat":
        axes.axis("off")
        lines = [f"{each.values[-1]:.3g}  {each.legend}" for each in series]
        axes.text(0.02, 0.9, "\n".join(lines), transform=axes.transAxes, fontsize=11, va="top")
        return
    if defaults["custom"]:
        times = sorted({at for each in series for at in each.times})
        heights = [dict(zip(each.times, each.values, strict=True)) for each in series]
        stack = [[height.get(at, 0.0) for at in times] for height in heights]
        axes.stackplot(times, stack, labels=[each.legend for each in series], alpha=0.6)
    else:
        for each in series:
            axes.plot(each.times, each.values, label=each.legend, linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_xlim(-span_s, 0)
    axes.grid(axis="y", alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[:MOST_IN_LEGEND], labels[:MOST_IN_LEGEND], fontsize=5.5, loc="upper left", framealpha=0.6)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dashboard", description=__doc__.splitlines()[0])
    parser.add_argument("--prometheus", metavar="URL", default="http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=5.0, help="shown period (default: 5)")
    parser.add_argument(
        "--png", type=Path, default=GRAFANA / "mell.png", help="picture (default: docs/grafana/mell.png)"
    )
    options = parser.parse_args(arguments)
    span_s, end = int(60 * options.minutes), time.time()
    with httpx.Client(base_url=options.prometheus, timeout=30, trust_env=False) as http:
        found = {
            expression: ask(http, query_of(expression, span_s), legend, end, span_s)
            for expression, legend in legends().items()
        }
    missing = [expression for expression, series in found.items() if not series]
    print(f"{len(found)} queries, {len(missing)} without data", *missing, sep="\n")
    draw(options.png, found, span_s)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
