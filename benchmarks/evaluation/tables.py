"""Markdown tables."""

from collections.abc import Iterable, Sequence


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
