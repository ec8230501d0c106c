"""Durations as lines over sizes, fitted to observations so that outliers do no harm (the Theil-Sen estimator).

The slope is the weighted median of the slopes between any two observations, the intercept the weighted median of the
residuals: outliers shift neither until they outweigh the rest. An observation's weight fades with every newer one, so
that the line follows a change, and with age, so that old evidence counts less and less. A slope also weighs as much as
the sizes that it is taken between: between small sizes it is mostly noise. The prior counts like an observation of a
small constant weight at size zero, and once more for its slope. So a line without evidence is the prior, and a link or
replica that seemed too slow is tried again once its evidence has faded.
"""

from collections.abc import Iterable
from dataclasses import dataclass

WINDOW = 16
"""The number of observations kept. Older ones would weigh next to nothing."""
FADE = 0.85
"""The factor on an observation's weight for every newer one: about the last six count."""
PRIOR = 0.1
"""The weight of a prior. A fresh observation has weight 1."""
FASTEST = 1e-3
"""The least slope, as a share of the prior's, where no measured rate bounds it."""


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds as a line over a size in bytes or tokens; `per_unit_s` is positive."""

    latency_s: float
    per_unit_s: float

    @classmethod
    def of(cls, rate: float, latency_s: float = 0.0) -> "Line":
        """The line of a rate in units per second."""
        return cls(latency_s, 1 / rate)

    @classmethod
    def through(cls, small: float, small_s: float, large: float, large_s: float) -> "Line":
        """The line through the times of two sizes; if the larger was not slower, that through it and the origin."""
        if large > small and large_s > small_s:
            per_unit_s = (large_s - small_s) / (large - small)
            return cls(max(0.0, small_s - small * per_unit_s), per_unit_s)
        return cls(0.0, max(large_s, 1e-9) / large)

    @property
    def rate(self) -> float:
        """Units per second, latency left out."""
        return 1 / self.per_unit_s

    def seconds(self, size: float) -> float:
        """Seconds for that size."""
        return self.latency_s + size * self.per_unit_s

    def no_faster(self, rate: float) -> "Line":
        """This line, with at most `rate` units per second; infinity is no bound."""
        return Line(self.latency_s, max(self.per_unit_s, 1 / rate))


@dataclass(frozen=True, slots=True)
class Observed:
    """A size and its duration in seconds, observed `at` a time in seconds of any clock; `weight` is 1 at most."""

    at: float
    size: float
    seconds: float
    weight: float = 1.0


class Evidence:
    """Observations of one link, or of hand-overs. Their weight halves in `half_life_s` seconds."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._seen: list[Observed] = []
        self._fitted: tuple[Line, float, float, Line] | None = None

    def add(self, observed: Observed) -> None:
        """Add an observation. Observations may come in any order."""
        self._seen = sorted([observed, *self._seen], key=lambda each: -each.at)[:WINDOW]
        self._fitted = None

    def __len__(self) -> int:
        return len(self._seen)

    def outweighs_prior(self, now: float) -> bool:
        """True if the observations weigh more than the prior of a line."""
        return sum(self._weight(rank, observed, now) for rank, observed in enumerate(self._seen)) > PRIOR

    def line(self, prior: Line, now: float, fastest: float = float("inf")) -> Line:
        """The best fit at `now`, given the observations and the prior line, with a rate of at most `fastest`."""
        prior = prior.no_faster(fastest)
        if self._fitted is None or self._fitted[:3] != (prior, now, fastest):
            self._fitted = (prior, now, fastest, self._fit(prior, now, fastest))
        return self._fitted[3]

    def _fit(self, prior: Line, now: float, fastest: float) -> Line:
        points = [(observed, self._weight(rank, observed, now)) for rank, observed in enumerate(self._seen)]
        largest = max((observed.size for observed in self._seen), default=0)
        slopes = [(prior.per_unit_s, PRIOR * PRIOR)]
        for rank, (one, weight) in enumerate(points):
            if one.size > 0:
                slopes.append(((one.seconds - prior.latency_s) / one.size, PRIOR * weight * one.size / largest))
            for other, others in points[:rank]:
                if apart := abs(one.size - other.size):
                    slope = (one.seconds - other.seconds) / (one.size - other.size)
                    slopes.append((slope, weight * others * apart / largest))
        per_unit_s = max(weighted_median(slopes), 1 / fastest, FASTEST * prior.per_unit_s)
        heights = [(observed.seconds - per_unit_s * observed.size, weight) for observed, weight in points]
        return Line(max(0.0, weighted_median([(prior.latency_s, PRIOR), *heights])), per_unit_s)

    def _weight(self, rank: int, observed: Observed, now: float) -> float:
        age_s = max(0.0, now - observed.at)
        return float(observed.weight * FADE**rank * 0.5 ** (age_s / self._half_life_s))


def weighted_median(weighted: Iterable[tuple[float, float]]) -> float:
    """The lowest value at which half of the weight is reached. Takes (value, weight) pairs, at least one."""
    ordered = sorted(weighted)
    half, reached = sum(weight for _, weight in ordered) / 2, 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= half:
            return value
    return ordered[-1][0]
