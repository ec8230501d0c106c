"""The benchmark of tiers: prompts, and the places of their KV."""

import pytest

from benchmarks.caching.tiers import draw, is_from
from migration.protocol.core_messages import Prefilled


def test_prompts_are_new_and_come_again_by_their_names() -> None:
    assert draw(40, 1) == draw(40, 1) != draw(40, 2) and len(draw(40, 1)) == 40


@pytest.mark.parametrize(
    ("where", "prefilled", "right"),
    [
        ("cold", Prefilled(100, 0), True),
        ("cold", Prefilled(100, 32), False),
        ("HBM", Prefilled(100, 96), True),
        ("HBM", Prefilled(100, 96, 32), False),
        ("DRAM", Prefilled(100, 96, 96), True),
        ("DRAM", Prefilled(100, 96, 64), False),
        ("HBM", None, False),
    ],
)
def test_an_answer_from_another_tier_is_wrong(where: str, prefilled: Prefilled | None, right: bool) -> None:
    assert is_from(where, prefilled, 100) == right
