"""The routes as seen by clients and operators: answers, streams, labels, disconnects, and orders."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from app.ingress.asgi import MAX_LABEL, read_label
from app.ingress.openai.model import Model
from deployments.api.calls import MoveAccepted, MoveRejected
from deployments.engine.tokens import expected
from migration.protocol.messages import PathRequest
from tests.app.ingress.fakes import PROMPT, Api, Exchange, body, events, eventually, make_api, make_service

TOKENS = expected(tuple(PROMPT), 60)
SLOW_S = 0.01
"""Slow enough that no request ends before its test ends it."""


def text_of(model: Model, tokens: tuple[int, ...]) -> str:
    """The text of the tokens, without an incomplete last character."""
    before = model.tokenizer.decode(PROMPT)
    whole: str = model.tokenizer.decode(PROMPT + list(tokens))
    assert whole.startswith(before) and not before.endswith("\ufffd")
    return whole[len(before) :].rstrip("\ufffd")


def choice(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    (only,) = response.json()["choices"]
    return only


# --- completions --------------------------------------------------------------------------------------


async def test_an_answer_has_text_reason_and_usage(api: Api) -> None:
    response = await api.complete(max_tokens=30, temperature=0)
    assert choice(response) == {
        "index": 0,
        "text": text_of(api.backend.model, TOKENS[:30]),
        "logprobs": None,
        "finish_reason": "length",
    }
    assert response.json()["usage"] == {"prompt_tokens": 40, "completion_tokens": 30, "total_tokens": 70}


async def test_an_answer_has_openais_members(api: Api) -> None:
    answer = (await api.complete(max_tokens=1)).json()
    assert answer["object"] == "text_completion" and answer["model"] == "tiny"
    assert answer["id"].startswith("cmpl-") and isinstance(answer["created"], int)


async def test_the_default_of_max_tokens_is_sixteen(api: Api) -> None:
    assert (await api.complete()).json()["usage"]["completion_tokens"] == 16


async def test_a_text_prompt_equals_its_tokens(api: Api) -> None:
    text = "A request is its token ids"
    ids = api.backend.model.tokenizer.encode(text).ids
    first, second = [(await api.complete(prompt=p, max_tokens=20)).json() for p in (text, ids)]
    assert first["choices"] == second["choices"] and first["usage"] == second["usage"]


@pytest.mark.parametrize("count", [1, 2, 16, 60])
async def test_a_stream_has_the_text_of_a_whole_answer(api: Api, count: int) -> None:
    whole = choice(await api.complete(max_tokens=count))
    chunks = events(await api.complete(max_tokens=count, stream=True))
    assert chunks.pop() == "[DONE]"
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["text"]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (count - 1) + ["length"]


async def test_a_stream_has_one_chunk_per_step_and_one_head(api: Api) -> None:
    chunks = events(await api.complete(max_tokens=12, stream=True))[:-1]
    assert len(chunks) == 12
    heads = [{k: c[k] for k in ("id", "object", "created", "model")} for c in chunks]
    assert all(head == heads[0] for head in heads) and heads[0]["object"] == "text_completion"
    assert all("usage" not in c for c in chunks)


async def test_usage_comes_last_in_a_stream_if_requested(api: Api) -> None:
    options = {"include_usage": True}
    chunks = events(await api.complete(max_tokens=5, stream=True, stream_options=options))[:-1]
    assert [c["usage"] for c in chunks[:-1]] == [None] * 5
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 40, "completion_tokens": 5, "total_tokens": 45}


async def test_a_stop_string_ends_the_answer_and_the_request(api: Api) -> None:
    text = text_of(api.backend.model, TOKENS[:40])
    stop = text[20:23]
    response = await api.complete(max_tokens=900, stop=["never-generated", stop])
    assert choice(response)["finish_reason"] == "stop"
    assert choice(response)["text"] == text[: text.index(stop)]
    assert response.json()["usage"]["completion_tokens"] < 60
    await api.backend.service.idle()


async def test_a_stop_string_ends_a_stream(api: Api) -> None:
    text = text_of(api.backend.model, TOKENS[:40])
    chunks = events(await api.complete(max_tokens=900, stop=text[20:23], stream=True))
    assert chunks.pop() == "[DONE]"
    assert "".join(c["choices"][0]["text"] for c in chunks) == text[: text.index(text[20:23])]
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["stop"]
    await api.backend.service.idle()


async def test_text_held_back_for_a_stop_string_is_sent_at_the_end(api: Api) -> None:
    whole = choice(await api.complete(max_tokens=30))["text"]
    chunks = events(await api.complete(max_tokens=30, stop=whole[-2:] + "?!", stream=True))[:-1]
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_slow_client_gets_every_chunk(model: Model) -> None:
    """All tokens are generated before the first chunk can be sent."""
    service = make_service("a", step_s=0.0001)
    api = make_api(model, service)
    whole = choice(await api.complete(max_tokens=40))["text"]
    exchange = Exchange(api, body(max_tokens=40, stream=True))
    exchange.gate.clear()
    await eventually(lambda: any(c.reader.cursor.finish for c in service.streams._live.values()))
    exchange.gate.set()
    await exchange.ended()
    data = b"".join(m.get("body", b"") for m in exchange.sent).decode()
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in data.split("\n\n")[:-2]]
    assert len(texts) == 40 and "".join(texts) == whole


async def test_many_clients_at_once_get_their_own_answers(api: Api) -> None:
    prompts = [[5 + n, 6, 7] for n in range(20)]
    answers = await asyncio.gather(
        *(api.complete(prompt=p, max_tokens=20, stream=n % 2 == 0) for n, p in enumerate(prompts))
    )
    alone = [choice(await api.complete(prompt=p, max_tokens=20))["text"] for p in prompts]
    together = [
        "".join(c["choices"][0]["text"] for c in events(a)[:-1]) if n % 2 == 0 else choice(a)["text"]
        for n, a in enumerate(answers)
    ]
    assert together == alone
    await api.backend.service.idle()


# --- errors after the start ---------------------------------------------------------------------------


async def test_an_error_during_a_stream_is_an_event_before_done(api: Api) -> None:
    service = api.backend.service
    service.tie()
    asking = asyncio.create_task(api.complete(max_tokens=900, stream=True))
    await eventually(lambda: any(load.tokens > 45 for load in service.replica("a").host.loads()))
    service.kill("a")
    *chunks, error, done = events(await asking)
    assert len(chunks) >= 5 and done == "[DONE]"
    assert error["error"]["type"] == "service_unavailable_error" and "seeded sampling" in error["error"]["message"]


async def test_the_same_error_is_the_status_of_a_whole_answer(api: Api) -> None:
    service = api.backend.service
    service.tie()
    asking = asyncio.create_task(api.complete(max_tokens=900))
    await eventually(lambda: any(load.tokens > 45 for load in service.replica("a").host.loads()))
    service.kill("a")
    response = await asking
    assert response.status_code == 503 and "seeded sampling" in response.json()["error"]["message"]


async def test_without_replicas_a_request_is_refused_with_503(model: Model) -> None:
    service = make_service("a", no_replica_timeout_s=0.1)
    service.kill("a")
    for stream in (False, True):
        response = await make_api(model, service).complete(stream=stream)
        assert response.status_code == 503 and response.json()["error"]["code"] == "unavailable"
    assert service.streams.count == 0


# --- clients that disconnect -------------------------------------------------------------------------------


def leave(exchange: Exchange, how: str) -> None:
    """Disconnect: receiving ends, sending fails, or Serve's proxy cancels the call."""
    match how:
        case "disconnect":
            exchange.disconnect()
        case "failure":
            exchange.fail()
        case "cancellation":
            exchange.task.cancel()


