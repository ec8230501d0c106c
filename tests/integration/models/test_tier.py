"""A tier of host memory on a real engine: answers are those of computed contexts, wherever their KV comes from."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from app.tinymodel import ensure_tiny_model
from migration.protocol.record import Outcome
from policies.plan import Path
from policies.prefix.tree import HeldPrefix
from tests.counts import LONG_ONLY
from tests.integration.models.pair import BLOCK, EnginePair, engine_pair, prompt_of

PROMPT, OUTPUT = 9 * BLOCK + 5, 3 * BLOCK
SIZES: Mapping[str, Any] = {"num_gpu_blocks_override": 81, "max_num_batched_tokens": 256, "max_model_len": 2400}
KINDS: tuple[Mapping[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 7},
    {"repetition_penalty": 1.3},
    {"logprobs": 2},
    {"structured_outputs": {"regex": "(ab|cd|ef){300}", "_backend": "xgrammar"}},
)
"""Greedy and seeded sampling, penalties, logprobs, and a grammar."""


async def evict(pair: EnginePair, name: str) -> None:
    """Have other contexts take all blocks of the accelerator."""
    for number in range(2):
        await pair.run(f"{name} evicting {number}", prompt_of(1500, f"{name} {number}"), 1)


def loaded(pair: EnginePair) -> int:
    return pair["a"].host.prompts.loaded


@LONG_ONLY
async def test_answers_from_host_memory_are_those_of_computed_contexts() -> None:
    async with engine_pair(str(ensure_tiny_model()), dram_gib=0.25, **SIZES) as pair:
        for number, kind in enumerate(KINDS):
            await answers_are_equal(pair, f"kind {number}", kind)
            await copies_are_equal(pair, f"copied {number}", kind)
        await moves_are_equal(pair)
        await preempted_requests_are_equal(pair)
        pair.engine._feed.resync()  # type: ignore[union-attr]
        await asyncio.sleep(0.5)
        mirror = pair.engine.mirror
        assert mirror.exact and mirror.resyncs == {"start": 1} and mirror.checks > 1


async def answers_are_equal(pair: EnginePair, name: str, kind: Mapping[str, Any]) -> None:
    """Cold, from the accelerator's memory, from the host's, and a second turn with the output of the first."""
    prompt = prompt_of(PROMPT, name)
    cold, _ = await pair.run(f"{name} cold", prompt, OUTPUT, **kind)
    warm, _ = await pair.run(f"{name} warm", prompt, OUTPUT, **kind)
    await evict(pair, name)
    before = loaded(pair)
    host, _ = await pair.run(f"{name} host", prompt, OUTPUT, **kind)
    assert (warm, host) == (cold, cold) and loaded(pair) - before == PROMPT // BLOCK * BLOCK, name
    turn = [*prompt, *cold, *prompt_of(20, name)]
    await evict(pair, f"{name} again")
    before = loaded(pair)
    second, _ = await pair.run(f"{name} second", turn, OUTPUT, **kind)
    assert loaded(pair) - before == (PROMPT + OUTPUT - 1) // BLOCK * BLOCK, "decoded KV is kept, too"
    await pair.engine.delete(None)
    computed, _ = await pair.run(f"{name} second, computed", turn, OUTPUT, **kind)
    assert second == computed, name


async def copies_are_equal(pair: EnginePair, name: str, kind: Mapping[str, Any]) -> None:
    """A donor whose blocks are in the host's memory alone, or only the last of them, loads these and copies all."""
    prompt, blocks = prompt_of(PROMPT, name), PROMPT // BLOCK
    cold, _ = await pair.run(f"{name} cold", prompt, OUTPUT, **kind)
    for part, first in (("all", 0), ("rest", 4)):
        await evict(pair, f"{name} {part}")
        if first:
            await pair.run(f"{name} {part} beginning", prompt[: first * BLOCK + 1], 1)
        assert await present(pair, "a", prompt) == HeldPrefix(first, blocks - first)
        record = await pair.copy(f"{name} {part}", prompt, "a", "b")
        assert (record.outcome, record.held, record.present) == ("done", blocks, 0), record
        before = pair["b"].host.prompts
        copied, _ = await pair.run(f"{name} {part} copied", prompt, OUTPUT, on="b", **kind)
        assert copied == cold, name
        assert pair["b"].host.prompts.cached - before.cached == blocks * BLOCK, "all of it was copied"
        await pair.engine.delete(pair.names("b", prompt))


async def present(pair: EnginePair, replica: str, prompt: Sequence[int]) -> HeldPrefix:
    """The first blocks of a prompt in the accelerator's memory, and those behind them in the host's."""
    await asyncio.sleep(0.2)  # The events of the last step are on their way.
    return pair.engine.mirror.held(pair.names(replica, prompt))


async def moves_are_equal(pair: EnginePair) -> None:
    """Requests that move while the tier stores and loads beside them; then their contexts, from the host."""
    prompts = [prompt_of(PROMPT + 7 * i, f"moved {i}") for i in range(3)]
    unmoved = await asyncio.gather(*(pair.run(f"unmoved {i}", p, OUTPUT) for i, p in enumerate(prompts)))
    await evict(pair, "moved")
    moves = [(20, "kv"), (50, "kv"), (80, "tokens")]
    moved = await asyncio.gather(*(pair.run(f"moved {i}", p, OUTPUT, moves) for i, p in enumerate(prompts)))
    assert [tokens for tokens, _ in moved] == [tokens for tokens, _ in unmoved]
    records = [record for _, each in moved for record in each]
    assert sum(r.outcome is Outcome.COMMITTED and r.path is Path.KV for r in records) >= 3
    await evict(pair, "arrived")
    again, _ = await pair.run("arrived", prompts[0], OUTPUT, on="b")
    assert again == unmoved[0][0], "moved blocks are kept like computed ones"


async def preempted_requests_are_equal(pair: EnginePair) -> None:
    """Requests that need more blocks than there are: a preempted one gets its KV from the host."""
    prompts = [prompt_of(500 + i, f"preempted {i}") for i in range(5)]
    before = pair.engine.stats().preemptions
    together = await asyncio.gather(*(pair.run(f"together {i}", p, 400) for i, p in enumerate(prompts)))
    assert pair.engine.stats().preemptions > before
    alone = [await pair.run(f"alone {i}", p, 400) for i, p in enumerate(prompts)]
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
