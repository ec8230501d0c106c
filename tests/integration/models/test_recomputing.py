"""The audit by recomputation on a real engine: copied, moved and decoded blocks are right, and a wrong one is found."""

import asyncio
import random
import time

from app.tinymodel import ensure_tiny_model
from deployments.cache.occupancy import Recomputed
from deployments.engine.vllm_engine import VllmEngine
from deployments.replica.contexts import PastContexts
from deployments.replica.recomputing import Recomputation
from migration.concurrency import gather
from migration.protocol.continuing import plain_spec
from migration.protocol.request import RequestSpec
from migration.run.slots import Slots
from policies.model import Blocks
from tests.counts import LONG
from tests.integration.models.pair import BLOCK, EnginePair, engine_pair, prompt_of, salted

CONTEXTS = 40 if LONG else 6
PROMPT, OUTPUT = 6 * BLOCK + 5, 2 * BLOCK


def remembering(pair: EnginePair) -> PastContexts:
    """What both replicas of the engine remember."""
    contexts = PastContexts(1 << 24, time.monotonic)
    for replica in pair.replicas.values():
        replica.host.contexts = contexts
    return contexts


async def poison(engine: VllmEngine, slots: Slots, right: RequestSpec, wrong: RequestSpec) -> None:
    """Put the cached blocks of one prompt into the cache as those of another one."""
    count = await engine.hold_prefix("hold", right, ())
    with await slots.lease() as lease:
        shards = await engine.gather("hold", Blocks(0), count, lease)
        loading = engine.load("poison", wrong, (), Blocks(0), count)
        await gather([loading, engine.put("poison", Blocks(0), count, [shard.slot for shard in shards])])
    engine.release_prefix("hold")


async def test_cached_contexts_are_recomputed() -> None:
    async with engine_pair(str(ensure_tiny_model())) as pair:
        contexts = remembering(pair)
        for number in range(CONTEXTS):
            moves = [(10, "kv")] if number % 2 else []
            _, records = await pair.run(f"r{number}", prompt_of(PROMPT, f"r{number}"), OUTPUT, moves)
            assert all(record.outcome == "committed" and record.path == "kv" for record in records)
        audit = Recomputation(pair.engine, contexts, random.Random(1))
        while audit.ended.total() < 2 * CONTEXTS:
            await audit.check()
        assert audit.ended == {Recomputed.EQUAL: 2 * CONTEXTS}

        right, wrong = (salted(plain_spec(n, tuple(prompt_of(PROMPT, n)), 2), "a") for n in ("r0", "wrong"))
        await poison(pair.engine, pair["a"].slots, right, wrong)
        async with asyncio.timeout(10):
            while pair.engine.present(wrong, ()).hbm < 6:  # Named by a later step.
                await asyncio.sleep(0.05)
        poisoned = PastContexts(1 << 24, time.monotonic)
        poisoned.add(wrong, ())
        assert await Recomputation(pair.engine, poisoned, random.Random(1)).check() is Recomputed.DIFFERENT
        async with asyncio.timeout(10):
            while pair.engine.present(wrong, ()).hbm:
                await asyncio.sleep(0.05)
        assert await audit.check() is Recomputed.EQUAL
