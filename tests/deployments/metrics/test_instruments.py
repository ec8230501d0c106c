"""The histogram of tokens is exposed as prometheus_client's own."""

from prometheus_client import CollectorRegistry, Histogram

from deployments.metrics.exposition import expose
from deployments.metrics.instruments import TokenHistogram

BUCKETS = (0.01, 0.5, 1.0, 20)


def test_a_histogram_of_tokens_is_exposed_as_any_other() -> None:
    own, other = CollectorRegistry(), CollectorRegistry()
    made = TokenHistogram("mell_x_seconds", "Help.", own, BUCKETS, "class")
    usual = Histogram("mell_x_seconds", "Help.", ["class"], buckets=BUCKETS, registry=other)
    assert expose(own, {"replica": "i"}) == expose(other, {"replica": "i"})
    for series, value in (("a", 0.0), ("a", 0.01), ("b", 0.010001), ("a", 0.75), ("b", 20.0), ("b", 1e6)):
        made.labels(series).observe(value)
        usual.labels(series).observe(value)
        assert expose(own, {"replica": "i"}) == expose(other, {"replica": "i"})
