"""Numbers as text, and tables."""

import pytest

from benchmarks.evaluation.words import change, share, span, spread, table, text_table
from simulator.outcome.statistics import Interval


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (share(0.1234), "12.3 %"),
        (share(0.5, 0), "50 %"),
        (change(0.1), "+10.0 %"),
        (change(-0.0001), "+0.0 %"),
        (span([0.2, -0.0001, 0.1]), "0.0 to 20.0 %"),
        (spread(Interval(1234.5, None), 1), "1,234.5"),
        (spread(Interval(0.05, 0.001), 1, factor=100), "5.0 ± 0.1"),
    ],
)
def test_numbers_as_text(text: str, expected: str) -> None:
    assert text == expected


def test_table_aligns_numbers_to_the_right() -> None:
    assert table(("x", "y"), [("a|b", "1")]) == "| x | y |\n| --- | ---: |\n| a/b | 1 |"


def test_text_table_aligns_to_the_left() -> None:
    assert text_table(("x", "y"), [("a", "b")]) == "| x | y |\n| --- | --- |\n| a | b |"


def test_row_of_another_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not have 2 cells"):
        table(("x", "y"), [("a",)])
