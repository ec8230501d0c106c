"""Requests that exceed their time limit: the error for the client, and the release of everything."""

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from app.frontend.guard.dialects import OPENAI
from app.ingress.access.admission import Gate
from app.ingress.asgi import TrackedSend, within
from app.ingress.errors import ApiError
from tests.app.ingress.fakes import Api, Exchange, body, events, make_api, make_service

pytestmark = pytest.mark.virtual_time

SHORT_S = 0.2


def slow_api(step_s: float = 0.01, **options: Any) -> Api:
    """An API whose answers of 900 tokens take seconds; the time limit is a fraction of one."""
    options = {"gate": Gate(max_requests=1), "request_timeout_s": SHORT_S, **options}
    return make_api(make_service(step_s=step_s), **options)


async def left_nothing(api: Api) -> None:
    await api.backend.service.idle()
    assert api.backend.gate.running == 0


async def test_a_whole_answer_that_takes_too_long_is_a_504() -> None:
    api = slow_api()
    response = await api.complete(max_tokens=900)
    assert response.status_code == 504
    assert response.json()["error"] == {
        "message": "the request took longer than 0.2 s",
        "type": "timeout_error",
        "param": None,
        "code": "timeout",
    }
    await left_nothing(api)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_that_takes_too_long_ends_with_an_error_and_done(path: str) -> None:
    api = slow_api()
    fields: dict[str, Any] = {"max_tokens": 900, "stream": True, "stream_options": {"include_usage": True}}
    response = await (api.complete(**fields) if path == "/v1/completions" else api.chat(**fields))
    *chunks, error, done = events(response)
    assert len(chunks) > 3 and all("choices" in chunk for chunk in chunks) and done == "[DONE]"
    assert set(error) == {"error"} and error["error"]["code"] == "timeout"
    await left_nothing(api)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_long_wait_for_a_replica_is_a_504(stream: bool) -> None:
    service = make_service("a", no_replica_timeout_s=30)
    service.kill("a")
    api = make_api(service, gate=Gate(max_requests=1), request_timeout_s=SHORT_S)
    response = await api.complete(stream=stream)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    await left_nothing(api)


async def test_a_slow_body_is_a_504() -> None:
    api = slow_api()
    exchange = Exchange(api, b"")
    exchange._incoming.get_nowait()
    exchange._incoming.put_nowait({"type": "http.request", "body": b'{"prompt"', "more_body": True})
    await exchange.ended()
    assert exchange.sent[0]["status"] == 504
    await left_nothing(api)


async def test_a_client_that_does_not_read_holds_nothing_after_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.ingress.asgi._LAST_EVENT_S", 0.5)
    api = slow_api()
    exchange = Exchange(api, body(max_tokens=900, stream=True))
    await exchange.chunks(2)
    exchange.gate.clear()
    await api.backend.service.idle()
    assert not exchange.task.done(), "the request ends before the client gets its error"
    await exchange.ended()
    assert exchange.task.exception() is None
    assert exchange.sent[-1]["more_body"], "the server cuts a connection whose answer is not complete"
    await left_nothing(api)


async def test_a_request_within_its_time_is_not_disturbed() -> None:
    api = slow_api(step_s=0.001, request_timeout_s=30.0)
    whole = await api.complete(max_tokens=20)
    *chunks, done = events(await api.complete(max_tokens=20, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole.json()["choices"][0]["text"]
    assert done == "[DONE]"


async def test_a_disconnected_client_gets_no_time_out() -> None:
    api = slow_api(request_timeout_s=30.0)
    exchange = Exchange(api, body(max_tokens=900, stream=True))
    await exchange.chunks(2)
    exchange.disconnect()
    await exchange.ended()
    await left_nothing(api)


# --- `within` --------------------------------------------------------------------------


async def _receive() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def run(app: Any) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await within(0.02, app, {"type": "http"}, _receive, TrackedSend(send), OPENAI.ending)
    return sent


def start(media_type: str) -> Message:
    headers = [(b"content-type", media_type.encode())]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def answering(*messages: Message) -> Any:
    """An application that sends the messages and never ends."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)
        await asyncio.Event().wait()

    return app


async def test_a_stream_ends_with_one_error() -> None:
    _, last = await run(answering(start("text/event-stream; charset=utf-8")))
    assert not last["more_body"]
    error, done = last["body"].decode().split("\n\n")[:-1]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "timeout" and done == "data: [DONE]"


@pytest.mark.parametrize(
    "messages",
    [
        [start("application/json")],
        [start("application/json"), {"type": "http.response.body", "body": b"{"}],
        [start("text/event-stream"), {"type": "http.response.body", "body": b"", "more_body": False}],
    ],
    ids=["headers", "a whole answer", "a stream that is complete"],
)
async def test_nothing_is_added_to_other_answers(messages: list[Message]) -> None:
    assert await run(answering(*messages)) == messages


async def test_an_inner_time_out_is_not_the_requests() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise TimeoutError("inside")

    with pytest.raises(TimeoutError, match="inside"):
        await run(app)


async def test_before_the_first_byte_it_is_an_error() -> None:
    with pytest.raises(ApiError) as error:
        await run(answering())
    assert error.value.status == 504
