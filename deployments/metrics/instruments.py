"""Metrics that are told twice: to `/metrics`, as they are, and to Ray, whose dashboard and agents show them.

Ray's agents are told every ten seconds, and take every observation of a histogram for the middle of its bucket; so
exact values are read from the registry. Telling Ray costs about 5 us: nothing for what happens once per migration, too
much for what happens once per token.
"""

from collections.abc import Sequence

import prometheus_client
from prometheus_client import CollectorRegistry
from ray.serve import metrics


class Counter:
    """Counts up. Both formats append `_total` to `name`."""

    def __init__(self, name: str, told: str, registry: CollectorRegistry, labels: Sequence[str] = ()) -> None:
        self._labels = tuple(labels)
        self._own = prometheus_client.Counter(name, told, self._labels, registry=registry)
        self._rays = metrics.Counter(name, told, self._labels)

    def inc(self, value: float = 1.0, *labels: str) -> None:
        """Add `value`."""
        (self._own.labels(*labels) if labels else self._own).inc(value)
        if value:
            self._rays.inc(value, dict(zip(self._labels, labels, strict=True)))


class Gauge:
    """Says how many there are."""

    def __init__(self, name: str, told: str, registry: CollectorRegistry, labels: Sequence[str] = ()) -> None:
        self._labels = tuple(labels)
        self._own = prometheus_client.Gauge(name, told, self._labels, registry=registry)
        self._rays = metrics.Gauge(name, told, self._labels)

    def set(self, value: float, *labels: str) -> None:
        """There are so many now."""
        (self._own.labels(*labels) if labels else self._own).set(value)
        self._rays.set(value, dict(zip(self._labels, labels, strict=True)))


class Histogram:
    """Sorts observations by size; `buckets` are upper bounds, above 0."""

    def __init__(
        self,
        name: str,
        told: str,
        registry: CollectorRegistry,
        buckets: Sequence[float],
        labels: Sequence[str] = (),
    ) -> None:
        self._labels = tuple(labels)
        self._own = prometheus_client.Histogram(name, told, self._labels, buckets=buckets, registry=registry)
        self._rays = metrics.Histogram(name, told, list(buckets), self._labels)

    def observe(self, value: float, *labels: str) -> None:
        """One more."""
        (self._own.labels(*labels) if labels else self._own).observe(value)
        self._rays.observe(value, dict(zip(self._labels, labels, strict=True)))
