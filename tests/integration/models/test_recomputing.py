"""The audit by recomputation on real engines: copied, moved and decoded blocks are right, and a wrong one is found."""

import asyncio
import random
import time

import pytest

from deployments.cache.occupancy import Recomputed
from deployments.engine.vllm_engine import VllmEngine
from deployments.replica.prefix_cache.contexts import PastContexts
from deployments.replica.prefix_cache.recomputing import Recomputation
from migration.concurrency import gather
from migration.protocol.continuing import plain_spec
from migration.protocol.request import RequestSpec
from migration.run.slots import Slots
from policies.model import Blocks
from tests.counts import LONG_ONLY
from tests.integration.models.pair import BLOCK, EnginePair, RealReplica, prompt_of
from tests.migration.world import loads_no_adapter

CONTEXTS = 12
"""With the blocks that the audits compute, they fit in the pools."""
PROMPT, OUTPUT = 6 * BLOCK + 5, 3 * BLOCK


def audited(replica: RealReplica) -> Recomputation:
    """The audit of what a replica remembers from now on."""
    replica.host.contexts = PastContexts(lambda: 1 << 24, time.monotonic)
    return Recomputation(replica.engine, replica.host.contexts, loads_no_adapter, random.Random(1))


async def poison(engine: VllmEngine, slots: Slots, right: RequestSpec, wrong: RequestSpec) -> None:
    """Put the cached blocks of one prompt into the cache as those of another one."""
    count = await engine.hold_prefix("hold", right, ())
    with await slots.lease() as lease:
        shards = await engine.gather("hold", Blocks(0), count, lease)
        loading = engine.load("poison", wrong, (), Blocks(0), count)
        await gather([loading, engine.put("poison", Blocks(0), count, [shard.slot for shard in shards])])
    engine.release_prefix("hold")


@LONG_ONLY
@pytest.mark.asyncio(loop_scope="package")
async def test_cached_contexts_are_recomputed(two_engines: EnginePair) -> None:
    """Every other request has moved by KV, and is remembered by its target."""
    pair, audits = two_engines, [audited(replica) for replica in two_engines.replicas.values()]
    for number in range(CONTEXTS):
        moves = [(10, "kv")] if number % 2 else []
        _, records = await pair.run(f"r{number}", prompt_of(PROMPT, f"r{number}"), OUTPUT, moves)
        assert all(record.outcome == "committed" and record.path == "kv" for record in records)
    for audit in audits:
        for _ in range(CONTEXTS):
            await audit.check()
        assert audit.ended == {Recomputed.EQUAL: CONTEXTS}

    engine = pair["a"].engine
    right, wrong = (plain_spec(n, tuple(prompt_of(PROMPT, n)), 2) for n in ("r0", "wrong"))
    await poison(engine, pair["a"].slots, right, wrong)
    async with asyncio.timeout(10):
        while engine.present(wrong, ()).hbm < 6:  # Named by a later step.
            await asyncio.sleep(0.05)
    poisoned = PastContexts(lambda: 1 << 24, time.monotonic)
    poisoned.add(wrong, ())
    assert await Recomputation(engine, poisoned, loads_no_adapter, random.Random(1)).check() is Recomputed.DIFFERENT
    async with asyncio.timeout(10):
        while engine.present(wrong, ()).hbm:
            await asyncio.sleep(0.05)
    assert await audits[0].check() is Recomputed.EQUAL
