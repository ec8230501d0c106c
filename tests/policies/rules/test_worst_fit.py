"""Worst fit: the emptiest replica."""

import pytest

from policies.rules.overload import Overload
from policies.rules.worst_fit import WorstFit
from tests.policies.rules.drawn import after, drawn


@pytest.mark.parametrize(
    ("before", "sizes", "expected"),
    [
        pytest.param("60 | 80 | 20", [15], "60 | 80 | 20 15", id="the emptiest"),
        pytest.param("60 | 80 | 20", [80], "60 | 80 | 20 80", id="up to the last token"),
        pytest.param("60 | 80 | 20", [81], "60 | 80 | 20 | 81", id="a new one if the emptiest has no room"),
        pytest.param("60 | 60", [10], "60 | 60 10", id="the younger of equals"),
        pytest.param("50 | 60", [20, 30], "50 20 | 60 30", id="one after the other"),
        pytest.param("60 50 | 10 10", [], "60 | 10 10 50", id="an overload evicts the youngest, which goes elsewhere"),
    ],
)
def test_an_epoch(before: str, sizes: list[int], expected: str) -> None:
    assert after(WorstFit(), drawn(before), *sizes) == expected


def test_an_overload_is_the_engines_affair_if_requests_stall() -> None:
    assert after(WorstFit(overload=Overload.STALL), drawn("60 50 | 10"), 5) == "60 50 | 10 5"
