"""Distributions of latencies in fixed buckets, so that those of several processes, and of several times, add up.

Bucket i counts the latencies in (GROWTH ** (i - 1), GROWTH ** i] seconds, as Prometheus' native histograms of schema 4
do. A quantile is the geometric middle of its bucket: it differs from the exact one by the relative `ERROR` at most.

Every ingress counts from its start on, and sends all of its counts; `ReachedTimes` adds up their differences. So a lost
message is made up for by the next one, and a repeated one changes nothing.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, log2

from policies.cost.service import TAIL

SCHEMA = 4
GROWTH = 2.0 ** (2.0**-SCHEMA)
ERROR = GROWTH**0.5 - 1
"""The largest relative error of a quantile: 2.2 %."""
SHORTEST_S = 1e-6
"""The latency, in seconds, as which shorter ones count."""

WINDOW_S = 300.0
"""The time for which latencies count in a window, in seconds."""
SLOT_S = 10.0
"""The resolution of a window, in seconds."""

_PER_OCTAVE = 2.0**SCHEMA
_NEARLY_NONE = 1e-6
"""The count up to which a bucket is empty."""

Counts = Mapping[int, float]
"""Numbers of latencies by bucket."""


class Latencies:
    """The counts of one kind of latency."""

    __slots__ = ("counts",)

    def __init__(self, counts: Counts | None = None) -> None:
        self.counts: dict[int, float] = dict(counts or {})

    def add(self, seconds: float, count: float = 1) -> None:
        """Add a latency, `count` times."""
        bucket = ceil(log2(max(seconds, SHORTEST_S)) * _PER_OCTAVE)
        self.counts[bucket] = self.counts.get(bucket, 0) + count

    def merge(self, counts: Counts) -> None:
        """Add counts."""
        for bucket, count in counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count

    def subtract(self, counts: Counts) -> None:
        """Take away counts that were added before. Predicted counts are fractions, so sums have rounding errors."""
        for bucket, count in counts.items():
            left = self.counts.get(bucket, 0) - count
            if left > _NEARLY_NONE:
                self.counts[bucket] = left
            else:
                self.counts.pop(bucket, None)

    @property
    def total(self) -> float:
        """The number of latencies."""
        return sum(self.counts.values())

    def quantile(self, share: float) -> float | None:
        """The latency, in seconds, that the given share does not exceed; None without latencies."""
        rank, reached = share * self.total, 0.0
        for bucket in sorted(self.counts):
            reached += self.counts[bucket]
            if reached >= rank:
                return float(GROWTH ** (bucket - 0.5))
        return None

    def share_within(self, seconds: float) -> float | None:
        """The share of latencies of at most that time, linear within a bucket; None without latencies."""
        if not self.counts:
            return None
        position = log2(max(seconds, SHORTEST_S)) * _PER_OCTAVE
        found = sum(count * min(1.0, max(0.0, position - bucket + 1)) for bucket, count in self.counts.items())
        return found / self.total


class LatencyWindow:
    """The latencies of the last WINDOW_S seconds. Times are in seconds of any monotonic clock."""

    def __init__(self) -> None:
        self._slots: deque[tuple[float, Latencies]] = deque()
        self._sum = Latencies()

    def add(self, seconds: float, now: float, count: float = 1) -> None:
        """Add a latency, `count` times."""
        self._slot(now).add(seconds, count)
        self._sum.add(seconds, count)

    def merge(self, counts: Counts, now: float) -> None:
        """Add counts of the time before `now`."""
        self._slot(now).merge(counts)
        self._sum.merge(counts)

    def latencies(self, now: float) -> Latencies:
        """The latencies in the window at `now`."""
        while self._slots and self._slots[0][0] + SLOT_S <= now - WINDOW_S:
            self._sum.subtract(self._slots.popleft()[1].counts)
        return self._sum

    def _slot(self, now: float) -> Latencies:
        if not self._slots or self._slots[-1][0] + SLOT_S <= now:
            self.latencies(now)
            self._slots.append((now, Latencies()))
        return self._slots[-1][1]


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """The times that a service level bounds: from arrivals to first tokens, and the gaps between two tokens."""

    ttft: Latencies = field(default_factory=Latencies)
    itl: Latencies = field(default_factory=Latencies)

    @property
    def counts(self) -> "ServiceCounts":
        """The counts as a value."""
        return ServiceCounts(dict(self.ttft.counts), dict(self.itl.counts))


@dataclass(frozen=True, slots=True)
class ServiceCounts:
    """The counts of `ServiceTimes`, on their way from an ingress."""

    ttft: Counts
    itl: Counts


@dataclass(frozen=True, slots=True)
class ServiceWindow:
    """The times in a window."""

    ttft: LatencyWindow = field(default_factory=LatencyWindow)
    itl: LatencyWindow = field(default_factory=LatencyWindow)

    def quantiles(self, now: float) -> "ServiceQuantiles":
        """The times that all but the share TAIL of the requests' tokens keep."""
        ttft, itl = self.ttft.latencies(now), self.itl.latencies(now)
        return ServiceQuantiles(ttft.quantile(1 - TAIL), itl.quantile(1 - TAIL), round(ttft.total), round(itl.total))


@dataclass(frozen=True, slots=True)
class ServiceQuantiles:
    """The 99th percentiles of both times, in seconds, None without any; and the numbers of first tokens and gaps."""

    ttft_p99_s: float | None = None
    itl_p99_s: float | None = None
    first_tokens: int = 0
    gaps: int = 0


NO_TIMES = ServiceQuantiles()

ClassCounts = Mapping[str, ServiceCounts]
"""The counts of all service classes by name."""


class ReachedTimes:
    """The times that the clients of all ingresses got, by service class, in a window."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, ClassCounts]] = {}
        self._windows: dict[str, ServiceWindow] = {}

    def take(self, ingress: str, counts: ClassCounts, now: float) -> None:
        """Add the difference between an ingress's counts and its last ones.

        The first counts of an ingress, and those after a silence of more than WINDOW_S seconds, are of unknown times:
        they are only the beginning of the next difference.
        """
        self._last = {name: last for name, last in self._last.items() if last[0] > now - WINDOW_S}
        last = self._last.get(ingress)
        self._last[ingress] = now, counts
        if last is None:
            return
        for name, newest in counts.items():
            before = last[1].get(name, _NONE)
            window = self._windows.setdefault(name, ServiceWindow())
            window.ttft.merge(_difference(before.ttft, newest.ttft), now)
            window.itl.merge(_difference(before.itl, newest.itl), now)

    def quantiles(self, now: float) -> Mapping[str, ServiceQuantiles]:
        """The 99th percentiles of every service class that has had requests."""
        return {name: window.quantiles(now) for name, window in self._windows.items()}


_NONE = ServiceCounts({}, {})


def _difference(before: Counts, after: Counts) -> Counts:
    return {bucket: count - before.get(bucket, 0) for bucket, count in after.items() if count != before.get(bucket, 0)}
