"""The longest step time since a mark."""

from hypothesis import given
from hypothesis import strategies as st

from simulator.world.batch import Gaps


@given(st.lists(st.floats(0.001, 10.0), max_size=30), st.integers(0, 30))
def test_the_longest_since_a_mark_is_the_maximum_after_the_mark(times: list[float], begin: int) -> None:
    gaps, mark = Gaps(), 0
    for index, seconds in enumerate(times):
        if index == begin:
            mark = gaps.mark()
        gaps.add(seconds)
    if begin >= len(times):
        mark = gaps.mark()
    assert gaps.longest(mark) == max(times[begin:], default=0.0)
