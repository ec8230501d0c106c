"""Requests that move by KV while their prompt is computed, between two real engines."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from migration.kv.staging import HEADER
from migration.protocol.messages import Shard
from migration.protocol.ports import Slot
from migration.protocol.record import MigrationRecord, Outcome
from policies.model import Blocks
from policies.plan import Path
from tests.counts import scaled
from tests.integration.models.pair import BLOCK, CHUNK, EnginePair, prompt_of

HANDOVERS, AT_ONCE = scaled(60), 3
NOISY = 6 * CHUNK + 5
"""The tokens of a prompt with a noisy block."""
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 7},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "min_tokens": 20},
    {"logprobs": 2},
    {"structured_outputs": {"regex": "(ab|cd|ef){300}", "_backend": "xgrammar"}},
)
"""Greedy and seeded sampling, penalties, logprobs, and a grammar."""


@pytest.mark.asyncio(loop_scope="package")
async def test_requests_move_during_their_prefill(two_engines: EnginePair) -> None:
    await moved_requests_give_what_unmoved_ones_give(two_engines)
    for index in (0, NOISY // BLOCK - 1):
        await noise_in_one_block_changes_the_output(two_engines, index)


async def forget(pair: EnginePair) -> None:
    """Empty both prefix caches, once nothing uses a block: then no block is at the target that was not copied there."""
    async with asyncio.timeout(20):
        for replica in pair.replicas.values():
            stats = replica.engine.stats
            while stats().free_blocks * BLOCK < stats().capacity_tokens or stats().running or replica.moves.pending:
                await asyncio.sleep(0.01)
            assert not replica.slots.in_use and not replica.host.reserved_tokens
            await replica.engine.delete(None)


def by_kv(record: MigrationRecord) -> bool:
    """True if a request was followed through its prefill to the end."""
    return (record.outcome, record.path, record.cause) == (Outcome.COMMITTED, Path.KV, None) and record.waited_s > 0


async def moved_requests_give_what_unmoved_ones_give(pair: EnginePair) -> None:
    draw = random.Random(20240607)
    records: list[MigrationRecord] = []
    outputs: set[tuple[int, ...]] = set()
    for first in range(0, HANDOVERS, AT_ONCE):
        cases = []
        for number in range(first, first + AT_ONCE):
            prompt = prompt_of(draw.randrange(3 * CHUNK, 14 * CHUNK), f"case {number}")
            cases.append((number, prompt, draw.randrange(0, len(prompt) - 2 * CHUNK), draw.choice("ab")))
        kinds = {number: KINDS[number % len(KINDS)] for number, *_ in cases}
        unmoved = await asyncio.gather(
            *(pair.run(f"unmoved {n}", prompt, 40, on=on, **kinds[n]) for n, prompt, _, on in cases)
        )
        await forget(pair)
        moved = await asyncio.gather(
            *(pair.run_and_move_early(f"moved {n}", prompt, 40, at, on, **kinds[n]) for n, prompt, at, on in cases)
        )
        await forget(pair)
        for (number, prompt, at, on), (want, _), (got, record) in zip(cases, unmoved, moved, strict=True):
            assert got == want, (number, len(prompt), at, on, record)
            records.append(record)
            outputs.add(want)
            assert not by_kv(record) or record.blocks >= (len(prompt) - BLOCK) // BLOCK, record
    followed = [record for record in records if by_kv(record)]
    assert len(followed) > 0.8 * len(records), [r for r in records if r not in followed]
    assert sum(record.rounds > 1 for record in followed) > len(followed) / 2, "blocks were copied during the prefill"
    assert len(outputs) > 0.9 * len(records), "the model repeats itself: equality would prove nothing"


async def noise_in_one_block_changes_the_output(pair: EnginePair, index: int) -> None:
    """The first one is copied during the prefill, the last one in the pause."""
    prompt = prompt_of(NOISY, f"noise {index}")
    want, _ = await pair.run(f"without noise {index}", prompt, 60)
    await forget(pair)
    engine, transport = pair["a"].engine, pair["a"].transport
    gather, noisy = engine.gather, list[int]()

    async def with_noise(key: str, first: Blocks, last: Blocks, slots: Sequence[Slot]) -> Sequence[Shard]:
        shards = await gather(key, first, last, slots)
        if first <= index < last:
            size = (shards[0].size - HEADER) // (last - first)
            begin = HEADER + (index - first) * size
            values = np.frombuffer(slots[0].memory[begin : begin + size], dtype=np.float32)
            values += np.random.default_rng(0).normal(scale=3, size=values.shape).astype(np.float32)
            noisy.append(index)
        return shards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(transport), "direct", False)  # the workers would exchange the blocks by themselves
        patch.setattr(engine, "gather", with_noise)
        got, record = await pair.run_and_move_early(f"with noise {index}", prompt, 60, CHUNK)
    assert by_kv(record) and noisy == [index]
    assert got != want
    await forget(pair)
