"""Tails on real engines: a step that takes one fills its blocks, whatever becomes of the tail's request."""

import asyncio
import contextlib
import os
import signal

import pytest

from deployments.engine.vllm_engine import VllmEngine
from migration.protocol.continuing import plain_spec
from migration.protocol.messages import Tail
from migration.protocol.request import RequestSpec
from migration.run.outputs import OutputQueue, running
from migration.run.slots import Slots
from policies.model import Blocks
from tests.counts import LONG_ONLY
from tests.integration.models.pair import BLOCK, EnginePair, prompt_of

TRIALS = 20
PLANNED_S = 0.2
"""An idle core plans a step in far less. Where it does not, the trial shows nothing, and no block is named."""


async def outputs_of(engine: VllmEngine, spec: RequestSpec) -> tuple[int, ...]:
    """All output of a request."""
    tokens: list[int] = []
    async with running(engine, f"{spec.id}.run", spec) as steps:
        async for step in steps:
            tokens += step.tokens
    return tuple(tokens)


async def pass_tail(source: VllmEngine, target: VllmEngine, slots: Slots, spec: RequestSpec, tail: Tail) -> None:
    """Have the target hold the tail of a request that runs on the source until it has computed the tail."""
    known: int = spec.prompt_tokens
    async with running(source, f"{spec.id}.source", spec) as steps:
        while known <= tail.tokens:
            known += len((await anext(steps)).tokens)
        with await slots.lease() as lease:
            shards = await source.gather_tail(f"{spec.id}.source", tail, lease)
            target.expect(tail.name)
            await target.hold(tail, [shard.slot for shard in shards])


async def abort_once_planned(
    engine: VllmEngine, key: str, spec: RequestSpec, output: tuple[int, ...], tail: Tail
) -> None:
    """Abort a request between the plan of its first step and the step itself."""
    for pid in engine.processes.workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        engine.add(key, spec, output, OutputQueue(), tail)
        await asyncio.sleep(PLANNED_S)
        engine.abort(key)
        await asyncio.sleep(PLANNED_S)
    finally:
        for pid in engine.processes.workers:
            os.kill(pid, signal.SIGCONT)


async def are_named(engine: VllmEngine, spec: RequestSpec, output: tuple[int, ...], blocks: int) -> bool:
    """True once the prefix cache has that many blocks of a context; False if it has not within seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            while engine.present(spec, output).hbm < blocks:
                await asyncio.sleep(0.01)
            return True
    return False


@LONG_ONLY
@pytest.mark.asyncio(loop_scope="package")
async def test_an_abort_behind_the_plan_of_a_step_leaves_no_block_unfilled(two_engines: EnginePair) -> None:
    """vLLM names the blocks that a step fills when it plans the step, and later requests find them by these names."""
    source, target, slots = two_engines["a"].engine, two_engines["b"].engine, two_engines["a"].slots
    shown = 0
    for trial in range(TRIALS):
        name, prompt = f"tail-{trial}", tuple(prompt_of(BLOCK, f"tail-{trial}"))
        spec = plain_spec(name, prompt, 2 * BLOCK, ignore_eos=True)
        output = await outputs_of(source, spec)
        # The first step computes one token, and fills the second block with it.
        tail, known = Tail(name, Blocks(0), 2 * BLOCK - 1), output[:BLOCK]
        await pass_tail(source, target, slots, spec, tail)
        await abort_once_planned(target, f"{name}.target", spec, known, tail)
        shown += await are_named(target, spec, known, 2)
        later = plain_spec(f"{name}.later", (*prompt, *known, output[BLOCK]), BLOCK - 1, ignore_eos=True)
        assert await outputs_of(target, later) == output[BLOCK + 1 :]
    assert shown > TRIALS // 2
