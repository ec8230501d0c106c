"""Numbers and comparisons as text, and Markdown tables."""

from collections.abc import Iterable, Sequence

from simulator.outcome.statistics import Interval


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
