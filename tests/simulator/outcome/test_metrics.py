"""Metrics of a simulation by hand; every expected number is worked out from the table in `hand.play`."""

from typing import Any

import pytest

from policies.model import RequestId, Tokens
from policies.plan import Path
from simulator.outcome.metrics import SERIES_POINTS, Window, bounds, measure, series
from simulator.outcome.recorder import EventRecorder
from simulator.workload.workload import Job
from simulator.world.observer import TransferOutcome
from tests.simulator.outcome.hand import cluster, life, play, transfer

WINDOW = Window(warmup_s=4.0, horizon_s=10.0)
JOBS = [Job(RequestId(f"r{at_s}"), at_s, Tokens(1), Tokens(1)) for at_s in (0.0, 3.9, 4.0, 9.0)]


def recorded() -> EventRecorder:
    return EventRecorder(lambda now: None)


@pytest.fixture
def recorder() -> EventRecorder:
    made = recorded()
    play(made)
    return made


def measured(recorder: EventRecorder) -> dict[str, Any]:
    return measure(recorder, JOBS, WINDOW)


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("gpus_peak", 3),
        ("gpus_mean", (2 * 2 + 3 * 4) / 6),
        ("gpu_seconds", 2 * 2 + 3 * 4),
        ("gpus_starting_mean", 4 / 6),
        ("utilisation", (2 * 110 / 200 + 4 * 110 / 300) / 6),
        ("bound_peak", 2),
        ("bound_mean", 2),
        ("ratio_to_bound", (2 * 1 + 4 * 1.5) / 6),
        ("requests_held_mean", 3),
        ("requests_waiting_mean", 4 / 6),
        ("serving_ratio", (2 * 1 + 4 * 0.75) / 6),
    ],
)
def test_means_are_over_time_and_leave_out_the_warm_up(recorder: EventRecorder, metric: str, value: float) -> None:
    assert measured(recorder)[metric] == pytest.approx(value)


@pytest.mark.parametrize(
    ("metric", "count"),
    [
        ("migrations_per_s", 4),
        ("units_moved_per_s", 3),
        ("tokens_moved_per_s", 10 + 20 + 30 + 6),
        ("evictions_per_s", 1),
        ("tokens_evicted_per_s", 50),
        ("activations_per_s", 1),
        ("deactivations_per_s", 1),
    ],
)
def test_decisions_are_counted_per_second_of_the_window(recorder: EventRecorder, metric: str, count: int) -> None:
    assert measured(recorder)[metric] == pytest.approx(count / 6)


def test_moves_are_counted_by_reason(recorder: EventRecorder) -> None:
    assert measured(recorder)["moves_by_reason"] == {"fill": 3, "drain": 1}


def test_an_epoch_that_reaches_into_the_window_counts_with_that_part(recorder: EventRecorder) -> None:
    assert measure(recorder, JOBS, Window(3.0, 10.0))["requests_waiting_mean"] == pytest.approx((3 * 1 + 1 * 4) / 7)
    assert measure(recorder, JOBS, Window(3.0, 10.0))["migrations_per_s"] == pytest.approx(4 / 7)


def test_requests_are_counted_where_they_arrive_and_end(recorder: EventRecorder) -> None:
    for finished_s in (3.9, 4.0, 10.0):
        recorder.finished(finished_s, life(finished_s))
    metrics = measured(recorder)
    assert (metrics["requests_arrived"], metrics["requests_finished"]) == (2, 2)
    assert metrics["requests_finished_per_s"] == pytest.approx(2 / 6)


def test_delays_are_relative_to_running_alone(recorder: EventRecorder) -> None:
    for stalled_s in (0.0, 1.0, 4.0):
        recorder.finished(8.0, life(8.0, stalled_s=stalled_s))
    metrics = measured(recorder)
    assert metrics["stall_s"] == pytest.approx({"mean": 5 / 3, "p50": 1, "p99": 3.94, "max": 4})
    assert metrics["added_ttft_s"]["p50"] == 1.0
    assert metrics["ttft_s"]["p50"] == 3.0
    assert metrics["added_completion_s"]["p99"] == 5.0


def test_times_between_tokens_are_weighted_with_the_tokens(recorder: EventRecorder) -> None:
    assert measured(recorder)["itl_s"] is None
    for now, step_s, tokens in ((5.0, 9.0, 1e6), (12.0, 0.02, 98.0), (17.0, 0.03, 1.5), (19.0, 0.5, 0.5)):
        recorder.stepped(now, step_s, tokens)
    found = measure(recorder, JOBS, Window(10.0, 30.0))["itl_s"]
    mean_s = (98 * 0.02 + 1.5 * 0.03 + 0.5 * 0.5) / 100
    assert found == pytest.approx({"mean": mean_s, "p50": 0.02, "p99": 0.03, "max": 0.5})


