"""The histogram of tokens is exposed as prometheus_client's own; the labels of a registry are on all metrics in Ray."""

from prometheus_client import CollectorRegistry, Histogram

from deployments.metrics import instruments
from deployments.metrics.exposition import expose
from deployments.metrics.instruments import LabelledRegistry, TokenHistogram

BUCKETS = (0.01, 0.5, 1.0, 20)


def test_a_histogram_of_tokens_is_exposed_as_any_other() -> None:
    own, other = CollectorRegistry(), CollectorRegistry()
    made = TokenHistogram("mell_x_seconds", "Help.", own, BUCKETS, ["class"])
    usual = Histogram("mell_x_seconds", "Help.", ["class"], buckets=BUCKETS, registry=other)
    assert expose(own, {"replica": "i"}) == expose(other, {"replica": "i"})
    for series, value in (("a", 0.0), ("a", 0.01), ("b", 0.010001), ("a", 0.75), ("b", 20.0), ("b", 1e6)):
        made.labels(series).observe(value)
        usual.labels(series).observe(value)
        assert expose(own, {"replica": "i"}) == expose(other, {"replica": "i"})


def test_the_labels_of_a_registry_are_on_every_value_in_ray() -> None:
    """Ray refuses a value without all tags of its metric, unless the missing ones have defaults."""
    registry = LabelledRegistry({"pool": "p"})
    counter = instruments.Counter("mell_x", "Help.", registry, ("path",))
    gauge = instruments.Gauge("mell_y", "Help.", registry, ("path",))
    histogram = instruments.Histogram("mell_z", "Help.", registry, BUCKETS, ("path",))
    counter.inc(1, "kv")
    gauge.set(1, "kv")
    histogram.observe(1, "kv")
    for each in (counter, gauge, histogram):
        assert each._rays.info["tag_keys"] == ("pool", "path")
        assert each._rays.info["default_tags"] == {"pool": "p"}
