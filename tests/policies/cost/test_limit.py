"""The limits that follow from a service level, and the replicas that dilute prefills."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from policies.cost.limit import Interruptions, Traffic, limit
from policies.cost.service import ReplicaSpeed, ServiceLevel
from policies.cost.steps import StepCosts, proportional

COSTS = StepCosts(proportional(0.001), overhead_s=0.02, context_s=1e-5)
"""A prefill of a hundred tokens takes 0.12 s alone, a step with ten requests 0.03 s and its context."""
SPEED = ReplicaSpeed(COSTS, chunk_tokens=100)
STEP_S = COSTS.step_s(1, 0.0)


def rare(*prompts: int) -> Traffic:
    """Prompts of which one arrives in a million seconds."""
    return Traffic(prompts, 1e-6)


def steady(prompts: list[int], per_step: float, batch: int = 1) -> Traffic:
    """Prompts that arrive evenly, so many per step of a request alone."""
    return Traffic(prompts, per_step / STEP_S, batch)


def test_an_error_of_the_step_times_is_a_margin() -> None:
    level = ServiceLevel(ttft_p99_s=1.0, itl_p99_s=0.1)
    sure, unsure = (limit(level, replace(SPEED, error=error), rare(100), 1) for error in (0.0, 0.25))
    assert (sure.step_s, sure.wait_s) == pytest.approx((0.1, 0.88))
    assert (unsure.step_s, unsure.wait_s) == pytest.approx((0.08, 0.68))


def test_a_hopeless_error_does_not_empty_replicas() -> None:
    level = ServiceLevel(itl_p99_s=0.09)
    assert limit(level, replace(SPEED, error=9.0), rare(100), 1).step_s == pytest.approx(0.06)


def test_prompts_in_the_longest_hundredth_do_not_count() -> None:
    level = ServiceLevel(ttft_p99_s=1.0)
    assert limit(level, SPEED, rare(*[100] * 99, 2000), 1).wait_s == pytest.approx(0.88)
    assert limit(level, SPEED, rare(*[100] * 98, 300, 300), 1).wait_s == pytest.approx(0.64)


def test_long_prompts_leave_half_of_the_level_to_waiting() -> None:
    found = limit(ServiceLevel(ttft_p99_s=1.0), SPEED, rare(*[100] * 98, 2000, 2000), 1)
    assert found.wait_s == 0.5 and len(found.unreachable) == 1


@pytest.mark.parametrize(("per_step", "added_s"), [(0.05, 0.029), (0.035, 0.009), (0.0101, 0.009), (0.009, 0.0)])
def test_prefills_in_more_than_a_hundredth_of_the_steps_are_left_out_of_the_limit(
    per_step: float, added_s: float
) -> None:
    # Of fifty prompts, ten are long: less than a hundredth of the steps from one prompt in twenty steps on.
    traffic = steady([30] * 10 + [10] * 40, per_step)
    assert Interruptions(SPEED, traffic).seconds(1) == pytest.approx(added_s)
    assert limit(ServiceLevel(itl_p99_s=0.1), SPEED, traffic, 1).step_s == pytest.approx(0.1 - added_s)


def test_chunks_of_a_long_prompt_interrupt_one_step_each() -> None:
    # Two chunks of a hundred tokens, and one of fifty.
    found = [Interruptions(SPEED, steady([250] * 10, per_step)).seconds(1) for per_step in (0.0055, 0.0045, 0.003)]
    assert found == pytest.approx([0.099, 0.049, 0.0])


def test_replicas_that_make_prefills_rare_are_the_least_number_for_a_level() -> None:
    # Chunks of 99 ms in four of a hundred steps of one replica.
    traffic, level = steady([100] * 50, 0.04), ServiceLevel(itl_p99_s=0.1)
    found = limit(level, SPEED, traffic, 1)
    least = found.least_replicas
    assert least == 5 and not found.unreachable
    assert (found.interruption_s, found.step_s) == pytest.approx((0.0, 0.1))
    interruptions = Interruptions(SPEED, traffic)
    assert interruptions.seconds(least) == 0 and interruptions.seconds(least - 1) == pytest.approx(0.099)
    assert limit(level, replace(SPEED, chunk_tokens=40), traffic, 1).least_replicas == 1


def test_a_maximum_below_the_least_number_makes_the_level_unreachable_and_does_not_empty_replicas() -> None:
    traffic = steady([100] * 50, 0.04)
    found = limit(ServiceLevel(itl_p99_s=0.1), SPEED, traffic, 1, most_replicas=4)
    assert found.unreachable == (
        "itl_p99_ms is 100, and prefills lengthen more than 1% of the steps by 99 ms or more; 5 replicas would keep "
        "the level, but max_replicas is 4; with max_num_batched_tokens: 40 they would take half of it",
    )
    assert found.step_s == pytest.approx(0.1) and found.least_replicas == 0
    both = limit(ServiceLevel(0.13, 0.1), SPEED, traffic, 1, most_replicas=4).unreachable
    assert both[0].endswith("they would take half of it, but a prompt of 100 tokens 0.16 s to its first token")
    hopeless = limit(ServiceLevel(itl_p99_s=0.0221), SPEED, traffic, 1, most_replicas=4).unreachable
    assert hopeless[-1].endswith("no max_num_batched_tokens makes such steps short enough")


def test_without_arrivals_nothing_interrupts() -> None:
    found = limit(ServiceLevel(itl_p99_s=0.1), SPEED, Traffic([100], 0.0, 30, 3000), 1)
    assert (found.interruption_s, found.step_s, found.least_replicas) == (0.0, 0.1, 1)


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=40),
    st.floats(0.1, 50),
    st.integers(0, 300),
    st.floats(0.06, 0.4),
)
def test_one_replica_less_than_the_least_number_exceeds_the_level(
    prompts: list[int], rate: float, batch: int, step_s: float
) -> None:
    found = Interruptions(SPEED, Traffic(prompts, rate, batch, 100.0 * batch))
    least = found.least_replicas(step_s)
    assert least is not None
    taken = [found.step_s(replicas) + found.seconds(replicas) for replicas in range(1, least + 2)]
    assert taken[least - 1] <= step_s and taken == sorted(taken, reverse=True)
    assert least == 1 or taken[least - 2] > step_s


@given(st.integers(1, 3000), st.floats(0.001, 1.0), st.floats(0.001, 1.0))
def test_one_request_always_fits_on_an_empty_replica(prompt: int, ttft_s: float, itl_s: float) -> None:
    found = limit(ServiceLevel(ttft_s, itl_s), SPEED, rare(prompt), 1)
    assume(found.interruption_s == 0)
    assert found.room(0, 0) >= prompt - 1
    assert found.is_in_time(0, 0, 0)
