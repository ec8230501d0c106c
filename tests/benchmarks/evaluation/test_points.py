"""Which outcomes no other beats."""

from benchmarks.evaluation.points import Point, front, height

CHEAP, MIDDLE, FAST = Point("cheap", 9.0, 1.0), Point("middle", 5.0, 5.0), Point("fast", 1.0, 9.0)


def test_the_front_is_what_nothing_beats_on_both_axes() -> None:
    beaten = Point("beaten", 6.0, 5.0)
    assert front([CHEAP, beaten, FAST, MIDDLE]) == [FAST, MIDDLE, CHEAP]


def test_equals_do_not_beat_each_other() -> None:
    twin = Point("twin", 5.0, 5.0)
    assert front([MIDDLE, twin]) == [MIDDLE, twin]


def test_as_good_on_one_axis_and_better_on_the_other_beats() -> None:
    assert front([MIDDLE, Point("slower", 5.5, 5.0)]) == [MIDDLE]


def test_between_points_the_line_is_straight() -> None:
    line = [CHEAP, FAST, MIDDLE]
    assert [height(line, x) for x in (1.0, 3.0, 6.0, 9.0)] == [9.0, 7.0, 4.0, 1.0]
    assert height(line, 0.5) is height(line, 9.5) is None


def test_a_line_may_have_two_points_above_each_other() -> None:
    assert height([FAST, Point("same delay", 1.0, 7.0), CHEAP], 1.0) in (7.0, 9.0)
