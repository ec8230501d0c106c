"""Robust fits of lines to measurements: by medians, so that single bad measurements do no harm."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

from policies.cost.steps import Knots
from simulator.costs.costs import LinkCosts

NEAR = 0.1
"""Sizes that differ by at most this share count as the same size."""
SMALL_BYTES = 64 * 1024
"""Transfers up to this size take hardly more than the latency."""


class Timing(NamedTuple):
    """A measured duration in seconds, for an amount of bytes or tokens."""

    amount: float
    seconds: float


def fit_link(timings: Sequence[Timing]) -> LinkCosts:
    """Fit the latency to the small transfers, and the bandwidth to those of at least half the largest size.

    Raises `ValueError` if all transfers are small, or if large ones take no longer than small ones.
    """
    most = max((t.amount for t in timings), default=0.0)
    if most <= SMALL_BYTES:
        raise ValueError(f"no transfer of more than {SMALL_BYTES} bytes was measured")
    large = [t for t in timings if t.amount >= most / 2]
    small = [t for t in timings if t.amount <= SMALL_BYTES]
    per_byte = median(t.seconds / t.amount for t in large)
    latency_s = max(0.0, median(t.seconds - t.amount * per_byte for t in small)) if small else 0.0
    per_byte = median((t.seconds - latency_s) / t.amount for t in large)
    if per_byte <= 0:
        raise ValueError("large transfers take no longer than small ones")
    return LinkCosts(bytes_per_s=brief(1 / per_byte), latency_s=brief(latency_s))


def fit_knots(timings: Sequence[Timing], at: Iterable[int]) -> Knots:
    """The median time near each of these sizes, made monotonic; sizes without a measurement are left out."""
    seconds = {size: [t.seconds for t in timings if abs(t.amount - size) <= NEAR * size] for size in at}
    return rising({size: median(values) for size, values in seconds.items() if values})


def rising(seconds: Mapping[int, float]) -> Knots:
    """The pairs in order of size, with seconds raised to those of the smaller sizes where they would fall."""
    knots: list[tuple[int, float]] = []
    for size in sorted(seconds):
        knots.append((size, max(seconds[size], knots[-1][1] if knots else 0.0)))
    return tuple(knots)


def slope(points: Iterable[tuple[float, float]]) -> float | None:
    """The median slope between any two points (the Theil-Sen estimator); None if no two points differ in x."""
    slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in combinations(points, 2) if x0 != x1]
    return median(slopes) if slopes else None


def brief(value: float) -> float:
    """The value with four significant digits, which is as exact as measurements are."""
    return float(f"{value:.4g}")
