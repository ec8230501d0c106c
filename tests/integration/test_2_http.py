"""The HTTP surface of the running application."""

import pytest

from tests.integration.application import Application, prompt, request


async def test_models_version_and_health(application: Application) -> None:
    async with application.client() as client:
        (model,) = (await client.http.get("/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("mell-tiny", 4096)
        assert (await client.http.get("/version")).json()["vllm"].startswith("0.32")
        assert (await client.http.get("/health")).status_code == 200
        assert (await client.http.get("/live")).status_code == 200


async def test_request_id_comes_back_once(application: Application) -> None:
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
