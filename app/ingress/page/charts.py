"""The points of the charts at `/mell/`: GPUs in use and needed, KV use, and client latencies.

`bound` and `worst_fit` concern the KV caches at one moment: the minimum number of replicas that could hold them, and
the number that worst fit fills, oldest request first, each on the emptiest replica. Worst fit in service usually needs
more, since it also has to live with fragmentation by earlier requests and with growth. Where requests share
blocks, only the scheduler knows which, and gives the bound with the state.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappush, heapreplace
from math import ceil
from typing import Any

from prometheus_client.registry import Collector

from policies.bounds import martello_toth_l2
from policies.model import Phase, ReplicaState

SPAN_S = 15.0
"""Window of the quantiles, in seconds."""

Point = list[float | int | None]
"""[unix time, GPUs in use, bound, worst fit, KV tokens in use / capacity, TTFT p50, p99, ITL p50, p99, pause p50, p99].

Times are in seconds; None without measurements.
"""
WORST_FIT = 3
"""The index of worst fit in a point."""

Pair = tuple[float | None, float | None]


def point(
    state: Mapping[str, Any], migrations: Iterable[Mapping[str, Any]], now: float, ttft: Pair, itl: Pair
) -> Point:
    """A point from `/mell/state` and the records of `/mell/migrations`. `now` is in seconds since 1970."""
    replicas = [r for r in state["replicas"] if r["state"] not in (ReplicaState.STOPPED, ReplicaState.ASLEEP)]
    total = sum(r["capacity_tokens"] for r in replicas)
    used = sum(r["used_tokens"] for r in replicas)
    models = {r.get("model") for r in replicas}
    # No replica takes requests of another model.
    fits = [_fits([r for r in replicas if r.get("model") == model]) for model in models]
    bound: int | None = state.get("least_replicas")
    pauses = [
        r["pause_s"]
        for r in migrations
        if r["pause_s"] is not None and now - r["started_at"] - (r["duration_s"] or 0) <= SPAN_S
    ]
    return [
        round(now, 2),
        len(replicas),
        sum(least for least, _ in fits) if bound is None else bound,
        sum(filled for _, filled in fits),
        round(used / total, 4) if total else None,
        *(_short(value) for value in (*ttft, *itl, _at(pauses, 0.5), _at(pauses, 0.99))),
    ]


def _fits(replicas: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """The fewest replicas that could hold the requests of one model, and the number that worst fit fills."""
    capacity = max((r["capacity_tokens"] for r in replicas), default=0)
    sizes = _sizes(replicas, capacity)
    return martello_toth_l2(sizes, capacity) if sizes else 0, worst_fit(sizes, capacity)


def _sizes(replicas: Iterable[Mapping[str, Any]], capacity: int) -> list[int]:
    """Tokens of all requests that hold KV blocks, oldest first."""
    held = [r for replica in replicas for r in replica["requests"] if r["phase"] != Phase.WAITING and r["tokens"] > 0]
    held.sort(key=lambda r: (-r["age_s"], r["id"]))
    return [min(r["tokens"], capacity) for r in held if capacity]


def worst_fit(sizes: Iterable[int], capacity: int) -> int:
    """The number of bins filled by worst fit: each size, in order, goes to the emptiest bin or opens a new one.

    O(n log n). Sizes are in 1..capacity.
    """
    negated_rooms: list[int] = []
    for size in sizes:
        if negated_rooms and size <= -negated_rooms[0]:
            heapreplace(negated_rooms, negated_rooms[0] + size)
        else:
            heappush(negated_rooms, size - capacity)
    return len(negated_rooms)


class WindowedQuantiles:
    """Quantiles of all of a histogram's observations in the last `SPAN_S` seconds, from differences of its counts."""

    def __init__(self, histogram: Collector) -> None:
        self._histogram = histogram
        self._read: deque[tuple[float, list[float]]] = deque()
        self._bounds: list[float] = []

    def quantiles(self, now: float) -> Pair:
        """The median and the 99th percentile, in the histogram's unit; None without observations.

        `now` is in seconds of any monotonic clock. Quantiles are linear within a bucket, as in Prometheus's
        `histogram_quantile`; observations above the last bound count as that bound.
        """
        counts: dict[float, float] = {}
        for sample in (sample for metric in self._histogram.collect() for sample in metric.samples):
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0.0) + sample.value
        self._bounds = list(counts)
        self._read.append((now, list(counts.values())))
        while len(self._read) > 1 and self._read[0][0] < now - SPAN_S:
            self._read.popleft()
        first, last = self._read[0][1], self._read[-1][1]
        observed = [after - before for before, after in zip(first, last, strict=True)]
        return self._quantile(observed, 0.5), self._quantile(observed, 0.99)

    def _quantile(self, cumulative: Sequence[float], share: float) -> float | None:
        if not cumulative[-1]:
            return None
        rank = share * cumulative[-1]
        index = bisect_left(cumulative, rank)
        if index == len(cumulative) - 1:
            return self._bounds[index - 1]
        below, low = (cumulative[index - 1], self._bounds[index - 1]) if index else (0.0, 0.0)
        return low + (self._bounds[index] - low) * (rank - below) / (cumulative[index] - below)


def _at(values: Sequence[float], share: float) -> float | None:
    """The `share` quantile by nearest rank, None without values."""
    if not values:
        return None
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 5)
