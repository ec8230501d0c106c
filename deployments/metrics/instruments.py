"""Metrics in two places: the process's registry, for `/metrics`, and Ray, for its dashboard and agents.

Only the registry is exact: Ray exports every ten seconds, and replaces every observation of a histogram by the middle
of its bucket. An update in Ray costs about 5 us, which is fine once per migration and too much once per token.
"""

from collections.abc import Sequence

import prometheus_client
from prometheus_client import CollectorRegistry
from ray.serve import metrics


class Counter:
    """A growing count. Both formats append `_total` to `name`."""

    def __init__(self, name: str, help: str, registry: CollectorRegistry, labels: Sequence[str] = ()) -> None:
        self._labels = tuple(labels)
        self._own = prometheus_client.Counter(name, help, self._labels, registry=registry)
        self._rays = metrics.Counter(name, help, self._labels)

    def inc(self, value: float = 1.0, *labels: str) -> None:
        """Add `value`."""
        (self._own.labels(*labels) if labels else self._own).inc(value)
        if value:
            self._rays.inc(value, dict(zip(self._labels, labels, strict=True)))


class Gauge:
    """A current number."""

    def __init__(self, name: str, help: str, registry: CollectorRegistry, labels: Sequence[str] = ()) -> None:
        self._labels = tuple(labels)
        self._own = prometheus_client.Gauge(name, help, self._labels, registry=registry)
        self._rays = metrics.Gauge(name, help, self._labels)

    def set(self, value: float, *labels: str) -> None:
        """Set the number to `value`."""
        (self._own.labels(*labels) if labels else self._own).set(value)
        self._rays.set(value, dict(zip(self._labels, labels, strict=True)))


class Histogram:
    """The distribution of observations over `buckets`, given by their upper bounds, all above 0."""

    def __init__(
        self,
        name: str,
        help: str,
        registry: CollectorRegistry,
        buckets: Sequence[float],
        labels: Sequence[str] = (),
    ) -> None:
        self._labels = tuple(labels)
        self._own = prometheus_client.Histogram(name, help, self._labels, buckets=buckets, registry=registry)
        self._rays = metrics.Histogram(name, help, list(buckets), self._labels)

    def observe(self, value: float, *labels: str) -> None:
        """Add an observation."""
        (self._own.labels(*labels) if labels else self._own).observe(value)
        self._rays.observe(value, dict(zip(self._labels, labels, strict=True)))
