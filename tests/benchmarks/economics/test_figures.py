"""Figures of runs."""

import pytest

from benchmarks.economics.figures import ROWS, delays, existing, figures, integral, startups
from benchmarks.economics.observed import Look
from tests.benchmarks.economics.made_up import CONDITIONS, looks, migration, observed, served


@pytest.mark.parametrize(
    ("counts", "area"),
    [
        ([(0.0, 2)], 20.0),
        ([(0.0, 2), (14.0, 3)], 2 * 4 + 3 * 6),
        ([(12.0, 1), (15.0, 2)], 1 * 5 + 2 * 5),
        ([(0.0, 5), (1.0, 1), (19.0, 4), (20.0, 9), (25.0, 9)], 1 * 9 + 4 * 1),
        ([(30.0, 3)], 30.0),
    ],
    ids=["constant", "a step inside", "known only from later on", "steps outside", "known only after the end"],
)
def test_integral_of_steps(counts: list[tuple[float, int]], area: float) -> None:
    assert integral(counts, 10.0, 20.0) == pytest.approx(area)


def test_integral_needs_a_step() -> None:
    with pytest.raises(ValueError, match="nothing was counted"):
        integral([], 0.0, 1.0)


def test_starting_and_draining_replicas_hold_a_gpu_and_stopped_ones_do_not() -> None:
    seen = looks({"a": "STARTING", "b": "RUNNING"}, None, {"a": "RUNNING", "b": "DRAINING", "c": "STOPPED"})
    assert existing(seen) == [(0.0, 2), (20.0, 2)]


def test_gpu_seconds_count_within_the_window() -> None:
    states = [{"a": "RUNNING"}] * 5 + [{"a": "RUNNING", "b": "STARTING"}] * 20
    found = figures(observed(seen=looks(*states)), CONDITIONS)  # from 10 s to 110 s; two replicas from 50 s on
    assert found["gpu_seconds"] == pytest.approx(40 + 2 * 60)
    assert found["replicas"] == pytest.approx(1.6)


def test_startup_lasts_from_the_first_look_to_the_first_running_one() -> None:
    seen = looks({"a": "RUNNING"}, {"a": "RUNNING", "b": "STARTING"}, None, {"b": "STARTING"}, {"b": "RUNNING"})
    assert startups(seen) == [30.0]


def test_delays_count_from_the_due_time() -> None:
    found = delays([served(20.0), served(21.0, first_s=23.0, ended_s=33.0)])
    assert found["ttft_p50"] == pytest.approx((0.5 + 2.0) / 2)
    assert found["tpot_p50"] == pytest.approx((0.1 + 1.0) / 2)
    assert found["total_p99"] == pytest.approx(1.5 + 0.99 * 10.5)


def test_failed_requests_are_counted_without_their_times() -> None:
    found = delays([served(20.0), served(21.0, ended_s=99.0, whole=False), served(22.0, first_s=None, whole=False)])
    assert (found["requests"], found["failed"]) == (3, 2)
    assert found["total_p99"] == pytest.approx(1.5)


def test_single_token_has_no_time_per_output_token() -> None:
    assert delays([served(20.0, output=1)])["tpot_p50"] is None


def test_only_events_in_the_window_count() -> None:
    requests = [served(9.9), served(10.0), served(109.9), served(110.0)]
    inside = [migration(11.0), migration(11.5, path="tokens"), migration(12.0, "aborted"), migration(13.0, None)]
    migrations = [migration(9.0), *inside, migration(111.0)]
    seen = [Look(0.0, {"a": "RUNNING"}, 3), Look(60.0, None, 8), Look(120.0, {}, 11)]
    found = figures(observed(requests, seen, migrations), CONDITIONS)
    assert found["requests"] == 2
    assert (found["migrations"], found["migrations_tokens"], found["migrations_void"]) == (2, 1, 2)
    assert found["preemptions"] == 5


def test_every_row_of_the_report_has_a_figure() -> None:
    assert {row.name for row in ROWS} == set(figures(observed(), CONDITIONS))
