"""Requests between an engine of one worker and an engine of two: each worker takes its heads of the blocks that come.

The two add up the parts of a layer's output in another order, so their KV differs in its last bits. Blocks that have
been copied are the source's to the bit; steps behind them are the target's. The tiny model's greedy answers are equal
all the same, but where two tokens are equally likely: there, answers may part.
"""

import random
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence

import numpy as np
import pytest
import pytest_asyncio
import torch

from app.tinymodel import ensure_tiny_model
from deployments.engine.port import Engine
from migration.kv.staging import HEADER
from migration.protocol.continuing import plain_spec, probe
from migration.protocol.core_messages import decode_logprobs
from migration.protocol.record import Outcome
from migration.run.outputs import running
from policies.model import Blocks
from policies.plan import Path
from tests.counts import LONG_ONLY
from tests.integration.models.pair import BLOCK, CHUNK, EnginePair, RealReplica, pair_of_engines, prompt_of
from tests.integration.models.rows import How, row
from tests.integration.models.test_following import noise_in_block

MOVES, OUTPUT = 30, 200
"""Moves in each direction."""
TIE = 0.01
"""The logprobs of equally likely tokens differ by less."""

pytestmark = [pytest.mark.asyncio(loop_scope="module"), LONG_ONLY]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unlike() -> AsyncIterator[EnginePair]:
    """Two replicas: a has one worker, b has two."""
    sizes = {"tensor_parallel_size": 2}
    async with pair_of_engines(str(ensure_tiny_model()), sizes, max_num_batched_tokens=CHUNK) as pair:
        marks = [pair[name].engine.fingerprint for name in "ab"]
        assert [mark.workers for mark in marks] == [1, 2] and marks[0].cache == marks[1].cache
        yield pair


async def likeliest(engine: Engine, context: tuple[int, ...]) -> Mapping[int, float]:
    """The logprobs of the likeliest tokens behind a context, all of which is computed."""
    spec = probe(plain_spec("likeliest", context, 1), (), len(context) - 1, reads_cache=False)
    assert spec is not None
    async with running(engine, f"likeliest-{uuid.uuid4().hex}", spec) as steps:
        (step,) = [step async for step in steps]
    (logprobs,) = decode_logprobs(step.rest or b"")
    return dict(logprobs.top)


async def agree(pair: EnginePair, prompt: list[int], want: Sequence[int], got: Sequence[int]) -> bool:
    """True if two answers are equal up to their end, or up to a tie."""
    parts = (index for index, (one, two) in enumerate(zip(want, got, strict=True)) if one != two)
    if (at := next(parts, None)) is None:
        return True
    found = await likeliest(pair["a"].engine, (*prompt, *want[:at]))
    return {want[at], got[at]} <= set(found) and abs(found[want[at]] - found[got[at]]) < TIE


async def forget(pair: EnginePair) -> None:
    for name in "ab":
        await pair[name].engine.reset_prefix_cache()


async def blocks_of(replica: RealReplica, pair: EnginePair, name: str, prompt: list[int], count: int) -> torch.Tensor:
    """The first cached blocks of a prompt, as [layers, blocks, heads, values of a head]."""
    engine, spec = replica.engine, pair._spec(name, prompt, 1, str(replica.id), None, {})
    held = await engine.hold_prefix(name, spec, ())
    assert held >= count
    found: dict[int, torch.Tensor] = {}
    try:
        with await replica.slots.lease() as slots:
            shards = await engine.gather(name, Blocks(0), Blocks(count), slots)
            for slot, shard, layout in zip(slots, shards, engine.fingerprint.layouts, strict=True):
                assert layout.head_axis in (0, None), "heads are outermost in a block, on CPU"
                values = torch.frombuffer(bytearray(slot.memory[HEADER : shard.size]), dtype=torch.float32)
                heads = values.view(layout.layers.size, count, layout.heads.size, -1).unbind(2)
                found |= dict(zip(range(*layout.heads), heads, strict=True))
    finally:
        engine.release_prefix(name)
    return torch.stack([found[head] for head in sorted(found)], dim=2)


