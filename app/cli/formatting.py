"""Formatting shared by the commands: numbers and times as short text, and bars; pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style

_FILLED, _FREE = ("█", "▓"), "░"
_ASCII_FILLED, _ASCII_FREE = ("#", "="), "."
_MIN_CELLS = 6
_SHADES = ("cyan", "blue")


@dataclass(frozen=True, slots=True)
class Bar:
    """Parts of a whole, side by side in alternating shades over the full width; the rest is drawn as free.

    Parts whose sum exceeds the whole are cut at its end. `style` overrides the shades.
    """

    parts: Sequence[float]
    whole: float
    style: str | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the bar over the given width."""
        marks, free = (_ASCII_FILLED, _ASCII_FREE) if options.ascii_only else (_FILLED, _FREE)
        widths = cells(self.parts, self.whole, options.max_width)
        for index, width in enumerate(widths):
            yield Segment(marks[index % 2] * width, Style.parse(self.style or _SHADES[index % 2]))
        yield Segment(free * (options.max_width - sum(widths)), Style.parse("bright_black"))
        yield Segment.line()

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """The bar takes the maximum width."""
        return Measurement(min(_MIN_CELLS, options.max_width), options.max_width)


def cells(parts: Sequence[float], whole: float, width: int) -> list[int]:
    """The number of cells of each part, out of `width`; their sum is the rounded sum of all parts."""
    return list(_cells(parts, whole, width))


def _cells(parts: Sequence[float], whole: float, width: int) -> Iterator[int]:
    ends = [min(width, round(end / whole * width)) if whole > 0 else 0 for end in accumulate(parts, initial=0.0)]
    for start, end in pairwise(ends):
        yield end - start


def usage_colour(share: float) -> str:
    """The colour of a share of KV cache in use; above nine tenths there is little room for growth."""
    return "red" if share > 0.9 else "yellow" if share > 0.7 else "green"


def count(number: float) -> str:
    """A number of tokens or bytes in about three digits: 950, 20.1k, 1.2M."""
    for limit, unit in ((1_000, ""), (1_000_000, "k"), (1_000_000_000, "M")):
        # A value that rounds up to 1000 of a unit is given in the next unit.
        if number < limit * 0.9995:
            value = number * 1_000 / limit
            return f"{value:.0f}" if unit == "" else f"{value:.1f}{unit}" if value < 99.95 else f"{value:.0f}{unit}"
    return f"{number / 1_000_000_000:.1f}G"


def duration(seconds: float | None) -> str:
    """A time in about three digits: 6.6 ms, 1.25 s, 12 min; a dash for None."""
    if seconds is None:
        return "-"
    if seconds < 0.09995:
        return f"{seconds * 1_000:.1f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1_000:.0f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{seconds / 3600:.0f} h"


def age(seconds: float) -> str:
    """An age in whole seconds; differing clocks do not make it negative."""
    return f"{max(0.0, seconds):.0f} s" if seconds < 99.5 else duration(seconds)


def plural(number: int, noun: str) -> str:
    """`1 replica`, `2 replicas`."""
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def shown_mode(mode: str, configured: str | None) -> str:
    """The scheduler's mode, with the configured one if it is known to be another."""
    return mode if configured in (None, mode) else f"{mode} (by order; scheduler.mode is {configured})"
