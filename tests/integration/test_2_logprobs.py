"""Logprobs and several choices on real engines: a move changes neither."""

import asyncio
from collections.abc import Sequence
from typing import Any

from tests.integration.application import Application, Client, eventually, prompt, request

LONG = 600
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where do blocks move?"}]
NOISE = 1e-4
"""Sums in another order: a moved context is computed in chunks, an unmoved one token by token."""

BODIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a completion": ("kv", COMPLETIONS, request(prompt(20, "logprobs"), LONG, logprobs=5)),
    "a chat": (
        "tokens",
        CHATS,
        {
            "messages": CHAT,
            "max_tokens": LONG,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": 20,
        },
    ),
    "two choices": (
        "kv",
        COMPLETIONS,
        request(prompt(20, "two"), LONG, n=2, logprobs=1, temperature=1, seed=7),
    ),
}


async def answer(client: Client, path: str, body: dict[str, Any], label: str) -> list[Any]:
    """The choices of an answer."""
    response = await client.http.post(path, json=body, headers={"X-Request-Id": label})
    assert response.status_code == 200, response.text
    choices: list[Any] = response.json()["choices"]
    return choices


async def under_way(client: Client, label: str, count: int) -> list[str]:
    """The ids of a request's choices, once replicas report that each has some output."""
    ids: list[str] = []

    async def reported() -> bool:
        requests = [r for replica in await client.running() for r in replica["requests"] if r["label"] == label]
        ids[:] = sorted(r["id"] for r in requests if r["tokens"] > 80)
        return len(ids) == count

    await eventually(reported)
    return ids


async def moved(client: Client, request_id: str, by: str) -> None:
    accepted = await client.move(request_id, path=by)
    assert accepted.status_code == 202, accepted.text
    assert (await client.outcome(accepted.json()["id"]))["outcome"] == "committed"


def flat(choice: Any) -> tuple[list[str], list[float], list[dict[str, float]]]:
    """Tokens, their logprobs, and the likeliest with theirs."""
    logprobs = choice["logprobs"]
    if "content" not in logprobs:
        return logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]
    content = logprobs["content"]
    likeliest = [{str(top["bytes"]): top["logprob"] for top in token["top_logprobs"]} for token in content]
    return [token["token"] for token in content], [token["logprob"] for token in content], likeliest


def farthest(ones: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(one - other) for one, other in zip(ones, others, strict=True))


def compare(one: Any, other: Any) -> None:
    """The same tokens, and nearly the same logprobs; who is likeliest may differ where two are as likely."""
    (tokens, logprobs, likeliest), (others, other_logprobs, other_likeliest) = flat(one), flat(other)
    assert tokens == others and len(tokens) == LONG
    assert farthest(logprobs, other_logprobs) < NOISE
    for ours, theirs in zip(likeliest, other_likeliest, strict=True):
        assert farthest(sorted(ours.values()), sorted(theirs.values())) < NOISE
        shared = ours.keys() & theirs.keys()
        assert len(shared) >= len(ours) - 1
        assert farthest([ours[key] for key in shared], [theirs[key] for key in shared]) < NOISE


async def test_moved_answers_have_the_logprobs_of_unmoved_ones(application: Application) -> None:
    """All requests run at once; of two choices, one moves."""
    async with application.client() as client:

        async def unmoved(path: str, body: dict[str, Any]) -> list[Any]:
            return await answer(client, path, body, "unmoved")

        async def moving(by: str, path: str, body: dict[str, Any], label: str) -> list[Any]:
            asking = asyncio.create_task(answer(client, path, body, label))
            first, *_ = await under_way(client, label, body.get("n", 1))
            await moved(client, first, by)
            return await asking

        want = await asyncio.gather(*(unmoved(path, body) for _, path, body in BODIES.values()))
        given = await asyncio.gather(
            *(moving(*body, label=f"scored-{number}") for number, body in enumerate(BODIES.values()))
        )
        for name, choices, same in zip(BODIES, given, want, strict=True):
            assert len(choices) == len(same) == BODIES[name][2].get("n", 1)
            for choice, before in zip(choices, same, strict=True):
                assert choice["index"] == before["index"]
                compare(choice, before)
                assert min(flat(before)[1]) < -0.1, "a model that is always sure would prove nothing"
        await client.idle()


async def test_seeded_choices_differ_and_repeat(application: Application) -> None:
    async with application.client() as client:
        body = request(prompt(20, "seeds"), 30, n=2, temperature=1, seed=7)
        first, again = [await answer(client, COMPLETIONS, body, "seeds") for _ in range(2)]
        alone = await answer(client, COMPLETIONS, {**body, "n": 1, "seed": 8}, "alone")
        assert first == again and first[0]["text"] != first[1]["text"] == alone[0]["text"]