def test_migrations_are_counted_by_path(recorder: EventRecorder) -> None:
    recorder.transferred(3.0, transfer(Path.KV, 3.0, sent=5, took_s=1))
    recorder.transferred(5.0, transfer(Path.KV, 5.0, sent=100, took_s=1))
    recorder.transferred(6.0, transfer(Path.KV, 6.0, sent=80, took_s=3, outcome=TransferOutcome.REFUSED))
    recorder.transferred(6.0, transfer(Path.TOKENS, 6.0, sent=6, took_s=2))
    metrics = measured(recorder)
    assert metrics["bytes_moved_per_s"] == pytest.approx(186 / 6)
    assert metrics["moves_by_outcome"] == {"moved": 2, "refused": 1}
    kv, tokens = metrics["moves_by_path"]["kv"], metrics["moves_by_path"]["tokens"]
    assert (kv["moves"], kv["completed"], kv["same_node"], kv["bytes"], kv["tokens"]) == (2, 1, 2, 180, 20)
    assert (kv["stall_s"]["mean"], kv["duration_s"]["max"]) == (1, 3)
    assert (kv["actual_to_predicted"]["max"], tokens["actual_to_predicted"]["p50"]) == (1, 2)


def test_preemptions_are_counted(recorder: EventRecorder) -> None:
    for at_s in (1.0, 5.0, 6.0):
        recorder.preempted(at_s, Tokens(30))
    metrics = measured(recorder)
    assert metrics["preemptions_per_s"] == pytest.approx(2 / 6)
    assert metrics["tokens_preempted_per_s"] == pytest.approx(60 / 6)


def test_a_metric_without_events_has_no_distribution(recorder: EventRecorder) -> None:
    metrics = measured(recorder)
    assert (metrics["stall_s"], metrics["moves_by_path"]) == (None, {})


def test_the_repack_is_reported_beside_the_bound() -> None:
    recorder = recorded()
    # Sizes with a repack of three replicas and a bound of two.
    recorder.decided(0.0, cluster([34, 34], [34, 34], [34], [14]), [])
    metrics = measure(recorder, [], Window(0.0, 1.0))
    assert (metrics["ratio_to_bound"], metrics["ratio_to_repack"]) == (2, pytest.approx(4 / 3))
    assert bounds(recorder, Window(0.0, 1.0)) == {"peak": 2, "mean": 2, "repack_mean": 3}


def test_requests_that_an_overloaded_replica_cannot_hold_wait() -> None:
    recorder = recorded()
    # 30 and 40 are held; 60 does not fit, and what is younger than it does not go first.
    recorder.decided(0.0, cluster([30, 40, 60, 10], [20], waiting=1), [])
    metrics = measure(recorder, [], Window(0.0, 1.0))
    assert (metrics["requests_held_mean"], metrics["requests_waiting_mean"]) == (3, 3)
    assert (metrics["utilisation"], metrics["bound_mean"]) == (90 / 200, 1)


def test_an_empty_cluster_has_no_ratios() -> None:
    recorder = recorded()
    recorder.decided(0.0, cluster(), [])
    metrics = measure(recorder, [], Window(0.0, 1.0))
    assert metrics["gpus_mean"] == 0
    assert [metrics[name] for name in ("utilisation", "ratio_to_bound", "ratio_to_repack", "serving_ratio")] == [
        None
    ] * 4


def test_a_series_is_thinned_and_has_the_warm_up_in_it(recorder: EventRecorder) -> None:
    assert [(point["at_s"], point["gpus"], point["migrations"]) for point in series(recorder)] == [
        (0.0, 2, 2),
        (4.0, 2, 3),
        (6.0, 3, 1),
    ]
    recorder.epochs *= SERIES_POINTS
    assert len(series(recorder)) == SERIES_POINTS


def test_progress_is_reported_in_every_epoch() -> None:
    heard: list[float] = []
    play(EventRecorder(heard.append))
    assert heard == [0.0, 4.0, 6.0]


def test_blocks_that_requests_of_a_gpu_share_count_once() -> None:
    """All have 80 tokens in common; the third request of the first GPU lacks room there in either case."""
    names = {RequestId(name): range(8) for name in ("r0", "r1", "r2", "r3")}
    shared, blind = EventRecorder(lambda now: None, names, 10), recorded()
    for made in shared, blind:
        made.decided(0.0, cluster([85, 85, 95], [90]), ())
    (epoch,) = shared.epochs
    assert (epoch.held, epoch.waiting, epoch.used, epoch.bound) == (3, 1, 90 + 90, 1)
    (epoch,) = blind.epochs
    assert (epoch.held, epoch.waiting, epoch.used, epoch.bound) == (2, 2, 85 + 90, 2)
