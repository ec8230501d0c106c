"""Text of the page: numbers and comparisons in sentences, lists, and Markdown tables."""

import textwrap
from collections.abc import Iterable, Sequence

from app.simulator.outcome.statistics import Interval

WIDTH = 120


def prose(*sentences: str) -> str:
    """A paragraph, wrapped."""
    words = " ".join(sentences).split()
    return textwrap.fill(" ".join(words), WIDTH, break_long_words=False, break_on_hyphens=False)


def bullets(items: Sequence[str]) -> str:
    """A list, wrapped."""
    return "\n".join(
        textwrap.fill(item, WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
        for item in items
    )


def share(value: float, digits: int = 1) -> str:
    """A share, in per cent."""
    return f"{_no_minus_zero(value * 100, digits):.{digits}f} %"


def change(value: float, digits: int = 1) -> str:
    """A relative difference, in per cent with its sign."""
    return f"{_no_minus_zero(value * 100, digits):+.{digits}f} %"


def span(values: Sequence[float], digits: int = 1) -> str:
    """The range of several relative values, in per cent."""
    low, high = (f"{_no_minus_zero(value * 100, digits):.{digits}f}" for value in (min(values), max(values)))
    return f"{low} to {high} %"


def spread(found: Interval, digits: int = 2, factor: float = 1.0) -> str:
    """A mean, with its 95 % confidence interval if there is one."""
    middle = f"{_no_minus_zero(found.mean * factor, digits):,.{digits}f}"
    return middle if found.ci95 is None else f"{middle} ± {found.ci95 * factor:.{digits}f}"


def listing(items: Sequence[str]) -> str:
    """`a, b and c`; `none` if there are no items."""
    if not items:
        return "none"
    *first, last = items
    return f"{', '.join(first)} and {last}" if first else last


def counted(number: int, of: int) -> str:
    """`3 of 8`, `all 8` or `none`."""
    return {0: "none", of: f"all {of}"}.get(number, f"{number} of {of}")


def seeds_in_words(number: int) -> str:
    """`one seed`, `2 seeds`."""
    return "one seed" if number == 1 else f"{number} seeds"


def _no_minus_zero(value: float, digits: int) -> float:
    return round(value, digits) + 0.0


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows under a header; the first column is left-aligned, the others right-aligned.

    Raises:
        ValueError: a row and the header have different numbers of cells.
    """
    rows = list(rows)
    if any(len(row) != len(header) for row in rows):
        raise ValueError(f"a row does not have {len(header)} cells, as the header has: {header}")
    ruler = ["---", *("---:" for _ in header[1:])]
    return "\n".join(_line(row) for row in (header, ruler, *rows))


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """`table` with all columns left-aligned, for cells with sentences."""
    lines = table(header, rows).split("\n")
    return "\n".join([lines[0], _line(["---"] * len(header)), *lines[2:]])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
