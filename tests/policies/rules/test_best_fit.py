"""Best fit: the fullest replica that has room."""

import pytest

from policies.rules.best_fit import BestFit
from tests.policies.rules.drawn import after, drawn


@pytest.mark.parametrize(
    ("before", "sizes", "expected"),
    [
        pytest.param("60 | 80 | 20", [15], "60 | 80 15 | 20", id="the fullest that has room"),
        pytest.param("60 | 80 | 20", [20], "60 | 80 20 | 20", id="up to the last token"),
        pytest.param("60 | 80 | 20", [21], "60 21 | 80 | 20", id="not a token more"),
        pytest.param("60 | 60", [10], "60 10 | 60", id="the older of equals"),
        pytest.param("60 | 80", [50], "60 | 80 | 50", id="a new one if nothing has room"),
        pytest.param("60", [30, 40], "60 30 | 40", id="the older request first"),
        pytest.param("60", [50, 40], "60 40 | 50", id="a younger one passes what finds no room"),
        pytest.param("60 50 | 10 10", [], "60 | 10 10 50", id="an overload evicts the youngest, which goes elsewhere"),
        pytest.param(
            "60 41 | 85", [10], "60 | 85 10 | 41", id="before arrivals, what is evicted is placed as it is old"
        ),
    ],
)
def test_an_epoch(before: str, sizes: list[int], expected: str) -> None:
    assert after(BestFit(), drawn(before), *sizes) == expected


def test_growth_is_kept_free_for_all_who_share_the_replica() -> None:
    assert after(BestFit(), drawn("60 | 75", headroom=5), 15) == "60 | 75 15"
    assert after(BestFit(), drawn("60 | 75", headroom=5), 16) == "60 16 | 75"
