"""The Pareto front of outcomes."""

from benchmarks.evaluation.points import Point, front

CHEAP, MIDDLE, FAST = Point("cheap", 9.0, 1.0), Point("middle", 5.0, 5.0), Point("fast", 1.0, 9.0)


def test_front_has_the_points_that_no_other_beats() -> None:
    beaten = Point("beaten", 6.0, 5.0)
    assert front([CHEAP, beaten, FAST, MIDDLE]) == [FAST, MIDDLE, CHEAP]


def test_equal_points_do_not_beat_each_other() -> None:
    twin = Point("twin", 5.0, 5.0)
    assert front([MIDDLE, twin]) == [MIDDLE, twin]


def test_point_that_is_equal_on_one_axis_and_better_on_the_other_beats() -> None:
    assert front([MIDDLE, Point("slower", 5.5, 5.0)]) == [MIDDLE]
