"""Requests that move by KV while their prompt is computed, between two real engines."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from deployments.config import Caching
from migration.kv.staging import HEADER
from migration.protocol.messages import Shard
from migration.protocol.ports import Slot
from migration.protocol.record import MigrationRecord, Outcome
from policies.model import Blocks
from policies.plan import Path
from tests.counts import LONG_ONLY, scaled
from tests.integration.models.pair import BLOCK, CHUNK, EnginePair, RealReplica, prompt_of

HANDOVERS, AT_ONCE = scaled(60), 3
TURNS, OUTPUT, ASKED = 3, 40, 20
CONVERSATIONS = scaled(60) // TURNS
"""Their turns are the hand-overs of each caching setting."""
NOISY = 6 * CHUNK + 5
"""The tokens of a prompt with a noisy block."""
CALL = {
    "type": "object",
    "properties": {"name": {"enum": ["move"]}, "why": {"type": "string", "minLength": 200}},
    "required": ["name", "why"],
}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 7},
    {"structured_outputs": {"json": {"type": "array", "minItems": 1, "items": CALL}, "_backend": "xgrammar"}},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "min_tokens": 20},
    {"logprobs": 2},
    {"structured_outputs": {"regex": "(ab|cd|ef){300}", "_backend": "xgrammar"}},
)
"""Greedy and seeded sampling, a call of a tool, penalties, logprobs, and a grammar."""
IN_FLIGHT = 4
"""Tokens that a replica may have computed beyond those with which a request leaves it."""


@pytest.mark.asyncio(loop_scope="package")
async def test_requests_move_during_their_prefill(two_engines: EnginePair) -> None:
    await moved_requests_give_what_unmoved_ones_give(two_engines)
    for index in (0, NOISY // BLOCK - 1):
        await noise_in_one_block_changes_the_output(two_engines, index)
    await noise_in_a_block_that_returns_is_noticed(two_engines)


@pytest.mark.asyncio(loop_scope="package")
@pytest.mark.parametrize(
    "caching", [pytest.param(each, marks=() if each is Caching.FULL else LONG_ONLY) for each in Caching]
)
async def test_conversations_give_what_uncached_ones_give(two_engines: EnginePair, caching: Caching) -> None:
    """Each turn is handed over from a to b, which find of earlier turns what the setting says."""
    for first in range(0, CONVERSATIONS, AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, CONVERSATIONS))
        await asyncio.gather(*(converse(two_engines, caching, number) for number in numbers))
        await forget(two_engines)


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
    """Until as many requests as are asked for were followed: an order may come when a prompt is computed already."""
    draw = random.Random(20240607)
    followed: list[MigrationRecord] = []
    outputs: list[tuple[int, ...]] = []
    for first in range(0, 3 * HANDOVERS, AT_ONCE):
        if len(followed) >= HANDOVERS:
            break
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
            outputs.append(want)
            if by_kv(record):
                assert record.blocks >= (len(prompt) - BLOCK) // BLOCK, record
                followed.append(record)
    assert len(followed) >= HANDOVERS, "most orders came too late"
    assert sum(record.rounds > 1 for record in followed) > len(followed) / 2, "blocks were copied during the prefill"
    assert len(set(outputs)) > 0.9 * len(outputs), "the model repeats itself: equality would prove nothing"


async def converse(pair: EnginePair, caching: Caching, number: int) -> None:
    draw = random.Random(f"conversation {number}")
    asked = answered = range(1)
    """The blocks that are known of the context from its turn before: at the end of its prefill, and at its own."""
    context = prompt_of(draw.randrange(4 * BLOCK, 5 * CHUNK), f"conversation {number}")
    pair["a"].hide_handed_over(caching is Caching.PREFILL)
    for turn in range(TURNS):
        name, kind = f"{caching} {number}.{turn}", KINDS[(TURNS * number + turn) % len(KINDS)]
        tenant = name if caching is Caching.NONE else f"{caching}"
        found = {
            Caching.NONE: (range(1), range(1)),
            Caching.PREFILL: (asked, range(1)),
            Caching.DECODE: (asked, answered),
            Caching.FULL: (answered, answered),
        }[caching]
        await cached(pair, context, tenant, found)
        want, _ = await pair.run(f"{name} unmoved", context, OUTPUT, on="b", tenant=f"{name} alone", **kind)
        back = OUTPUT // 2 if turn == TURNS - 1 else None
        got, record = await pair.hand_over(name, context, OUTPUT, tenant, caching is Caching.FULL, back, kind)
        assert got == want, (name, len(context), record)
        assert (record.outcome, record.path, record.cause) == (Outcome.COMMITTED, Path.KV, None), record
        assert record.present in found[1] and record.tokens is not None, record
        # Some steps may have been in flight as the request left a.
        asked = range((record.tokens - 1) // BLOCK, (record.tokens + IN_FLIGHT) // BLOCK + 1)
        blocks = (len(context) + len(got) - 1) // BLOCK
        answered = range(blocks, blocks + 1)
        context = [*context, *got, *prompt_of(ASKED, name)]


async def cached(pair: EnginePair, context: Sequence[int], tenant: str, blocks: tuple[range, range]) -> None:
    """Wait until a and b have as many blocks of a context: the last ones of an answer return, and events follow."""
    names = [(replica, pair.names(replica, context, tenant)) for replica in "ab"]
    async with asyncio.timeout(20):
        while True:
            held = [pair[replica].engine.mirror.held(there).hbm for replica, there in names]
            if held[0] in blocks[0] and held[1] in blocks[1]:
                return
            assert held[0] <= blocks[0][-1] and held[1] <= blocks[1][-1], (tenant, held, blocks)
            await asyncio.sleep(0.01)


async def noise_in_one_block_changes_the_output(pair: EnginePair, index: int) -> None:
    """The first one is copied during the prefill, the last one in the pause."""
    prompt = prompt_of(NOISY, f"noise {index}")
    want, _ = await pair.run(f"without noise {index}", prompt, 60)
    await forget(pair)
    with noise_in_block(pair["a"], index) as noisy:
        got, record = await pair.run_and_move_early(f"with noise {index}", prompt, 60, CHUNK)
    assert by_kv(record) and len(noisy) == 1
    assert got != want
    await forget(pair)


async def noise_in_a_block_that_returns_is_noticed(pair: EnginePair) -> None:
    """Its checksum ends the copy, and the next turn computes the answer."""
    prompt, output = prompt_of(NOISY, "returned"), 3 * BLOCK
    with noise_in_block(pair["b"], NOISY // BLOCK + 1) as noisy:
        got, _ = await pair.hand_over("returned", prompt, output, "returned", True, None, {})
        async with asyncio.timeout(20):
            while not (pair["b"].copies.made.ended and noisy):
                await asyncio.sleep(0.01)
            while pair["b"].copies.outgoing:
                await asyncio.sleep(0.01)
    context = [*prompt, *got, *prompt_of(ASKED, "returned next")]
    assert len(noisy) == 1 and pair["a"].engine.mirror.held(pair.names("a", context, "returned")).hbm == NOISY // BLOCK
    want, _ = await pair.run("returned alone", context, output, tenant="returned alone")
    again, _ = await pair.hand_over("returned next", context, output, "returned", False, None, {})
    assert again == want
    await forget(pair)


@contextmanager
def noise_in_block(donor: RealReplica, index: int, rank: int = 0) -> Iterator[list[str]]:
    """Noise in one worker's copies of a context's block that leave a replica; the names of the contexts that had it.

    The workers, which otherwise exchange the blocks by themselves, leave them to the replicas.
    """
    gather, noisy = donor.engine.gather, list[str]()

    async def with_noise(key: str, first: Blocks, last: Blocks, slots: Sequence[Slot]) -> Sequence[Shard]:
        shards = await gather(key, first, last, slots)
        if first <= index < last:
            size = (shards[rank].size - HEADER) // (last - first)
            begin = HEADER + (index - first) * size
            values = np.frombuffer(slots[rank].memory[begin : begin + size], dtype=np.float32)
            values += np.random.default_rng(0).normal(scale=3, size=values.shape).astype(np.float32)
            noisy.append(key)
        return shards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(donor.transport), "direct", False)
        patch.setattr(donor.engine, "gather", with_noise)
        yield noisy
