"""Metrics in two places: the process's registry, for `/metrics`, and Ray, for its dashboard and agents.

Only the registry is exact: Ray exports every ten seconds, and replaces every observation of a histogram by the middle
of its bucket. An update in Ray costs about 5 us, which is fine once per migration and too much once per token.
`TokenHistogram` is for the latter, and in the registry only.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from ray.serve import metrics


class LabelledRegistry(CollectorRegistry):
    """A registry whose metrics all have the same `labels`: `expose` adds them to its samples, instruments to Ray's."""

    def __init__(self, labels: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.labels = dict(labels or {})


class Counter:
    """A growing count. Both formats append `_total` to `name`."""

    def __init__(self, name: str, help: str, registry: LabelledRegistry, labels: Sequence[str] = ()) -> None:
        self._labels = tuple(labels)
        self._own = prometheus_client.Counter(name, help, self._labels, registry=registry)
        self._rays = metrics.Counter(name, help, (*registry.labels, *self._labels))
        self._rays.set_default_tags(dict(registry.labels))

    def inc(self, value: float = 1.0, *labels: str) -> None:
        """Add `value`."""
        (self._own.labels(*labels) if labels else self._own).inc(value)
        if value:
            self._rays.inc(value, dict(zip(self._labels, labels, strict=True)))


class Gauge:
    """A current number."""

    def __init__(self, name: str, help: str, registry: LabelledRegistry, labels: Sequence[str] = ()) -> None:
        self._labels = tuple(labels)
        self._own = prometheus_client.Gauge(name, help, self._labels, registry=registry)
        self._rays = metrics.Gauge(name, help, (*registry.labels, *self._labels))
        self._rays.set_default_tags(dict(registry.labels))

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
        registry: LabelledRegistry,
        buckets: Sequence[float],
        labels: Sequence[str] = (),
    ) -> None:
        self._labels = tuple(labels)
        self._own = prometheus_client.Histogram(name, help, self._labels, buckets=buckets, registry=registry)
        self._rays = metrics.Histogram(name, help, list(buckets), (*registry.labels, *self._labels))
        self._rays.set_default_tags(dict(registry.labels))

    def observe(self, value: float, *labels: str) -> None:
        """Add an observation."""
        (self._own.labels(*labels) if labels else self._own).observe(value)
        self._rays.observe(value, dict(zip(self._labels, labels, strict=True)))


class TokenHistogram(Collector):
    """As `Histogram`, for an observation per token: a fifth of the time of `prometheus_client`'s.

    Observed and collected in one thread, it needs no lock.
    """

    def __init__(
        self, name: str, help: str, registry: CollectorRegistry, buckets: Sequence[float], labels: Sequence[str]
    ) -> None:
        self._name = name
        self._help = help
        self._bounds = (*buckets, inf)
        self._labels = tuple(labels)
        self._series: dict[tuple[str, ...], TokenSeries] = {}
        registry.register(self)

    def labels(self, *values: str) -> "TokenSeries":
        """The series with these values of the labels."""
        if values not in self._series:
            self._series[values] = TokenSeries(self._bounds)
        return self._series[values]

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """Called by the registry for the metric's names."""
        yield HistogramMetricFamily(self._name, self._help, labels=self._labels)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """See `Collector.collect`."""
        (family,) = self.describe()
        names = [floatToGoString(bound) for bound in self._bounds]  # type: ignore[no-untyped-call]
        for values, series in self._series.items():
            counts = map(float, accumulate(series.counts))
            family.add_metric(values, list(zip(names, counts, strict=True)), series.sum)
        yield family


class TokenSeries:
    """One series of a `TokenHistogram`: the number of observations in each bucket, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * len(bounds)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Add an observation."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value