@pytest.mark.parametrize("how", ["disconnect", "failure", "cancellation"])
async def test_a_disconnect_during_a_stream_ends_its_request(model: Model, how: str) -> None:
    api = make_api(model, make_service(step_s=SLOW_S))
    exchange = Exchange(api, body(max_tokens=900, stream=True))
    await exchange.chunks(5)
    leave(exchange, how)
    await exchange.ended()
    await api.backend.service.idle()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["disconnect", "cancellation"])
async def test_a_disconnect_before_the_first_token_ends_its_request(model: Model, how: str, stream: bool) -> None:
    service = make_service(step_s=3)
    exchange = Exchange(make_api(model, service), body(max_tokens=900, stream=stream))
    await eventually(lambda: bool(list(service.replica("a").host.loads())))
    leave(exchange, how)
    async with asyncio.timeout(2):
        await exchange.ended()
        await service.idle()


@pytest.mark.parametrize("how", ["disconnect", "cancellation"])
async def test_a_disconnect_during_a_whole_answer_ends_its_request(model: Model, how: str) -> None:
    api = make_api(model, make_service(step_s=SLOW_S))
    service = api.backend.service
    exchange = Exchange(api, body(max_tokens=900))
    await eventually(lambda: any(load.tokens > 45 for load in service.replica("a").host.loads()))
    leave(exchange, how)
    await exchange.ended()
    await service.idle()
    assert exchange.sent == []


async def test_a_disconnect_before_the_first_byte_ends_its_request(model: Model) -> None:
    """The stream of events has not begun and cannot clean up."""
    api = make_api(model, make_service(step_s=SLOW_S))
    service = api.backend.service
    exchange = Exchange(api, body(max_tokens=900, stream=True))
    exchange.gate.clear()
    await eventually(lambda: service.streams.count == 1)
    await asyncio.sleep(0.01)
    exchange.task.cancel()
    await exchange.ended()
    await service.idle()


