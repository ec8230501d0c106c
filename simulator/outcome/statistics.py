"""Means, quantiles and confidence intervals for the report of a simulation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

STUDENT_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t for a two-sided 95 % interval, with 1, 2, ... 30 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the half-width of its 95 % confidence interval, None for a single value."""

    mean: float
    ci95: float | None


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean. Raises `ValueError` if there are no values."""
    if not values:
        raise ValueError("no values have no mean")
    return math.fsum(values) / len(values)


def weighted_mean(weighted: Sequence[tuple[float, float]]) -> float | None:
    """The mean of (value, weight) pairs; None if the total weight is zero."""
    total = math.fsum(weight for _, weight in weighted)
    return math.fsum(value * weight for value, weight in weighted) / total if total else None


def quantile(ordered: Sequence[float], share: float) -> float:
    """The quantile of ordered values at `share` (0 to 1), by linear interpolation."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def interval(values: Sequence[float]) -> Interval:
    """The mean of independent values with its 95 % confidence interval (Student's t)."""
    middle = mean(values)
    freedom = len(values) - 1
    if freedom == 0:
        return Interval(middle, None)
    variance = math.fsum((value - middle) ** 2 for value in values) / freedom
    return Interval(middle, student_95(freedom) * math.sqrt(variance / len(values)))


def student_95(freedom: int) -> float:
    """Student's t for a two-sided 95 % interval; beyond the table by its expansion around the normal quantile."""
    if freedom <= len(STUDENT_95):
        return STUDENT_95[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
