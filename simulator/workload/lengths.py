"""The lengths of requests, drawn from a table of quantiles or from the rows of a trace.

A table of quantiles is a CSV file with the columns `percentile,tail_prompt_tokens,tail_output_tokens`. Prompts and
outputs are drawn independently of each other, by inverse CDF: linear between the quantiles, from one token at 0 % to
the first quantile, and from the last quantile to 100 % with the slope of the last two. So the longest requests are an
extrapolation; that does not matter if they are cut to a replica's capacity, as in the paper's workload.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Protocol

from simulator.errors import BadInput
from simulator.traces.records import FileRecords, read_records
from simulator.traces.text import opened_text
from simulator.traces.trace import read_trace_file

QUANTILES = ("percentile", "tail_prompt_tokens", "tail_output_tokens")

SHIPPED = "quantiles"
"""The name of the shipped table.

The table is invented: two log-normal distributions, with medians of 32 and 200 tokens and sigmas of 1.5 and 1.2,
rounded. That is the coarse shape of chat conversations, good for a first look; measurements need a measured table.
"""
SHIPPED_PATH = Path(__file__).parents[1] / "data" / "quantiles.csv"


class Lengths(Protocol):
    """A distribution of request lengths."""

    def draw(self, chance: Random) -> tuple[float, float]:
        """Tokens of a prompt and of its output."""
        ...


@dataclass(frozen=True, slots=True)
class Curve:
    """An inverse CDF: `values[i]` is the quantile at `shares[i]`."""

    shares: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, share: float) -> float:
        """The quantile at `share`, between 0 and 1."""
        above = max(1, bisect_left(self.shares, share))
        low, high = self.shares[above - 1], self.shares[above]
        weight = (share - low) / (high - low)
        return self.values[above - 1] * (1 - weight) + self.values[above] * weight


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Lengths of prompts and of outputs, each from its own curve."""

    prompt: Curve
    output: Curve

    def draw(self, chance: Random) -> tuple[float, float]:
        """Tokens of a prompt and of its output, independent of each other."""
        return self.prompt.at(chance.random()), self.output.at(chance.random())


@dataclass(frozen=True, slots=True)
class Resampled:
    """The lengths of recorded requests; a prompt keeps its output."""

    pairs: tuple[tuple[float, float], ...]

    def draw(self, chance: Random) -> tuple[float, float]:
        """Tokens of a prompt and of its output, each recorded request as likely as any other."""
        return chance.choice(self.pairs)


def read_lengths(name: str) -> Lengths:
    """The distribution in a file, or the shipped one by its name. Raises `BadInput` for a file of neither kind.

    A trace needs no times.
    """
    path = SHIPPED_PATH if name == SHIPPED else Path(name)
    with opened_text(path) as text:
        records = read_records(path, text)
        if QUANTILES[0] in records.columns:
            return _quantiles(records)
    trace = read_trace_file(path, with_names=False, needs_times=False)
    return Resampled(tuple(zip(trace.prompts, trace.outputs, strict=True)))


def _quantiles(table: FileRecords) -> Quantiles:
    if missing := [name for name in QUANTILES if name not in table.columns]:
        raise BadInput(f"{table.path} lacks the column(s) {', '.join(missing)}. {table.found}")
    rows = [_numbers(table, line, cells) for line, cells in table.selected(QUANTILES)]
    if not rows:
        raise BadInput(f"{table.path} has no rows.")
    shares = [row[0] / 100 for row in rows]
    if any(after <= before for before, after in pairwise([0.0, *shares])) or shares[-1] > 1:
        raise BadInput(f"{table.path}: percentiles must rise from above 0 to 100 at most.")
    prompt, output = (_curve(table.path, shares, [row[column] for row in rows]) for column in (1, 2))
    return Quantiles(prompt, output)


def _numbers(table: FileRecords, line: int, cells: Sequence[Any]) -> list[float]:
    try:
        values = [float(cell) for cell in cells]
    except (ValueError, TypeError):
        values = []
    if not values or not all(0 <= value < math.inf for value in values):
        raise table.error(line, f"{', '.join(QUANTILES)} are not all numbers that are 0 or more")
    return values


def _curve(path: Path, shares: list[float], values: list[float]) -> Curve:
    shares, values = [0.0, *shares], [min(1.0, values[0]), *values]
    if values != sorted(values):
        raise BadInput(f"{path}: quantiles must not fall.")
    if shares[-1] < 1:
        slope = (values[-1] - values[-2]) / (shares[-1] - shares[-2])
        values.append(values[-1] + slope * (1 - shares[-1]))
        shares.append(1.0)
    return Curve(tuple(shares), tuple(values))