@pytest.mark.parametrize("how", ["disconnect", "cancellation"])
async def test_a_disconnect_while_waiting_for_a_replica_leaves_nothing(model: Model, how: str) -> None:
    service = make_service("a", no_replica_timeout_s=30)
    service.kill("a")
    exchange = Exchange(make_api(model, service), body(stream=True))
    await eventually(lambda: service.streams.count == 1)
    leave(exchange, how)
    await exchange.ended()
    assert service.streams.count == 0 and not service.placer._sent


async def test_a_disconnect_during_the_body_leaves_nothing(api: Api) -> None:
    exchange = Exchange(api, b"")
    exchange._incoming.get_nowait()
    exchange._incoming.put_nowait({"type": "http.request", "body": b'{"prompt"', "more_body": True})
    exchange._incoming.put_nowait({"type": "http.disconnect"})
    await exchange.ended()
    await api.backend.service.idle()


# --- labels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "label"),
    [
        (None, None),
        ("", None),
        ("my-request_1", "my-request_1"),
        ("<script>\u00e9 x", "scriptx"),
        ("a" * 1000, "a" * MAX_LABEL),
        ("\u00e9\u00e9", None),
        ('"}\\n', "n"),
    ],
    ids=["none", "empty", "harmless", "markup", "long", "nothing left", "quotes"],
)
def test_labels_are_short_and_harmless(header: str | None, label: str | None) -> None:
    assert read_label(header) == label


async def labels_while_running(api: Api, headers: dict[str, str] | None) -> tuple[str, str]:
    asking = asyncio.create_task(api.complete(headers, max_tokens=200))
    await eventually(lambda: bool(list(api.backend.service.replica("a").host.loads())))
    state = (await api.get("/mell/state")).json()
    (request,) = [r for replica in state["replicas"] for r in replica["requests"]]
    await asking
    return request["id"], request["label"]


async def test_the_label_of_a_request_is_its_x_request_id(api: Api) -> None:
    assert (await labels_while_running(api, {"X-Request-Id": "mine<>" + "x" * 300}))[1] == "mine" + "x" * 124


async def test_the_default_label_is_the_request_id(api: Api) -> None:
    own, label = await labels_while_running(api, None)
    assert own == label and own.startswith("cmpl-")


# --- the other routes ---------------------------------------------------------------------------------


async def test_the_model_is_listed(api: Api) -> None:
    listed = (await api.get("/v1/models")).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 1024)


@pytest.mark.parametrize("reason", ["starting: 0 of 2 replicas run", "no replica accepts requests"])
async def test_health_gives_the_reason(api: Api, reason: str) -> None:
    api.backend.unhealthy = reason
    response = await api.get("/health")
    assert (response.status_code, response.json()["error"]["message"]) == (503, reason)
    assert (await api.get("/live")).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/live"])
async def test_a_healthy_service_answers_ok(api: Api, path: str) -> None:
    response = await api.get(path)
    assert (response.status_code, response.text) == (200, "OK")


async def test_versions_are_listed(api: Api) -> None:
    assert (await api.get("/version")).json()["vllm"] == "2"


async def test_internal_errors_reveal_no_details(api: Api) -> None:
    api.backend.health = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    response = await api.get("/health")
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "internal error",
        "type": "server_error",
        "param": None,
        "code": None,
    }


# --- operators ----------------------------------------------------------------------------------------

ADMIN = [("GET", "/mell/state"), ("GET", "/mell/migrations"), ("POST", "/mell/migrations")]


@pytest.mark.parametrize(("method", "path"), ADMIN)
@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1"])
async def test_without_an_admin_key_loopback_has_access(api: Api, method: str, path: str, address: str) -> None:
    api.address = (address, 1)
    response = await api.send(method, path, **({"json": {"request_id": "x"}} if method == "POST" else {}))
    assert response.status_code in (200, 404)


@pytest.mark.parametrize(("method", "path"), ADMIN)
@pytest.mark.parametrize("address", ["10.0.0.1", "192.168.1.1", "2001:db8::1", "testclient", ""])
async def test_without_an_admin_key_other_addresses_have_no_access(
    api: Api, method: str, path: str, address: str
) -> None:
    api.address = (address, 1)
    response = await api.send(method, path, headers={"X-Forwarded-For": "127.0.0.1"})
    assert response.status_code == 403 and "ingress.admin_key" in response.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path"), ADMIN)
