"""Requests with adapters on real engines: the same answers moved or not, and no blocks of another adapter."""

import asyncio
from typing import Any

import pytest

from tests.adapters import ADAPTERS
from tests.counts import LONG_ONLY
from tests.integration.application import MODEL, Answer, Application, Client, prompt
from tests.integration.models.rows import How, row
from tests.integration.test_1_migration import loaded, moved

pytestmark = LONG_ONLY

MODELS = (MODEL, *ADAPTERS)
TOKENS = 300


async def asked(client: Client, tokens: list[int], count: int) -> list[str]:
    """The text of each model for one prompt."""
    return [(await client.complete(tokens, count, model=model))[0] for model in MODELS]


BY_KV = row("LoRA adapters").how is How.KV


@pytest.mark.parametrize("path", ["kv", "tokens"])
async def test_a_request_moves_with_its_adapter(application: Application, path: str) -> None:
    """One prompt, three models: what one has brought to a replica must not serve another."""
    tokens = prompt(400, f"adapters/{path}")
    async with application.client() as client:
        await client.settle()  # so that all runs begin on the same replica, and the other one has no blocks
        want = await asked(client, tokens, TOKENS)
        assert len({*want}) == len(want) and all(len({*text.split()}) > 10 for text in want)
        for model, text in zip(MODELS, want, strict=True):
            before = {r["id"]: r["kv_blocks_loaded"] for r in await client.running()}
            answer, (record,) = await moved(client, f"{path}-{model}", tokens, TOKENS, [10], [path], model=model)
            assert answer.text == text, (model, record)
            assert (record["outcome"], record["path"]) == ("committed", path if BY_KV else "tokens")
            if path == "kv":
                await loaded(client, record["target"], before, record["blocks"])
            await client.settle()


async def test_requests_with_all_adapters_move_at_once(application: Application) -> None:
    tokens = prompt(300, "all adapters")
    async with application.client() as client:
        # Long answers: Ray connects two replicas with the first call, which has taken more than a second.
        alone = await asyncio.gather(*(client.complete(tokens, 1000, model=model) for model in MODELS))
        want = [text for text, _ in alone]
        journeys = [([20, 60, 100], ["kv", "kv", "tokens"]), ([20, 60], ["tokens", "kv"]), ([20, 60], ["kv", "kv"])]
        outcomes: list[tuple[Answer, list[dict[str, Any]]]] = await asyncio.gather(
            *(
                moved(client, f"once-{model}", tokens, 1000, at, paths, model=model)
                for model, (at, paths) in zip(MODELS, journeys, strict=True)
            )
        )
        assert [answer.text for answer, _ in outcomes] == want, outcomes
        assert sum(r["outcome"] == "committed" for _, records in outcomes for r in records) >= 4, outcomes
