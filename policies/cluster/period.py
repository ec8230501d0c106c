"""The period after which a pool's demand repeats, and the differences of demand from its repetitions.

A period counts if it explains more than the present demand does: a line over the differences from one period before
misses the later demand by clearly less than a line over the demand itself, and by less in each half of the time. Steady
demand has no period, since a difference has the noise of both its ends, nor have two bursts, which have one distance.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

REPEATS = 3
"""A period is found when it has passed so often, and as many repetitions count at most."""
CLEARLY = 0.75
"""The largest error of a period as a multiple of the error without one."""
LASTING = 0.1
"""The least share of the squared error without a period that it takes away in each half of the time."""
YOUNG = 0.25
"""The share of the steps to compare of which a shorter past has no period: in a few minutes, chance repeats itself."""
EQUAL = 1.4
"""Periods whose squared errors differ by less are multiples of each other: the shortest counts."""
COARSE = 4
"""Steps of the coarse search, before the fine one."""


@dataclass(frozen=True, slots=True)
class DemandLine:
    """A line with a slope from 0 to 1."""

    slope: float
    offset: float

    def at(self, x: Any) -> Any:
        """The line's values at `x`, an array or a number."""
        return self.offset + self.slope * x


def line_over(x: Any, y: Any) -> DemandLine:
    """The line over arrays of the same length with the least squared error."""
    (slope,), (offset,) = _lines(x[None], y[None])
    return DemandLine(float(slope), float(offset))


def _lines(x: Any, y: Any) -> tuple[Any, Any]:
    """The slope and the offset of a line for every row."""
    x_mean, y_mean = x.mean(axis=1), y.mean(axis=1)
    away = x - x_mean[:, None]
    across, along = (away * away).sum(axis=1), (away * (y - y_mean[:, None])).sum(axis=1)
    slope = np.clip(np.divide(along, across, out=np.ones_like(across), where=across > 0), 0.0, 1.0)
    return slope, y_mean - slope * x_mean


@dataclass(frozen=True, slots=True)
class Repetitions:
    """Demand beside its repetitions, in tokens.

    For every one of the newest steps, `mean` has the mean of up to `REPEATS` repetitions, and `differences` what
    demand had beyond it; `next` is the mean for the present step. All repetitions are 0 without a period.
    """

    mean: Any
    differences: Any
    next: float

    @classmethod
    def of(cls, demand: Any, period: int, ahead: int, most: int) -> Self:
        """From one value per step, the newest last; the present step comes `ahead` steps behind it.

        `period` is in steps and longer than `ahead`; 0 without one. With one, at most `most` steps are compared.
        """
        if not period:
            return cls(np.zeros(len(demand)), demand, 0.0)
        count = min(most, len(demand) - period)
        lags = [times * period for times in range(1, REPEATS + 1) if count + times * period <= len(demand)]
        start, end = len(demand) - count, len(demand)
        mean = np.mean([demand[start - lag : end - lag] for lag in lags], axis=0)
        return cls(mean, demand[start:] - mean, float(np.mean([demand[end - 1 + ahead - lag] for lag in lags])))


def find_period(was: Any, later: Any, least: int, most: int) -> int:
    """The period in steps, or 0: from `least` to a third of the demand's length. At most `most` steps are compared.

    `was` and `later` have the demand of every step, and the later demand that was to be forecast then.
    """
    longest = len(was) // REPEATS
    coarse = np.arange(-(-least // COARSE), longest // COARSE + 1)
    if not len(coarse) or len(was) < YOUNG * most:
        return 0
    count = min(most, len(was) - longest)
    rough = _squares(_means(was), _means(later), coarse, count // COARSE).mean(axis=1)
    about = COARSE * int(coarse[np.argmin(rough)])
    around = [np.arange(about // times - COARSE, about // times + COARSE + 1) for times in range(1, about // least + 1)]
    lags = np.unique(np.concatenate(around))
    lags = lags[(lags >= least) & (lags <= longest)]
    squares = _squares(was, later, lags, count)
    errors = squares.mean(axis=1)
    first = int(np.argmax(errors <= EQUAL * errors.min()))
    best = first + int(np.argmin(errors[first : first + 1 + COARSE]))
    without = _squares(was, later, np.zeros(1, int), count)[0]
    gained = min(half.sum() for half in np.array_split(without - squares[best], 2))
    lasts = gained > LASTING * without.sum()
    return int(lags[best]) if lasts and errors[best] < CLEARLY**2 * without.mean() else 0


def _means(values: Any) -> Any:
    """The means of `COARSE` values each, the newest last."""
    return values[len(values) % COARSE :].reshape(-1, COARSE).mean(axis=1)


def _squares(was: Any, later: Any, lags: Any, count: int) -> Any:
    """The squared errors of the line over the differences: one row for every lag, of the newest `count` steps.

    A lag of 0 is the line over the demand itself.
    """
    starts = len(was) - count - lags
    x, y = (
        values[None, -count:] - (lags > 0)[:, None] * sliding_window_view(values, count)[starts]
        for values in (was, later)
    )
    slope, offset = _lines(x, y)
    return (y - offset[:, None] - slope[:, None] * x) ** 2
