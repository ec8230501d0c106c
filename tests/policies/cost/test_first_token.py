"""The time to a first token with a part of the prompt in a cache."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cost.first_token import first_token_s
from policies.cost.lines import Line
from policies.cost.service import ReplicaSpeed
from policies.cost.steps import StepCosts, proportional

SPEED = ReplicaSpeed(StepCosts(proportional(0.001), 0.02, 1e-4, 1e-6, 1e-7), chunk_tokens=512)
LOAD = Line.of(100_000, latency_s=0.005)
tokens = st.integers(0, 5000)


def test_only_missing_tokens_are_computed() -> None:
    assert first_token_s(SPEED, LOAD, 1000, 0) == SPEED.prefill_s(1000)
    assert first_token_s(SPEED, LOAD, 1000, 900) == SPEED.prefill_s(100, 900) == pytest.approx(0.12, abs=0.02)


def test_tokens_are_loaded_from_the_host_if_that_is_faster() -> None:
    assert first_token_s(SPEED, LOAD, 1000, 0, 900) == LOAD.seconds(900) + SPEED.prefill_s(100, 900)
    slow = Line.of(100)
    assert first_token_s(SPEED, slow, 1000, 0, 900) == SPEED.prefill_s(1000)


@given(tokens, tokens, tokens, st.integers(0, 50), tokens)
def test_more_in_a_cache_is_never_slower(missing: int, hbm: int, dram: int, batch: int, context: int) -> None:
    prompt = missing + 1 + hbm + dram
    alone_s = first_token_s(SPEED, LOAD, prompt, hbm, dram)
    beside_s = first_token_s(SPEED, LOAD, prompt, hbm, dram, batch, context)
    assert 0 < alone_s <= beside_s <= first_token_s(SPEED, LOAD, prompt, hbm, 0, batch, context)
    assert beside_s <= first_token_s(SPEED, LOAD, prompt, 0, 0, batch, context) + 1e-9
