"""The formula of step times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cost.steps import HopCosts, PrefillChunk, StepCosts, WholeStep, cycle_s, interpolate, proportional

COSTS = StepCosts(
    linear=((1, 0.01), (100, 0.01), (200, 0.11)), overhead_s=0.002, sequence_s=1e-4, context_s=1e-6, attention_s=1e-8
)

FORMULAS = st.builds(
    StepCosts,
    st.floats(1e-6, 1e-3).map(proportional),
    st.floats(0.0, 0.1),
    st.floats(0.0, 1e-3),
    st.floats(0.0, 1e-5),
    st.floats(0.0, 1e-7),
)


def test_a_step_is_the_sum_of_its_parts() -> None:
    chunks = [PrefillChunk(50, 1000), PrefillChunk(30, 0)]
    attended = 50 * 1025 + 30 * 15
    assert COSTS.step_s(70, 9000, chunks) == pytest.approx(0.002 + 0.06 + 70 * 1e-4 + 9000 * 1e-6 + attended * 1e-8)


def test_a_prefill_is_the_sum_of_its_steps() -> None:
    first, second = COSTS.step_s(0, 0, [PrefillChunk(150, 40)]), COSTS.step_s(0, 0, [PrefillChunk(60, 190)])
    assert COSTS.prefill_s(210, 40, chunk_tokens=150) == pytest.approx(first + second)
    assert COSTS.prefill_s(0, 40) == 0.0


@given(FORMULAS, st.integers(1, 4000), st.integers(0, 4000))
def test_a_prefill_after_cached_tokens_is_the_rest_of_the_whole(costs: StepCosts, tokens: int, cached: int) -> None:
    whole, head = costs.prefill_s(cached + tokens), costs.prefill_s(cached)
    steps = 2 if cached else 1
    assert head + costs.prefill_s(tokens, cached) == pytest.approx(whole + (steps - 1) * costs.overhead_s)


@given(FORMULAS, st.integers(1, 64), st.integers(1, 10_000), st.integers(1, 2048), st.integers(0, 4000))
def test_every_part_of_the_work_takes_time(
    costs: StepCosts, batch: int, context: int, tokens: int, before: int
) -> None:
    step_s = costs.step_s(batch, context, [PrefillChunk(tokens, before)])
    assert step_s >= costs.step_s(batch, context) >= costs.step_s(batch - 1, context)
    assert step_s >= costs.step_s(batch, context - 1, [PrefillChunk(tokens, before)])
    assert costs.prefill_s(tokens, before) >= costs.prefill_s(tokens) > 0


@pytest.mark.parametrize(("x", "y"), [(0, 1.0), (10, 1.0), (15, 2.0), (20, 3.0), (40, 4.0), (60, 5.0), (100, 7.0)])
def test_interpolation_is_flat_before_and_goes_on_behind(x: int, y: float) -> None:
    assert interpolate(((10, 1.0), (20, 3.0), (40, 4.0)), x) == pytest.approx(y)


def test_a_single_corner_is_the_same_everywhere() -> None:
    assert [interpolate(((10, 1.0),), x) for x in (1, 10, 99)] == [1.0] * 3


def test_proportional_knots_are_a_line_through_the_origin() -> None:
    assert [interpolate(proportional(0.5), n) for n in (1, 2, 7, 1000)] == pytest.approx([0.5, 1.0, 3.5, 500.0])


def test_a_cycle_of_two_takes_twice_the_longer_half_step_with_its_hop() -> None:
    slow, fast = WholeStep(0.042, 10), WholeStep(0.022, 500)
    # Halves of 2 + 20 and 2 + 10 ms, and hops of 1 ms and 10 us per token.
    hop = HopCosts(0.001, 1e-5)
    assert cycle_s([slow, fast], 2, 0.002, HopCosts()) == pytest.approx(2 * 0.022)
    assert cycle_s([slow, fast], 2, 0.002, hop) == pytest.approx(2 * max(0.0231, 0.018))
    assert cycle_s([slow, slow], 2, 0.002, hop) == cycle_s([slow], 2, 0.002, hop)
    assert cycle_s([slow] * 4, 4, 0.002, HopCosts()) == pytest.approx(4 * 0.012)
    assert cycle_s([], 2, 0.002, hop) == 0.0
