"""The capacity of a pooling model's engine, measured on an engine of known speed, in virtual time."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from app.tinymodel import CONTEXT, ensure_tiny_model
from deployments.engine.arguments import engine_config
from deployments.engine.pooling import CAPACITY_S, measure_capacity
from migration.protocol.core_messages import decode_request
from migration.protocol.messages import Tail
from migration.protocol.ports import Generated, OutputSink
from migration.protocol.request import RequestSpec, Trait
from policies.decision.limits import Terms
from tests.virtual_time import now

pytestmark = pytest.mark.virtual_time

STEP = 2048
"""The most tokens of a step."""


@dataclass
class SteadyEngine:
    """Implements `Runner`: computes prompts one after the other at `rate` tokens per second; the first takes longer."""

    rate: float
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    _free_at: float = 30.0

    def add(
        self, key: str, spec: RequestSpec, outputs: tuple[int, ...], sink: OutputSink, tail: Tail | None = None
    ) -> None:
        assert spec.traits == {Trait.POOLED} and not outputs
        self.prompts.append(tuple(decode_request(spec.body).prompt_token_ids or ()))
        self._free_at = max(self._free_at, now()) + spec.prompt_tokens / self.rate
        asyncio.get_running_loop().call_at(self._free_at, sink.take, Generated((), "stop", b"vector"))

    def abort(self, key: str) -> None:
        pass


async def measured(engine: SteadyEngine, tasks: Sequence[str] = ("embed", "token_embed")) -> int:
    kwargs = {"dtype": "float32", "runner": "pooling", "convert": "embed", "max_num_batched_tokens": STEP}
    return await measure_capacity(engine, engine_config(str(ensure_tiny_model()), kwargs), tasks, now)


@pytest.mark.parametrize("rate", [5_000, 100_000, 3_000_000])
async def test_the_capacity_is_what_the_engine_computes_in_its_time(rate: int) -> None:
    began, engine = now(), SteadyEngine(rate)
    assert await measured(engine) == pytest.approx(rate * CAPACITY_S, rel=0.01)
    assert now() - began < 32, "beside the first one, which may compile"
    two_rounds = engine.prompts[2:]
    assert sum(map(len, two_rounds)) <= 2 * STEP and len(two_rounds) % 2 == 0


async def test_prompts_have_nothing_in_common_that_could_be_cached() -> None:
    await measured(engine := SteadyEngine(100_000))
    assert len({prompt[:16] for prompt in engine.prompts}) == len(engine.prompts) > 10


async def test_every_prompt_fits_into_an_empty_replica() -> None:
    assert await measured(SteadyEngine(100)) == CONTEXT


async def test_a_model_that_takes_no_text_is_not_measured() -> None:
    engine = SteadyEngine(100)
    assert await measured(engine, ["plugin"]) == max(CONTEXT, STEP) and not engine.prompts


def test_a_placement_that_no_report_confirms_counts_for_the_time_of_a_capacity() -> None:
    assert Terms().placement_ttl_s == CAPACITY_S