@pytest.mark.parametrize(
    "given",
    ["", "Bearer", "Bearer wrong-key", "Bearer secret-key ", "secret-key", "Basic secret-key", "Bearer \u00e9"],
)
async def test_with_an_admin_key_it_is_required(api: Api, method: str, path: str, given: str) -> None:
    api.backend.require("secret-key!")
    headers = {"Authorization": given.encode("latin-1")} if given else {}
    response = await api.send(method, path, headers=headers)
    assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
    assert "secret-key!" not in response.text


async def test_the_admin_key_gives_access_from_anywhere(api: Api) -> None:
    api.backend.require("secret-key!")
    api.address = ("10.0.0.1", 1)
    response = await api.get("/mell/state", headers={"Authorization": "Bearer secret-key!"})
    assert response.status_code == 200


async def order(api: Api, **fields: Any) -> httpx.Response:
    return await api.post("/mell/migrations", json=fields)


async def test_an_order_moves_a_running_request_by_its_label(api: Api) -> None:
    asking = asyncio.create_task(api.complete({"X-Request-Id": "mine"}, max_tokens=400))
    await eventually(lambda: any(load.tokens > 50 for load in api.backend.service.replica("a").host.loads()))
    accepted = await order(api, request_id="mine", target="b", path="kv")
    assert accepted.status_code == 202 and set(accepted.json()) == {"id"}
    assert choice(await asking)["text"] == text_of(api.backend.model, expected(tuple(PROMPT), 400))
    (record,) = api.backend.service.replica("a").moves.records()
    assert (record.id, record.outcome, record.path) == (accepted.json()["id"], "committed", "kv")
    await api.backend.service.idle()


@pytest.mark.parametrize("path", list(PathRequest))
async def test_an_order_names_request_target_and_path(api: Api, path: PathRequest) -> None:
    api.backend.answer = MoveAccepted("m1")
    response = await order(api, request_id="x", target="b", path=path.value)
    assert (response.status_code, response.json()) == (202, {"id": "m1"})
    assert api.backend.asked == [("x", "b", path)]


async def test_target_and_path_are_optional(api: Api) -> None:
    api.backend.answer = MoveAccepted("m1")
    assert (await order(api, request_id="x")).status_code == 202
    assert api.backend.asked == [("x", None, PathRequest.AUTO)]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, "not_found_error"),
        (409, "conflict_error"),
        (422, "invalid_request_error"),
        (503, "service_unavailable_error"),
    ],
)
async def test_a_refused_order_has_its_reason_in_openais_shape(api: Api, status: int, kind: str) -> None:
    api.backend.answer = MoveRejected(status, "because", {"candidates": [{"id": "r1"}]})
    response = await order(api, request_id="x")
    assert response.status_code == status
    assert response.json()["error"] == {
        "message": "because",
        "type": kind,
        "param": None,
        "code": None,
        "candidates": [{"id": "r1"}],
    }


BAD_ORDERS: dict[str, tuple[bytes, str | None]] = {
    "no body": (b"", None),
    "broken JSON": (b"{", None),
    "a list": (b"[]", None),
    "null": (b"null", None),
    "invalid UTF-8": (b'{"request_id": "\xff"}', None),
    "a hundred thousand brackets": (b"[" * 100_000, None),
    "a huge number": (b'{"request_id": ' + b"9" * 5000 + b"}", None),
    "no request": (b"{}", "request_id"),
    "an empty request": (b'{"request_id": ""}', "request_id"),
    "a request that is a number": (b'{"request_id": 5}', "request_id"),
    "a lone surrogate": (b'{"request_id": "\\ud800"}', None),
    "a target that is a list": (b'{"request_id": "x", "target": []}', "target"),
    "a target with a lone surrogate": (b'{"request_id": "x", "target": "\\ud800"}', None),
    "an unknown path": (b'{"request_id": "x", "path": "air"}', "path"),
    "a path that is a list": (b'{"request_id": "x", "path": []}', "path"),
    "a path that is null": (b'{"request_id": "x", "path": null}', "path"),
    "an unknown member": (b'{"request_id": "x", "to": "b"}', "to"),
    "an unknown member with a lone surrogate": (b'{"request_id": "x", "\\ud800": "b"}', None),
}


@pytest.mark.parametrize(("content", "param"), BAD_ORDERS.values(), ids=BAD_ORDERS)
async def test_an_invalid_order_is_a_400_that_names_the_member(api: Api, content: bytes, param: str | None) -> None:
    response = await api.post("/mell/migrations", content=content, headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error"), response.text
    assert param is None or error["param"] == param
    assert error["message"] and not api.backend.asked


async def test_a_web_page_cannot_give_orders(api: Api) -> None:
    """A page may post text/plain to loopback without a CORS preflight, but not JSON."""
    response = await api.post(
        "/mell/migrations", content=b'{"request_id": "x"}', headers={"Content-Type": "text/plain"}
    )
    assert response.status_code == 415 and not api.backend.asked
