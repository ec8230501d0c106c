"""The rates of prefixes, in a tree of bounded size."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.prefix.heat import WINDOW_S, PrefixHeat

prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.floats(0.0, 100.0)), min_size=1, max_size=30
)


def named(path: list[int]) -> tuple[int, ...]:
    """Chained names: each stands for the path up to there."""
    return tuple(int("1" + "".join(map(str, path[: end + 1]))) for end in range(len(path)))


class Everything:
    def __contains__(self, name: object) -> bool:
        return True


@given(prompts)
def test_rates_are_those_of_the_prompts_with_the_prefix(history: list[tuple[list[int], float]]) -> None:
    heat, now = PrefixHeat(), 0.0
    seen: list[tuple[tuple[int, ...], float]] = []
    for path, pause_s in history:
        now += pause_s
        heat.add(named(path), now)
        heat.check_integrity()
        seen.append((named(path), now))
    found = heat.ranking(now).hottest(1000, Everything())
    assert {name for prefix in found for name in prefix.names} == {name for names, _ in seen for name in names}
    for prefix in found:
        uses = sum(2.718281828459045 ** (-(now - at) / WINDOW_S) for names, at in seen if prefix.names[-1] in names)
        assert prefix.rate == pytest.approx(uses / WINDOW_S)
        assert prefix.names == named([int(digit) for digit in str(prefix.names[-1])[1:]])
    assert all(one.rate >= two.rate for one, two in pairwise(found))
    assert 0.0 <= heat.reuse < 1.0


@given(prompts, st.integers(6, 12))
def test_memory_is_bounded_and_the_last_prompt_is_kept(history: list[tuple[list[int], float]], kept: int) -> None:
    heat = PrefixHeat(kept)
    for path, at in history:
        heat.add(named(path), at)
        heat.check_integrity()
        assert any(prefix.names == named(path) for prefix in heat.ranking(at).hottest(100, Everything()))


def test_reuse_is_the_share_of_blocks_that_came_again() -> None:
    heat = PrefixHeat()
    assert heat.reuse == 0.0
    heat.add((1, 12, 123, 1234), 0.0)
    heat.add((1, 12, 125, 1256), 0.0)
    assert heat.reuse == pytest.approx(2 / 8)


def test_blocks_needed_by_prefixes_of_a_rate() -> None:
    heat = PrefixHeat()
    for _ in range(3):
        heat.add((1, 12), 0.0)
    heat.add((1, 12, 123), 0.0)
    heat.add((2,), 0.0)
    needed = heat.ranking(0.0).needed({1, 12, 123})
    assert [needed(uses / WINDOW_S) for uses in (5, 4, 2, 1)] == [0, 2, 2, 3]
