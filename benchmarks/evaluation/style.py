"""The style of all figures: white background, one colour per policy (Okabe and Ito's, safe for the colour-blind)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS: Mapping[str, str] = {
    "best_fit": "#56B4E9",
    "worst_fit": "#E69F00",
    "load_balance": "#009E73",
    "mell": "#CC79A7",
    "mell_repaired": "#D55E00",
    "pack": "#0072B2",
}
MARKERS: Mapping[str, str] = {
    "best_fit": "v",
    "worst_fit": "^",
    "load_balance": "s",
    "mell": "D",
    "mell_repaired": "P",
    "pack": "o",
}
BOUND = "#000000"
NEUTRAL = ("#000000", "#E69F00", "#009E73", "#0072B2")
"""Colours of curves that are no policies."""
PALE = "#BBBBBB"

_STYLE: Any = {
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "axes.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 0.8,
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    # A constant salt gives equal pictures equal files.
    "svg.hashsalt": "mell",
}


def name(policy: str) -> str:
    """A policy's name without its options."""
    return policy.partition(":")[0]


def colour(policy: str) -> str:
    """A policy's colour, independent of its options."""
    return COLOURS[name(policy)]


@dataclass(frozen=True, slots=True)
class Pictures:
    """The folder of the figures; `link` is its path relative to the page."""

    folder: Path
    link: str

    def save(self, figure: Figure, file: str, sentence: str) -> str:
        """Write a figure; return the markdown that shows it, with `sentence` as its description."""
        self.folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(self.folder / f"{file}.svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
        return f"![{sentence}]({self.link}/{file}.svg)"


@contextmanager
def drawing(
    columns: int, rows: int = 1, width: float = 9.0, height: float = 3.2, ratios: Sequence[float] | None = None
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure with axes in a grid, row by row; `height` is in inches per row, `ratios` are of column widths."""
    matplotlib.use("Agg")
    with matplotlib.rc_context(_STYLE):
        size = (width, height * rows)
        figure, axes = plt.subplots(
            rows, columns, figsize=size, layout="constrained", squeeze=False, width_ratios=ratios
        )
        yield figure, list(axes.flat)


def legend(figure: Figure, axes: Axes, columns: int) -> None:
    """Draw one legend for all axes, above them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=columns)
