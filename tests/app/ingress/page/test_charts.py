"""Points of the charts: GPUs needed, and quantiles of the last seconds."""

import pytest
from prometheus_client import CollectorRegistry, Histogram

from app.ingress.page.charts import SPAN_S, WindowedQuantiles, point, worst_fit
from policies.bounds import martello_toth_l2
from policies.model import Phase, ReplicaState
from tests.app.page.synthetic import CAPACITY, SyntheticCluster

NONE = (None, None)


@pytest.mark.parametrize(
    ("sizes", "bins"),
    [
        ((), 0),
        ((10,), 1),
        ((5, 5, 5), 2),
        ((6, 6, 4, 4), 2),
        ((3, 3, 3, 9), 2),
        ((5, 2, 8, 6), 3),
    ],
)
def test_worst_fit_opens_a_bin_only_when_the_emptiest_has_no_room(sizes: tuple[int, ...], bins: int) -> None:
    assert worst_fit(sizes, 10) == bins


def test_a_point_summarizes_the_state() -> None:
    cluster = SyntheticCluster(6, 60)
    cluster.open(ReplicaState.STARTING)
    state = cluster.state()
    now, gpus, bound, worst, used, *quantiles = point(state, [], cluster.now, (0.1, 0.2), NONE)
    sizes = [live.tokens for held in cluster.held.values() for live in held if live.phase is not Phase.WAITING]
    assert (now, gpus) == (round(cluster.now, 2), 7)
    assert bound == martello_toth_l2(sizes, CAPACITY)
    assert bound is not None and worst is not None and bound <= worst
    assert used == pytest.approx(sum(sizes) / (7 * CAPACITY), abs=0.01)
    assert quantiles == [0.1, 0.2, None, None, None, None]


def test_the_schedulers_bound_counts_if_there_is_one() -> None:
    cluster = SyntheticCluster(6, 60)
    state = cluster.state()
    assert point(state | {"least_replicas": 1}, [], cluster.now, NONE, NONE)[2] == 1
    assert point(state, [], cluster.now, NONE, NONE)[2] != 1


def test_without_replicas_a_point_is_empty() -> None:
    assert point({"replicas": []}, [], 1.0, NONE, NONE) == [1.0, 0, 0, 0, None, *[None] * 6]


def test_waiting_requests_hold_no_kv() -> None:
    cluster = SyntheticCluster(1, 1)
    (live,) = cluster.held["engine-001"]
    live.phase = Phase.WAITING
    assert point(cluster.state(), [], cluster.now, NONE, NONE)[2:4] == [0, 0]


def test_pauses_of_the_last_seconds() -> None:
    records = [
        {"pause_s": pause, "started_at": at, "duration_s": 1.0}
        for pause, at in [(0.01, 99.0), (0.02, 99.0), (0.5, 98.0 - SPAN_S), (None, 99.0)]
    ]
    assert point({"replicas": []}, records, 100.0, NONE, NONE)[-2:] == [0.01, 0.02]


def test_quantiles_are_over_all_labels() -> None:
    histogram = Histogram("seconds", "Seconds.", ["class"], buckets=(1, 2, 4), registry=CollectorRegistry())
    for name in "ab":
        histogram.labels(name)
    lately = WindowedQuantiles(histogram)
    assert lately.quantiles(0.0) == NONE
    histogram.labels("a").observe(0.5)
    histogram.labels("b").observe(3.0)
    p50, p99 = lately.quantiles(1.0)
    assert p50 == 1.0 and p99 == pytest.approx(3.96)


def test_quantiles_of_the_last_seconds() -> None:
    histogram = Histogram("seconds", "Seconds.", buckets=(1, 2, 4), registry=CollectorRegistry())
    lately = WindowedQuantiles(histogram)
    for _ in range(100):
        histogram.observe(3.0)
    assert lately.quantiles(0.0) == NONE
    for _ in range(10):
        histogram.observe(0.5)
    p50, p99 = lately.quantiles(1.0)
    assert p50 == pytest.approx(0.5) and p99 == pytest.approx(0.99)
    histogram.observe(100.0)
    assert lately.quantiles(2.0)[1] == 4.0
    assert lately.quantiles(3.0 + SPAN_S) == NONE


def test_replicas_of_a_model_hold_only_its_requests() -> None:
    """One request of two models each: a single replica could hold both, if they were of one model."""
    requests = [{"id": id, "phase": Phase.DECODE, "tokens": 10, "age_s": 1.0} for id in "pq"]
    replicas = [
        {"id": id, "state": ReplicaState.RUNNING, "capacity_tokens": 100, "used_tokens": 10, "requests": [request]}
        for id, request in zip("ab", requests, strict=True)
    ]
    of_models = [replica | {"model": model} for replica, model in zip(replicas, ("chat", "code"), strict=True)]
    assert point({"replicas": replicas}, [], 1.0, NONE, NONE)[2:4] == [1, 1]
    assert point({"replicas": of_models}, [], 1.0, NONE, NONE)[2:4] == [2, 2]