@pytest.mark.parametrize(("source", "target"), ["ab", "ba"], ids=["one to two", "two to one"])
async def test_copied_blocks_are_the_sources_to_the_bit(unlike: EnginePair, source: str, target: str) -> None:
    """A prefix copy, after which the target computes nothing of it."""
    name, count = f"copied {source}", 9
    prompt = prompt_of(count * BLOCK + 7, name)
    want, _ = await unlike.run(f"{name} computed", prompt, OUTPUT, on=source)
    record = await unlike.copy(name, prompt, source, target)
    assert (record.outcome, record.held, record.present) == ("done", count, 0), record
    here = await blocks_of(unlike[source], unlike, f"{name} held at {source}", prompt, count)
    there = await blocks_of(unlike[target], unlike, f"{name} held at {target}", prompt, count)
    assert here.shape == there.shape and len(here.unique()) > 1000
    assert np.array_equal(here.numpy().view(np.int32), there.numpy().view(np.int32))
    before = unlike[target].host.prompts
    got, _ = await unlike.run(f"{name} continued", prompt, OUTPUT, on=target)
    assert await agree(unlike, prompt, want, got)
    assert unlike[target].host.prompts.cached - before.cached == count * BLOCK
    await forget(unlike)


@pytest.mark.parametrize("direct", [True, False], ids=["between the workers", "by messages"])
async def test_moves_both_ways_change_no_greedy_answer(
    unlike: EnginePair, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert row("`tensor_parallel_size`, unlike at both ends").how is How.KV
    monkeypatch.setattr(type(unlike["a"].transport), "direct", direct)
    draw = random.Random(f"resharding {direct}")
    committed: Counter[str] = Counter()
    ties = 0
    for number in range(MOVES):
        name, on = f"unlike {direct} {number}", "ab"[number % 2]
        prompt = prompt_of(draw.randrange(2 * BLOCK, 12 * BLOCK), name)
        want, _ = await unlike.run(f"{name} unmoved", prompt, OUTPUT, on=on)
        await forget(unlike)
        loaded = sum(unlike[replica].engine.blocks_loaded for replica in "ab")
        at = sorted(draw.sample(range(2, 120), 2))
        got, records = await unlike.run(f"{name} moved", prompt, OUTPUT, [(token, "kv") for token in at], on)
        assert await agree(unlike, prompt, want, got), records
        ties += got != want
        assert len(set(want)) > 20, "the model repeats itself: equality would prove nothing"
        loaded = sum(unlike[replica].engine.blocks_loaded for replica in "ab") - loaded
        by_kv = [record for record in records if record.outcome is Outcome.COMMITTED and record.path is Path.KV]
        assert loaded >= sum(record.blocks for record in by_kv), "moved blocks were not read"
        committed.update(str(record.source) for record in by_kv)
        await forget(unlike)
    assert min(committed["a"], committed["b"]) >= 0.75 * MOVES, committed
    assert ties <= MOVES // 4


async def test_hand_over_behind_the_prefill_changes_no_greedy_answer(unlike: EnginePair) -> None:
    """Blocks are copied while the prompt is prefilled; the context returns."""
    prompt = prompt_of(5 * CHUNK + 9, "handed over")
    want, _ = await unlike.run("handed over unmoved", prompt, OUTPUT, on="b", tenant="alone")
    got, record = await unlike.hand_over("handed over", prompt, OUTPUT, "tenant", True, OUTPUT // 2, {})
    assert await agree(unlike, prompt, want, got), record
    assert (record.outcome, record.path, record.cause) == (Outcome.COMMITTED, Path.KV, None), record
    assert record.rounds > 1, "blocks were copied during the prefill"


@pytest.mark.parametrize(
    ("on", "rank"),
    [("a", 0), ("b", 0), ("b", 1)],
    ids=["the only shard", "first", "second"],
)
async def test_corrupted_shard_changes_the_output(unlike: EnginePair, on: str, rank: int) -> None:
    name = f"corrupted {on} {rank}"
    prompt = prompt_of(6 * BLOCK + 3, name)
    want, _ = await unlike.run(f"{name} unmoved", prompt, 80, on=on)
    await forget(unlike)
    with noise_in_block(unlike[on], 2, rank) as noisy:
        got, (record,) = await unlike.run(f"{name} moved", prompt, 80, [(10, "kv")], on)
    assert (record.outcome, record.path) == (Outcome.COMMITTED, Path.KV) and len(noisy) == 1, record
    assert not await agree(unlike, prompt, want, got)
    await forget(unlike)
