"""Durations of one migration, on a clock that the test moves."""

from collections.abc import Callable

import pytest

from migration.run.times import Times

Note = Callable[[Times], None]


class Clock:
    """Shows what it is set to; it begins at zero."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def times(clock: Clock) -> Times:
    return Times(clock, lambda: 1000.0)


def test_times_are_none_before_their_events(times: Times, clock: Clock) -> None:
    clock.now = 3.0
    assert (times.started_at, times.duration_s, times.pause_s, times.resume_s) == (1000.0, 3.0, None, None)


def test_durations_are_between_the_documented_events(times: Times, clock: Clock) -> None:
    notes: list[Note] = [Times.freeze, Times.hand_over, Times.release, Times.end]
    for at, note in zip((1.0, 4.0, 9.0, 10.0), notes, strict=True):
        clock.now = at
        note(times)
    times.resumed(20.0)
    clock.now = 100.0
    assert (times.duration_s, times.pause_s, times.resume_s) == (10.0, 8.0, 23.0)


@pytest.mark.parametrize("first", [0.0, 1.0], ids=["when the clock shows zero", "later"])
def test_a_repeated_event_does_not_count(times: Times, clock: Clock, first: float) -> None:
    for at in (first, 5.0):
        clock.now = at
        for note in (Times.freeze, Times.hand_over, Times.release, Times.end):
            note(times)
    times.resumed(0.5)
    assert (times.duration_s, times.pause_s, times.resume_s) == (first, 0.0, 0.5)


def test_without_a_freeze_there_is_neither_pause_nor_resumption(times: Times) -> None:
    times.hand_over()
    times.release()
    times.resumed(1.0)
    assert (times.pause_s, times.resume_s) == (None, None)
