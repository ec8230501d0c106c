"""What takes so many seconds per byte or token, learned from what it took: a line, fitted so that outliers do no harm.

Its slope is the weighted median of the slopes between any two observations, its height that of what is left (Theil and
Sen): to move it, outliers must outweigh what is in keeping with the rest. Weights fade with every newer observation, so
that a change is followed, and with age: what nobody has tried for long is believed less and less. The rest of the
belief is a prior. It counts like an observation of a fixed small weight at size zero, and one more for its slope.
So a line without evidence is the prior's, and what seemed too slow to be used is tried again some day.
"""

from collections.abc import Iterable
from dataclasses import dataclass

WINDOW = 16
"""Observations that are kept; older ones would weigh next to nothing."""
FADE = 0.85
"""Weight of an observation for every newer one: about the last six count."""
PRIOR = 0.1
"""Weight of a prior, where a fresh observation has one."""
FASTEST = 1e-3
"""A slope is at least this share of its prior's: what small sizes say can be all noise."""


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds as a line over a size in bytes or tokens; `per_unit_s` is positive."""

    latency_s: float
    per_unit_s: float

    @classmethod
    def of(cls, rate: float, latency_s: float = 0.0) -> "Line":
        """The line of so many units per second."""
        return cls(latency_s, 1 / rate)

    @property
    def rate(self) -> float:
        """Units per second, latency left out."""
        return 1 / self.per_unit_s

    def seconds(self, size: float) -> float:
        """What that size takes."""
        return self.latency_s + size * self.per_unit_s

    def no_faster(self, rate: float) -> "Line":
        """This line, with at most so many units per second."""
        return Line(self.latency_s, max(self.per_unit_s, 1 / rate))


@dataclass(frozen=True, slots=True)
class Observed:
    """A size and what it took, at a time in seconds of any clock."""

    at: float
    size: float
    seconds: float


class Evidence:
    """What was observed of one link, or of one replica's prefill. Its weight halves in `half_life_s` seconds."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._seen: list[Observed] = []
        self._fitted: tuple[Line, float, Line] | None = None

    def add(self, observed: Observed) -> None:
        """Take in what was observed, in any order."""
        self._seen = sorted([observed, *self._seen], key=lambda each: -each.at)[:WINDOW]
        self._fitted = None

    def __len__(self) -> int:
        return len(self._seen)

    def line(self, prior: Line, now: float) -> Line:
        """The line that fits best at `now`, where nothing else was known than `prior`."""
        if self._fitted is None or self._fitted[:2] != (prior, now):
            self._fitted = (prior, now, self._fit(prior, now))
        return self._fitted[2]

    def _fit(self, prior: Line, now: float) -> Line:
        points = [(observed, self._weight(rank, observed, now)) for rank, observed in enumerate(self._seen)]
        slopes = [(prior.per_unit_s, PRIOR * PRIOR)]
        for rank, (one, weight) in enumerate(points):
            if one.size > 0:
                slopes.append(((one.seconds - prior.latency_s) / one.size, PRIOR * weight))
            for other, others in points[:rank]:
                if apart := abs(one.size - other.size):
                    slope = (one.seconds - other.seconds) / (one.size - other.size)
                    slopes.append((slope, weight * others * apart / max(one.size, other.size)))
        per_unit_s = max(weighted_median(slopes), FASTEST * prior.per_unit_s)
        heights = [(observed.seconds - per_unit_s * observed.size, weight) for observed, weight in points]
        return Line(max(0.0, weighted_median([(prior.latency_s, PRIOR), *heights])), per_unit_s)

    def _weight(self, rank: int, observed: Observed, now: float) -> float:
        age_s = max(0.0, now - observed.at)
        return float(FADE**rank * 0.5 ** (age_s / self._half_life_s))


def weighted_median(weighted: Iterable[tuple[float, float]]) -> float:
    """The first value, from below, with which half of the weight is reached; (value, weight) pairs, at least one."""
    ordered = sorted(weighted)
    half, reached = sum(weight for _, weight in ordered) / 2, 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= half:
            return value
    return ordered[-1][0]
