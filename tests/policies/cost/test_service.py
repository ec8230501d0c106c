"""Service levels, and the limits of one replica's work."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cost.lines import Line
from policies.cost.service import ReplicaSpeed, ServiceLevel, SpeedLimit, unreachable
from policies.cost.steps import StepCosts, proportional

COSTS = StepCosts(proportional(0.001), overhead_s=0.02, context_s=1e-5)
"""A prefill of a hundred tokens takes 0.12 s alone, a step with ten requests 0.03 s and its context."""
SPEED = ReplicaSpeed(COSTS, chunk_tokens=100)


def limited(step_s: float = inf, wait_s: float = inf, costs: StepCosts = COSTS) -> SpeedLimit:
    return SpeedLimit(ReplicaSpeed(costs, chunk_tokens=100), step_s, wait_s)


@given(st.floats(0.03, 0.2), st.integers(0, 50), st.integers(0, 5000))
def test_a_request_that_fills_the_room_keeps_steps_within_the_limit(step_s: float, batch: int, context: int) -> None:
    room = limited(step_s).room(batch, context)
    if room < 0:
        assert COSTS.step_s(batch + 1, context) > step_s
        return
    assert COSTS.step_s(batch + 1, context + int(room)) <= step_s + 1e-9
    assert COSTS.step_s(batch + 1, context + int(room) + 2) > step_s


@given(st.floats(0.03, 0.2), st.lists(st.integers(1, 3000), min_size=2, max_size=60), st.data())
def test_the_departure_of_the_excess_makes_steps_fast_enough(
    step_s: float, sizes: list[int], data: st.DataObject
) -> None:
    excess = limited(step_s).excess(len(sizes), sum(sizes))
    if not excess:
        assert COSTS.step_s(len(sizes), sum(sizes)) <= step_s
        return
    size = data.draw(st.sampled_from(sizes))
    after_s = COSTS.step_s(len(sizes) - 1, sum(sizes) - size)
    assert (after_s <= step_s + 1e-9) if size >= excess else (after_s > step_s - 1e-9)


def test_without_a_cost_of_context_only_the_number_of_requests_counts() -> None:
    found = limited(0.0305, costs=replace(COSTS, context_s=0.0))
    assert [found.room(batch, 10**6) for batch in (0, 9, 10)] == [inf, inf, -1]
    assert [found.excess(batch, 10**6) for batch in (10, 11, 12)] == [0, 1, 1]


@given(st.integers(1, 40), st.integers(0, 9000), st.integers(1, 40), st.integers(0, 9000))
def test_shares_add_up(one: int, one_context: int, other: int, other_context: int) -> None:
    found = limited(0.1)
    both = found.share(one + other, one_context + other_context)
    # A step without requests still counts one token of the linear part.
    first_token = 0.001 / (0.1 - COSTS.step_s(0, 0))
    assert both == pytest.approx(found.share(one, one_context) + found.share(other, other_context) + first_token)
    assert limited().share(one, one_context) == found.share(0, 0) == 0


@pytest.mark.parametrize(("queued", "in_time"), [(0, True), (100, True), (300, True), (301, False)])
def test_a_prompt_waits_for_the_prefills_before_it(queued: int, in_time: bool) -> None:
    # With ten requests, a step that prefills a hundred tokens takes 0.13 s.
    assert limited(wait_s=3 * 0.1301).is_in_time(10, 0, queued) is in_time
    assert limited().is_in_time(10, 0, queued)


def test_a_level_that_no_replica_meets_alone_comes_with_the_arithmetic() -> None:
    level = ServiceLevel(ttft_p99_s=0.5, itl_p99_s=0.02)
    assert unreachable(level, SPEED, 500) == (
        "ttft_p99_s is 0.5, and a prompt of 500 tokens alone on a replica takes 0.6 s to its first token",
        "itl_p99_ms is 20, and a step with one request of 500 tokens takes 26 ms",
    )
    assert unreachable(ServiceLevel(0.61, 0.027), SPEED, 500) == unreachable(ServiceLevel(), SPEED, 500) == ()


# --- first tokens with a part of the prompt in a cache ------------------------------------------------

CACHING = ReplicaSpeed(StepCosts(proportional(0.001), 0.02, 1e-4, 1e-6, 1e-7), chunk_tokens=512)
LOAD = Line.of(100_000, latency_s=0.005)
tokens = st.integers(0, 5000)


def test_only_missing_tokens_are_computed() -> None:
    assert CACHING.first_token_s(LOAD, 1000, 0) == CACHING.prefill_s(1000)
    assert CACHING.first_token_s(LOAD, 1000, 900) == CACHING.prefill_s(100, 900) == pytest.approx(0.12, abs=0.02)


def test_tokens_are_loaded_from_the_host_if_that_is_faster() -> None:
    assert CACHING.first_token_s(LOAD, 1000, 0, 900) == LOAD.seconds(900) + CACHING.prefill_s(100, 900)
    slow = Line.of(100)
    assert CACHING.first_token_s(slow, 1000, 0, 900) == CACHING.prefill_s(1000)


@given(tokens, tokens, tokens, st.integers(0, 50), tokens)
def test_more_in_a_cache_is_never_slower(missing: int, hbm: int, dram: int, batch: int, context: int) -> None:
    prompt = missing + 1 + hbm + dram
    alone_s = CACHING.first_token_s(LOAD, prompt, hbm, dram)
    beside_s = CACHING.first_token_s(LOAD, prompt, hbm, dram, batch, context)
    assert 0 < alone_s <= beside_s <= CACHING.first_token_s(LOAD, prompt, hbm, 0, batch, context)
    assert beside_s <= CACHING.first_token_s(LOAD, prompt, 0, 0, batch, context) + 1e-9
