"""Moves of requests on engines with other caches, other steps and other layers than those of Mell's own tiny model."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from app.tinymodel import ensure_tiny_model
from deployments.engine.port import Tie
from migration.protocol.record import Outcome
from policies.plan import Path
from tests.counts import LONG_ONLY
from tests.integration.models.pair import BLOCK, EnginePair, engine_pair, prompt_of
from tests.integration.models.rows import How, row
from tests.integration.models.tiny import ensure_model

GREEDY: Mapping[str, Any] = {}
FEW_TOKENS = {"allowed_token_ids": [7, 8, 9, 10, 11]}
"""Output that repeats itself, so that drafts made of it are accepted."""
GRAMMAR = {"structured_outputs": {"regex": "(ab|cd|ef){300}", "_backend": "xgrammar"}}
"""vLLM's frontend adds the backend."""
SEEDED = {"temperature": 0.9, "seed": 7}
NGRAMS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}

PROMPT, OUTPUT = 9 * BLOCK + 5, 5 * BLOCK
MOVES = (20, 70, 111)
"""The output tokens behind which a request moves: forth, back, and forth again."""


@dataclass(frozen=True, slots=True)
class Case:
    """An engine, and the kinds of requests that are compared. Models and draft models go by their names."""

    feature: str
    model: str = "llama"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    samplings: Sequence[Mapping[str, Any]] = (GREEDY,)


CASES = (
    Case("Models with full attention (Llama, Qwen, Mixtral)", "experts"),
    Case(
        "Speculative decoding with n-grams",
        kwargs={"speculative_config": NGRAMS},
        samplings=(GREEDY, FEW_TOKENS, GRAMMAR, {"repetition_penalty": 1.3}, {"logprobs": 2}, {"min_tokens": 120}),
    ),
    Case(
        "Speculative decoding with a draft model",
        kwargs={
            "speculative_config": {
                "method": "draft_model",
                "model": "llama",
                "num_speculative_tokens": 3,
            }
        },
    ),
    Case(
        "Speculative decoding with EAGLE or MTP",
        kwargs={
            "speculative_config": {"method": "eagle", "model": "eagle", "num_speculative_tokens": 3},
        },
    ),
    Case("`kv_cache_dtype: fp8`", kwargs={"kv_cache_dtype": "fp8"}),
    Case("Sliding windows in some layers (Gemma 3, gpt-oss, Olmo 3)", "mixed"),
    Case(
        "the same with `disable_hybrid_kv_cache_manager: true`",
        "mixed",
        {"disable_hybrid_kv_cache_manager": True},
    ),
    # So few blocks that those in front of a window are another request's soon after they are freed.
    Case(
        "Sliding windows in all layers (Mistral 7B v0.1)",
        "sliding",
        {"num_gpu_blocks_override": 48, "max_model_len": 1024, "max_num_batched_tokens": 256},
    ),
    Case("`enable_prefix_caching: false`", kwargs={"enable_prefix_caching": False}),
)


def folder(model: str) -> str:
    return str(ensure_tiny_model() if model == "llama" else ensure_model(model))


def kwargs_of(case: Case) -> dict[str, Any]:
    """The engine's arguments, with the folder of its draft model."""
    drafting = dict(case.kwargs.get("speculative_config", {}))
    if "model" in drafting:
        drafting["model"] = folder(drafting["model"])
    return {**case.kwargs, **({"speculative_config": drafting} if drafting else {})}


@LONG_ONLY
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.feature)
async def test_moved_requests_have_the_answers_of_unmoved_ones(case: Case) -> None:
    async with engine_pair(folder(case.model), **kwargs_of(case)) as pair:
        for number, sampling in enumerate(case.samplings):
            await compare(pair, f"{case.feature} {number}", sampling, row(case.feature).how)
        if "speculative_config" in case.kwargs:
            await stays(pair, SEEDED, "Speculative decoding, requests with `seed` and a `temperature` above 0")


async def compare(pair: EnginePair, name: str, sampling: Mapping[str, Any], how: How) -> None:
    """Three requests at a time, unmoved and moved; then the beginning of one on the replicas to which it moved."""
    prompts = [prompt_of(PROMPT + 7 * i, f"{name} {i}") for i in range(3)]
    unmoved = await asyncio.gather(*(pair.run(f"{name} {i}", p, OUTPUT, **sampling) for i, p in enumerate(prompts)))
    want = [tokens for tokens, _ in unmoved]
    beginning, _ = await pair.run(f"{name} beginning", prompts[0][: 3 * BLOCK], 30)
    if sampling is GREEDY:
        assert len(set(want[0])) > 20, "the model repeats itself: equality would prove nothing"
    for path in ("auto", "tokens"):
        await pair.engine.reset_prefix_cache()
        loaded = pair.engine.blocks_loaded
        moves = [(at, path) for at in MOVES]
        moved = await asyncio.gather(
            *(pair.run(f"{name} {path} {i}", p, OUTPUT, moves, **sampling) for i, p in enumerate(prompts))
        )
        assert [tokens for tokens, _ in moved] == want, path
        committed = [r.path for _, records in moved for r in records if r.outcome is Outcome.COMMITTED]
        assert len(committed) >= len(MOVES) * len(prompts) / 2, [records for _, records in moved]
        by_kv = how is How.KV and path == "auto"
        # A copy that a busy machine delays falls back to tokens.
        assert committed.count(Path.KV) >= len(prompts) if by_kv else set(committed) == {Path.TOKENS}
        assert (pair.engine.blocks_loaded > loaded) == by_kv
        for replica in "ab":
            again, _ = await pair.run(f"{name} {path} on {replica}", prompts[0][: 3 * BLOCK], 30, on=replica)
            assert again == beginning, "moved blocks are where other requests find them"


async def stays(pair: EnginePair, sampling: Mapping[str, Any], feature: str) -> None:
    """A request that is not moved, and goes on in spite of the order."""
    assert row(feature).how is How.PLACED
    tokens, records = await pair.run(feature, prompt_of(PROMPT, feature), OUTPUT, [(20, "auto")], **sampling)
    assert (len(tokens), records, pair.refusals.pop()) == (OUTPUT, [], Tie.DRAFTED)
