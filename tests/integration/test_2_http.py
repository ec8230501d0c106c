"""The HTTP surface of the running application."""

import asyncio
import json
from typing import Any

import pytest

from tests.integration.application import Application, Client, eventually, prompt, request

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where do blocks move?"}]


async def test_models_version_and_health(application: Application) -> None:
    async with application.client() as client:
        model, *_ = (await client.http.get("/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("mell-tiny", 4096)
        assert (await client.http.get("/version")).json()["vllm"].startswith("0.32")
        assert (await client.http.get("/health")).status_code == 200
        assert (await client.http.get("/live")).status_code == 200


async def test_request_id_is_returned_once(application: Application) -> None:
    async with application.client() as client:
        body, headers = request(prompt(5, "id"), 2), {"X-Request-Id": "mine"}
        response = await client.http.post("/v1/completions", json=body, headers=headers)
        assert response.headers.get_list("x-request-id") == ["mine"]


async def test_stop_string_ends_the_answer_and_the_request(application: Application) -> None:
    async with application.client() as client:
        text, _ = await client.complete(prompt(30, "stop"), 60)
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        stopped, body = await client.complete(prompt(30, "stop"), 60, stop=stop)
        assert stopped == text[: text.find(stop)]
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] < 60
        await client.idle()


async def test_text_prompt_and_seed(application: Application) -> None:
    async with application.client() as client:
        drawn = [(await client.complete("Hello", 20, temperature=1, seed=s))[0] for s in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[]", 400),
        (b'{"prompt": ""}', 400),
        (b'{"prompt": "x", "max_tokens": -1}', 400),
        (b'{"prompt": "x", "model": "other"}', 404),
        (b'{"prompt": "x", "max_tokens": 5000}', 400),
        (b'{"prompt": "' + b"x" * (5 << 20) + b'"}', 413),
    ],
    ids=["broken", "not utf-8", "a list", "empty prompt", "negative", "other model", "too long", "huge"],
)
async def test_bad_input_is_refused_in_openais_shape(application: Application, body: bytes, status: int) -> None:
    async with application.client() as client:
        headers = {"Content-Type": "application/json"}
        response = await client.http.post("/v1/completions", content=body, headers=headers)
        assert response.status_code == status, response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        await client.idle()


# --- chats, and sampling under a move -----------------------------------------------------------------


async def test_a_streamed_chat_equals_the_whole_answer(application: Application) -> None:
    async with application.client() as client:
        body = {"messages": CHAT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        whole = (await client.http.post("/v1/chat/completions", json=body)).json()
        assert (whole["object"], whole["choices"][0]["finish_reason"]) == ("chat.completion", "length")
        tokens = (await client.http.post("/tokenize", json={"messages": CHAT})).json()
        usage = {"prompt_tokens": tokens["count"], "completion_tokens": 20, "total_tokens": tokens["count"] + 20}
        assert whole["usage"].items() >= usage.items()
        text = (await client.http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()["prompt"]
        assert text.startswith("system: Be brief.") and text.endswith("assistant:")
        stream = (await client.http.post("/v1/chat/completions", json={**body, "stream": True})).text
        *events, done = [line[6:] for line in stream.splitlines() if line]
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
        assert done == "[DONE]" and deltas[0]["role"] == "assistant"
        assert "".join(delta.get("content") or "" for delta in deltas) == whole["choices"][0]["message"]["content"]


async def under_way(client: Client, label: str, output: int) -> None:
    """Wait until a replica reports the request with that many tokens of output, prompts being short."""

    async def reported() -> bool:
        requests = [r for replica in await client.running() for r in replica["requests"]]
        return any(r["label"] == label and r["tokens"] > output + 60 for r in requests)

    await eventually(reported)


async def answer(client: Client, path: str, body: dict[str, Any], label: str) -> Any:
    """The text of an answer, its finish reason and its number of tokens."""
    response = await client.http.post(path, json=body, headers={"X-Request-Id": label})
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text, choice["finish_reason"], response.json()["usage"]["completion_tokens"]


LONG = 600
COMPLETION, CHATS = "/v1/completions", "/v1/chat/completions"
MOVABLE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a chat": ("tokens", CHATS, {"messages": CHAT, "max_tokens": LONG, "temperature": 0, "ignore_eos": True}),
    "its least and last tokens": (
        "kv",
        COMPLETION,
        request(prompt(20, "least"), LONG, min_tokens=350, stop_token_ids=list(range(20, 60))),
    ),
    "repetition penalty and biases": (
        "kv",
        COMPLETION,
        request(prompt(20, "penalty"), LONG, repetition_penalty=1.1, logit_bias={"7": 1.5, "8": -100}),
    ),
}


async def test_moved_requests_have_the_answers_of_unmoved_ones(application: Application) -> None:
    """All kinds run at once."""
    async with application.client() as client:

        async def moved(by: str, path: str, body: dict[str, Any], label: str) -> Any:
            asking = asyncio.create_task(answer(client, path, body, label))
            await under_way(client, label, 20)
            accepted = await client.move(label, path=by)
            assert accepted.status_code == 202, accepted.text
            assert (await client.outcome(accepted.json()["id"]))["outcome"] == "committed"
            return await asking

        unmoved = await asyncio.gather(*(answer(client, path, body, "unmoved") for _, path, body in MOVABLE.values()))
        asked = (moved(*kind, label=f"moved-{number}") for number, kind in enumerate(MOVABLE.values()))
        for kind, before, after in zip(MOVABLE.values(), unmoved, await asyncio.gather(*asked), strict=True):
            assert after == before, kind
            if "min_tokens" in kind[2]:
                assert before[1] == "stop" and 350 < before[2] < LONG
        await client.idle()
