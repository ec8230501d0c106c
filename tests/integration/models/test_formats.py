"""Formats of structured output with parameters beside them, between two real engines: a random selection.

The two engines have compiled grammars of several backends, in another order each. All combinations, in process:
tests/migration/kv/test_grammars.py.
"""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from vllm.tokenizers import cached_tokenizer_from_config

from migration.protocol.continuing import plain_spec
from migration.protocol.record import Outcome
from migration.run.outputs import running
from policies.causes import Cause
from policies.plan import Path
from tests.counts import LONG_ONLY
from tests.integration.models.pair import BLOCK, EnginePair, RequestLostError, prompt_of
from tests.migration.kv.formats import BESIDE, FORMATS, sampling_of

CASES, AT_ONCE, TOKENS = 150, 3, 150
MOVES = ((2, "kv"), (20, "tokens"), (50, "kv"), (80, "tokens"))
REFUSED_BY_SOME = ("ends not allowed", "few allowed", "banned")
"""Parameters that often leave no token: guidance then goes on as a rule, and the other backends end the request."""


def drawn() -> list[tuple[str, str, str]]:
    """Backends, formats and parameters."""
    every = [
        (backend, form, beside)
        for backend, forms in FORMATS.items()
        for form in forms
        for beside in BESIDE
        if backend == "guidance" or beside not in REFUSED_BY_SOME
    ]
    return random.Random(20261127).sample(every, CASES)


async def continued(
    pair: EnginePair, name: str, prompt: Sequence[int], outputs: tuple[int, ...], **sampling: Any
) -> Any:
    """The output of a request whose replica has died behind `outputs`."""
    tokens, spec = [*outputs], plain_spec(name, tuple(prompt), TOKENS, **sampling)
    async with running(pair["b"].engine, name, spec, outputs) as steps:
        async for step in steps:
            tokens += step.tokens
    return tuple(tokens)


@LONG_ONLY
@pytest.mark.asyncio(loop_scope="package")
async def test_formats_beside_other_parameters_move(two_engines: EnginePair) -> None:
    pair, cases = two_engines, drawn()
    config = pair.engine._core.vllm_config
    tokenizer = cached_tokenizer_from_config(config.model_config)
    paths, ended = list[Path](), list[tuple[str, str, str]]()

    async def compare(case: tuple[str, str, str]) -> None:
        (backend, form, beside), name = case, " ".join(case)
        prompt, params = prompt_of(2 * BLOCK + 5, name), {"temperature": 0.9, "seed": 7, **BESIDE[beside]}
        sampling = sampling_of(config, tokenizer, backend, FORMATS[backend][form], TOKENS, **params)
        try:
            want, _ = await pair.run(f"{name} unmoved", prompt, TOKENS, **sampling)
        except RequestLostError:  # The parameters have left it no token.
            ended.append(case)
            return
        got, records = await pair.run(f"{name} moved", prompt, TOKENS, MOVES, **sampling)
        assert got == want, (case, records)
        assert all(record.cause is not Cause.GRAMMAR for record in records), records
        paths.extend(record.path for record in records if record.outcome is Outcome.COMMITTED)
        if len(want) > 1:
            assert await continued(pair, name, prompt, want[: len(want) // 2], **sampling) == want, case

    for first in range(0, CASES, AT_ONCE):
        await asyncio.gather(*(compare(case) for case in cases[first : first + AT_ONCE]))
    assert len(ended) < CASES / 10, ended
    assert min(paths.count(path) for path in Path) > CASES / 3, paths
