"""The step times of the simulated world."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cost.steps import PrefillChunk
from policies.model import Tokens
from simulator.costs.costs import ComputeCosts
from simulator.costs.steps import Leg, StepTimes
from tests.simulator.physics import COMPUTE

CONTEXT = replace(COMPUTE, context_s=1e-5, attention_s=1e-7, overhead_s=0.005)


@given(st.floats(1e-3, 1.0), st.floats(0.0, 1e-2), st.floats(0.0, 1e4))
def test_seconds_of_steps_is_the_inverse_of_steps_in_seconds(step_s: float, growth_s: float, steps: float) -> None:
    leg = Leg(step_s, growth_s)
    assert leg.steps(leg.seconds(steps)) == pytest.approx(steps, rel=1e-9, abs=1e-9)


def test_growing_steps_take_the_sum_of_their_times_within_half_a_step() -> None:
    leg = Leg(0.01, 0.001)
    one_by_one = sum(leg.step_s + k * leg.growth_s for k in range(100))
    assert leg.seconds(100) == pytest.approx(one_by_one + 100 * leg.growth_s / 2)


def test_without_costs_every_request_decodes_at_the_set_rate() -> None:
    times = StepTimes(None, 25.0)
    assert [times.decode(batch, context) for batch, context in ((1, 10.0), (500, 1e6))] == [Leg(0.04, 0.0)] * 2


def test_decoding_slows_down_with_the_batch_and_with_its_context() -> None:
    times = StepTimes(CONTEXT, 25.0)
    by_batch = [times.decode(batch, 1000.0).step_s for batch in (1, 100, 150, 300)]
    by_context = [times.decode(10, context).step_s for context in (0.0, 1000.0, 2000.0)]
    assert by_batch == pytest.approx([0.025, 0.025, 0.075, 0.225])
    assert by_context == pytest.approx([0.015, 0.025, 0.035])


def test_decode_switched_off_leaves_prefill_as_it_was() -> None:
    on, off = StepTimes(CONTEXT, 25.0), StepTimes(replace(CONTEXT, decode=False), 25.0)
    assert off.decode(300, 1e5) == Leg(0.04, 0.0)
    assert off.prefill(0, 0.0, [PrefillChunk(150, 0)]) == on.prefill(0, 0.0, [PrefillChunk(150, 0)])


def test_a_prefill_lengthens_the_step_by_the_time_of_its_tokens() -> None:
    times = StepTimes(CONTEXT, 25.0)
    attention = 1e-7 * 150 * (50 + 75)
    assert times.prefill(20, 1000.0, [PrefillChunk(150, 50)]) == pytest.approx(
        0.005 + 0.01 + 0.08 - 0.01 + 0.01 + attention
    )


def test_without_interference_a_prefill_takes_as_long_as_alone() -> None:
    times = StepTimes(replace(CONTEXT, interference=False), 25.0)
    assert times.prefill(20, 1000.0, [PrefillChunk(150, 0)]) == times.prefill(0, 0.0, [PrefillChunk(150, 0)])


def test_a_prefill_with_decoding_at_a_set_rate_adds_to_the_set_step() -> None:
    times = StepTimes(replace(COMPUTE, decode=False), 25.0)
    assert times.prefill(20, 0.0, [PrefillChunk(180, 0)]) == pytest.approx(0.04 + 0.1)


def test_a_request_alone_is_prefilled_in_chunks_and_then_decodes() -> None:
    first, last = StepTimes(COMPUTE, 25.0).alone(Tokens(500), Tokens(11))
    assert first == pytest.approx(0.11 + 0.11 + 0.01)
    assert last == pytest.approx(first + 10 * 0.01)


def test_a_request_alone_without_costs_takes_its_tokens_at_the_set_rate() -> None:
    assert StepTimes(None, 25.0).alone(Tokens(500), Tokens(100)) == pytest.approx((0.04, 4.0))


def test_a_step_has_room_for_a_prefill_however_many_decode() -> None:
    times = StepTimes(ComputeCosts(linear=((1, 0.01),), chunk_tokens=8), 25.0)
    assert [times.budget(batch) for batch in (0, 5, 8, 20)] == [8, 3, 1, 1]
