"""A bar of parts: how full something is, and of what."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style

_FILLED, _FREE = ("█", "▓"), "░"
_ASCII_FILLED, _ASCII_FREE = ("#", "="), "."
_LEAST_CELLS = 6
_SHADES = ("cyan", "blue")


@dataclass(frozen=True, slots=True)
class Bar:
    """Parts of a whole, side by side in alternating shades, in as many cells as there are; what is left is free.

    Parts that together are more than the whole are cut at its end. `style` overrides the shades.
    """

    parts: Sequence[float]
    whole: float
    style: str | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it over the width that it is given."""
        marks, free = (_ASCII_FILLED, _ASCII_FREE) if options.ascii_only else (_FILLED, _FREE)
        widths = cells(self.parts, self.whole, options.max_width)
        for index, width in enumerate(widths):
            yield Segment(marks[index % 2] * width, Style.parse(self.style or _SHADES[index % 2]))
        yield Segment(free * (options.max_width - sum(widths)), Style.parse("bright_black"))
        yield Segment.line()

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """As wide as can be."""
        return Measurement(min(_LEAST_CELLS, options.max_width), options.max_width)


def cells(parts: Sequence[float], whole: float, width: int) -> list[int]:
    """How many of `width` cells each part takes; the sum is that of all parts, rounded once."""
    return list(_cells(parts, whole, width))


def _cells(parts: Sequence[float], whole: float, width: int) -> Iterator[int]:
    ends = [min(width, round(end / whole * width)) if whole > 0 else 0 for end in accumulate(parts, initial=0.0)]
    for start, end in pairwise(ends):
        yield end - start


def fullness(share: float) -> str:
    """The colour of a share of KV memory in use: above nine tenths little can grow any more."""
    return "red" if share > 0.9 else "yellow" if share > 0.7 else "green"
