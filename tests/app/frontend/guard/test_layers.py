"""The layers around an application: what reaches it, what clients get instead, and what a call leaves behind."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from app.frontend.calls import CURRENT, EngineRequest
from app.frontend.guard.bodies import MAX_STOPS
from app.frontend.guard.layers import guarded, vllm_environment, vllm_media_domains
from app.frontend.guard.models import GuardedModels
from app.frontend.guard.routes import CLOSED_ROUTES, OPEN_ROUTES
from app.ingress.access.admission import Gate
from app.ingress.access.classes import ClassChooser
from app.ingress.access.keys import ApiKey, digest
from app.ingress.access.limits import KeyLimits
from app.ingress.config import Tenancy
from app.ingress.errors import ApiError
from app.ingress.telemetry.requests import RequestTelemetry
from app.settings import IngressSettings
from deployments.metrics.exposition import merge
from migration.protocol.ports import Loss, LossKind
from migration.protocol.reading import Reader
from policies.precedence import ServiceClass, ServiceClasses
from tests.app.ingress.fakes import Exchange, GuardedApp
from tests.deployments.metrics.test_exposition import parsed
from tests.migration.world import spec

pytestmark = pytest.mark.virtual_time

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
KEY = {"Authorization": "Bearer alice-key"}
CONTEXT = 64
Handler = Callable[[Request], Awaitable[ASGIApp]]


async def echo(http: Request) -> ASGIApp:
    """Answers with what has reached it."""
    headers = {name: value for name, value in http.headers.items()}
    body = await http.body()
    return JSONResponse({"body": json.loads(body) if body else None, "headers": headers, "query": http.url.query})


def used(tokens: int, prompt: int = 40, finish: str | None = "length", name: str = "cmpl-1") -> None:
    """The current call runs a request, to its end if there is a finish reason."""
    call, reader = CURRENT.get(), Reader()
    assert call is not None
    reader.cursor.tokens.extend(range(tokens))
    reader.cursor.finish = finish
    call.add(EngineRequest(name, spec(f"r{len(call.requests)}", prompt=prompt), reader))


class Guarded:
    """An application of one handler behind the layers, its client, and the log lines of its calls."""

    def __init__(
        self, handler: Handler = echo, gate: Gate | None = None, tenancy: Tenancy = Tenancy.ALL, **settings: Any
    ) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await (await handler(Request(scope, receive)))(scope, receive, send)

        self.gate = gate or Gate()
        self.telemetry = RequestTelemetry("tiny")
        made = IngressSettings(**settings)
        models = GuardedModels([GuardedApp(app, made, context=CONTEXT, tenancy=tenancy)])
        self.app = guarded(models, self.gate, self.telemetry, made)

    async def post(
        self, path: str = COMPLETIONS, headers: Mapping[str, str] | None = None, method: str = "POST", **body: Any
    ) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://mell", trust_env=False) as client:
            return await client.request(method, path, json=body or {"prompt": "x"}, headers=headers)

    def exchange(self, body: bytes = b'{"prompt": "x"}', headers: dict[str, str] | None = None) -> Exchange:
        return Exchange(SimpleNamespace(app=self.app), body, COMPLETIONS, headers)  # type: ignore[arg-type]

    @property
    def metrics(self) -> dict[str, dict[tuple[str, ...], float]]:
        return parsed(merge([self.telemetry.expose("i")]))


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """The log lines of requests so far."""
    with caplog.at_level(logging.INFO, logger="ray.serve.mell.request"):
        yield lambda: [record.__dict__["request"] for record in caplog.records if "request" in record.__dict__]


def keys(**limits: int) -> Gate:
    return Gate([ApiKey("alice", digest("alice-key"), KeyLimits(**limits))], clock=lambda: 1000.0)


# --- routes -----------------------------------------------------------------------------------------------

UNKNOWN = ["/", "/v1", "/v1/", "/v1/completions/", "/v1/models/tiny", "//v1/models", "/v1/completions%2Fx"]
RESPONSE = {path.replace("{response_id}", "resp_1"): why for path, why in CLOSED_ROUTES.items()}
CLOSED = RESPONSE | dict.fromkeys([*UNKNOWN, "/v1/responses/a/b", "/v1/messages/batches"], "Not Found")


@pytest.mark.parametrize(("path", "why"), CLOSED.items(), ids=CLOSED)
async def test_other_routes_do_not_exist_and_say_why(path: str, why: str) -> None:
    async def reached(http: Request) -> ASGIApp:
        raise AssertionError(path)

    for method in ("GET", "POST", "DELETE", "OPTIONS"):
        response = await Guarded(reached).post(path, method=method)
        body = response.json()
        assert (response.status_code, body["error"]["type"], body["error"]["message"]) == (404, "not_found_error", why)
        assert (body.get("type") == "error") == path.startswith(MESSAGES)


@pytest.mark.parametrize("route", OPEN_ROUTES.values(), ids=OPEN_ROUTES)
async def test_open_routes_have_one_method(route: Any) -> None:
    assert (await Guarded().post(route.path, method=route.method)).status_code == 200
    for method in {"GET", "POST", "HEAD", "OPTIONS", "DELETE", "PUT", ""} - {route.method}:
        response = await Guarded().post(route.path, method=method)
        assert (response.status_code, response.headers["allow"]) == (405, route.method)
        if method != "HEAD":
            assert ("type" in response.json()) == route.path.startswith(MESSAGES)


async def test_websockets_are_closed() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await Guarded().app({"type": "websocket", "path": COMPLETIONS}, asyncio.Event().wait, send)  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1000}]


# --- the head ---------------------------------------------------------------------------------------------


async def test_of_the_head_vllm_gets_label_and_priority() -> None:
    given = {
        "X-Request-Id": "mine\\!",
        "X-Vllm-Priority": "-7",
        "X-Data-Parallel-Rank": "3",
        "X-Session-ID": "s",
        "Origin": "http://evil.example",
        "Authorization": "Bearer k",
        "Cookie": "c",
        "Traceparent": "00-1-1-00",
        "Endpoint-Load-Metrics-Format": "json",
        "X-Amzn-SageMaker-Session-Id": "x",
        "Content-Encoding": "gzip",
    }
    response = await Guarded().post(COMPLETIONS + "?stream=true", headers=given)
    expected = {"content-type": "application/json", "x-request-id": "mine", "x-vllm-priority": "-7"}
    assert response.json() == {"body": {"prompt": "x"}, "headers": expected, "query": ""}


@pytest.mark.parametrize("priority", ["9" * 100, "x", "", "1.5", "+1", "1 "])
async def test_a_priority_that_is_no_number_is_dropped(priority: str) -> None:
    response = await Guarded().post(headers={"X-Vllm-Priority": priority})
    assert "x-vllm-priority" not in response.json()["headers"]


@pytest.mark.parametrize("label", ["a" * 100_000, "\x7f" * 10])
async def test_a_label_is_bounded(label: str) -> None:
    given = (await Guarded().post(headers={"X-Request-Id": label})).json()["headers"]
    assert given.get("x-request-id", "") == ("a" * 128 if label.startswith("a") else "")


async def test_the_models_are_listed_without_a_body() -> None:
    response = await Guarded().post("/v1/models", method="GET")
    assert response.json() == {"body": None, "headers": {"content-type": "application/json"}, "query": ""}


# --- the body ---------------------------------------------------------------------------------------------


async def test_a_body_that_is_too_large_is_not_read_whole(lines: Callable[[], list[dict[str, Any]]]) -> None:
    behind = Guarded(max_body_bytes=1024)
    response = await behind.post(prompt="x" * 2000)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    exchange = behind.exchange(body=b"")
    exchange._incoming.get_nowait()
    for _ in range(3):
        exchange._incoming.put_nowait({"type": "http.request", "body": b" " * 1000, "more_body": True})
    await exchange.ended()
    assert exchange.sent[0]["status"] == 413
    assert exchange._incoming.qsize() == 1, "the second message is beyond the limit"
    assert [line["outcome"] for line in lines()] == ["request_too_large"] * 2


async def test_other_media_types_are_refused() -> None:
    response = await Guarded().post(headers={"Content-Type": "text/plain"})
    assert response.status_code == 415


async def test_a_refused_body_is_named_and_does_not_reach_vllm(lines: Callable[[], list[dict[str, Any]]]) -> None:
    async def reached(http: Request) -> ASGIApp:
        raise AssertionError

    response = await Guarded(reached, max_choices=4).post(prompt=["x"] * 5)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, "prompt", "invalid_request_error")
    response = await Guarded(reached).post(prompt=[1] * (CONTEXT + 1))
    assert response.json()["error"]["code"] == "context_length_exceeded"
    response = await Guarded(reached, max_prompt_tokens=5).post(prompt=[1] * 6)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    url = {"type": "image_url", "image_url": {"url": "http://a.example/x.png"}}
    response = await Guarded(reached).post(CHAT, messages=[{"role": "user", "content": [url]}])
    assert response.json()["error"]["code"] == "media_not_allowed"
    assert [(line["status"], line["outcome"]) for line in lines()][:2] == [
        (400, "invalid_value"),
        (400, "context_length_exceeded"),
    ]


async def test_addresses_of_allowed_domains_pass() -> None:
    url = {"type": "image_url", "image_url": {"url": "http://a.example/x.png"}}
    behind = Guarded(allowed_media_domains=["a.example"])
    assert (await behind.post(CHAT, messages=[{"role": "user", "content": [url]}])).status_code == 200


def test_vllms_own_limits_fit() -> None:
    environment = vllm_environment(IngressSettings(max_choices=7, max_image_pixels=9))
    assert environment["VLLM_MAX_IMAGE_PIXELS"] == "9"
    assert environment["VLLM_MAX_COMPLETION_PROMPTS"] == environment["VLLM_MAX_N_SEQUENCES"] == "7"
    assert environment["VLLM_MAX_STOP_STRINGS"] == str(MAX_STOPS)
    assert vllm_media_domains(IngressSettings()) == ["media.invalid"], "to vLLM, no domain means all"
    assert vllm_media_domains(IngressSettings(allowed_media_domains=["a"])) == ["a"]


# --- keys and limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", OPEN_ROUTES.values(), ids=OPEN_ROUTES)
async def test_with_keys_clients_need_one(route: Any) -> None:
    behind = Guarded(gate=keys())
    anthropic = route.path.startswith(MESSAGES)
    for headers in ({}, {"Authorization": "Bearer eve"}, {"Authorization": "alice-key"}, {"X-Api-Key": "eve"}):
        response = await behind.post(route.path, headers, method=route.method)
        assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
        body = response.json()
        assert body["error"]["type"] == "authentication_error" and (body.get("type") == "error") == anthropic
        if not headers:
            assert "Authorization: Bearer" in body["error"]["message"] and "x-api-key" in body["error"]["message"]
    assert (await behind.post(route.path, KEY, method=route.method)).status_code == 200
    by_header = await behind.post(route.path, {"X-Api-Key": "alice-key"}, method=route.method)
    assert by_header.status_code == (200 if anthropic else 401)


async def test_without_a_key_the_body_is_not_read() -> None:
    exchange = Guarded(gate=keys()).exchange()
    exchange._incoming.get_nowait()
    await exchange.ended()
    assert exchange.sent[0]["status"] == 401


@pytest.mark.parametrize("path", [COMPLETIONS, MESSAGES])
async def test_requests_per_minute(path: str) -> None:
    behind = Guarded(gate=keys(requests_per_minute=1))
    assert (await behind.post(path, KEY)).status_code == 200
    response = await behind.post(path, KEY)
    assert (response.status_code, response.headers["retry-after"]) == (429, "60")
    assert response.json()["error"]["type"] == "rate_limit_error"


async def test_a_saturated_ingress_refuses() -> None:
    behind = Guarded(gate=Gate(max_requests=0))
    response = await behind.post()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "saturated")
    assert (await behind.post(MESSAGES)).json()["error"]["type"] == "overloaded_error"
    assert (await behind.post("/v1/models", method="GET")).status_code == 200


CLASSES = ServiceClasses({"batch": ServiceClass(-1), "chat": ServiceClass(1)})


def classed(*allowed: str, max_requests: int | None = None) -> Gate:
    key = ApiKey("alice", digest("alice-key"), classes=allowed)
    return Gate([key] if allowed else (), max_requests, chooser=ClassChooser(CLASSES, {"flex": "batch"}))


async def shown_class(http: Request) -> ASGIApp:
    """Answers with the class that the core below finds."""
    call = CURRENT.get()
    assert call is not None
    return JSONResponse({"class": call.service_class})


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES, "/tokenize", "/v1/embeddings"])
async def test_a_call_has_the_class_of_its_header_or_service_tier(
    path: str, lines: Callable[[], list[dict[str, Any]]]
) -> None:
    behind = Guarded(shown_class, classed())
    asked = [({"X-Mell-Class": "chat"}, {}), ({}, {"service_tier": "flex"}), ({}, {"service_tier": "auto"}), ({}, {})]
    found = [(await behind.post(path, headers, prompt="x", **body)).json()["class"] for headers, body in asked]
    assert found == ["chat", "batch", "default", "default"] == [line["class"] for line in lines()]
    assert {labels[0] for labels in behind.metrics["mell_requests_total"]} == {"chat", "batch", "default"}


@pytest.mark.parametrize("path", [COMPLETIONS, MESSAGES])
async def test_classes_are_refused_as_the_routes_clients_expect(path: str) -> None:
    async def reached(http: Request) -> ASGIApp:
        raise AssertionError

    behind = Guarded(reached, classed("batch", "default"))
    wanted = {"unknown": (400, "invalid_request_error"), "chat": (403, "permission_error")}
    for name, (status, kind) in wanted.items():
        response = await behind.post(path, {**KEY, "X-Mell-Class": name})
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
        assert ("type" in response.json()) == (path == MESSAGES)
    assert "default, batch, chat" in (await behind.post(path, {**KEY, "X-Mell-Class": "x"})).json()["error"]["message"]
    assert behind.gate.running == 0


async def test_a_call_without_a_class_has_the_first_one_of_its_key() -> None:
    response = await Guarded(shown_class, classed("chat", "batch")).post(headers=KEY)
    assert response.json() == {"class": "chat"}


async def test_lower_ranks_are_refused_first() -> None:
    async def wait(http: Request) -> ASGIApp:
        await asyncio.sleep(1000)
        return JSONResponse({})

    behind = Guarded(wait, classed(max_requests=10))
    low = [asyncio.create_task(behind.post(headers={"X-Mell-Class": "batch"})) for _ in range(9)]
    await asyncio.sleep(1)
    high = [asyncio.create_task(behind.post(headers={"X-Mell-Class": "chat"})) for _ in range(9)]
    await asyncio.sleep(1)
    refused = [[task.result() for task in tasks if task.done()] for tasks in (low, high)]
    assert [len(responses) for responses in refused] == [3, 6]
    assert {response.json()["error"]["code"] for responses in refused for response in responses} == {"saturated"}
    assert refused[0][0].headers["retry-after"] == "1" and behind.gate.running == 9
    await asyncio.gather(*low, *high)
    assert behind.gate.running == 0


async def test_the_class_of_a_client_does_not_reach_vllm() -> None:
    response = await Guarded(gate=classed()).post(headers={"X-Mell-Class": "chat"})
    assert response.json()["headers"] == {"content-type": "application/json"}


async def test_a_call_is_charged_its_maximum_and_settled_to_its_use() -> None:
    async def run(http: Request) -> ASGIApp:
        used(tokens=3, prompt=10)
        used(tokens=4, prompt=10)
        used(tokens=5, prompt=20, name="cmpl-2")
        return JSONResponse({})

    behind = Guarded(run, keys(tokens_per_minute=100))
    assert (await behind.post(headers=KEY, prompt=[1] * 50, max_tokens=50)).status_code == 200
    meter = behind.gate._meters["alice"]
    assert meter._tokens is not None and meter._tokens.level == 100 - (10 + 20 + 3 + 4 + 5)
    response = await behind.post(headers=KEY, prompt=[1] * 50, max_tokens=10)
    assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_a_call_that_vllm_refuses_costs_no_tokens() -> None:
    async def refuse(http: Request) -> ASGIApp:
        return JSONResponse({}, 400)

    behind = Guarded(refuse, keys(tokens_per_minute=100))
    for _ in range(3):
        assert (await behind.post(headers=KEY, prompt=[1] * 50, max_tokens=40)).status_code == 400


# --- time -------------------------------------------------------------------------------------------------


async def never(http: Request) -> ASGIApp:
    await http.body()
    await asyncio.Event().wait()
    raise AssertionError


async def stalled(http: Request) -> ASGIApp:
    await http.body()
    used(tokens=3, finish=None)

    async def chunks() -> Any:
        yield b"data: {}\n\n"
        await asyncio.Event().wait()

    return StreamingResponse(chunks(), media_type="text/event-stream")


@pytest.mark.parametrize("path", [COMPLETIONS, MESSAGES])
async def test_a_late_answer_is_a_504(path: str) -> None:
    behind = Guarded(never, request_timeout_s=5.0, gate=Gate(max_requests=1))
    response = await behind.post(path)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["message"]) == (
        504,
        "timeout_error",
        "the request took longer than 5 s",
    )
    assert behind.gate.running == 0


async def test_a_late_stream_ends_with_an_error_in_its_dialect() -> None:
    ends = {}
    for path in (COMPLETIONS, RESPONSES, MESSAGES):
        content = (await Guarded(stalled, request_timeout_s=5.0).post(path)).text
        ends[path] = content.removeprefix("data: {}\n\n")
    error, done, rest = ends[COMPLETIONS].split("\n\n")
    assert (
        json.loads(error.removeprefix("data: "))["error"]["code"] == "timeout" and done == "data: [DONE]" and not rest
    )
    body = json.loads(ends[MESSAGES].removeprefix("event: error\ndata: "))
    assert (body["type"], body["error"]["type"]) == ("error", "timeout_error")
    body = json.loads(ends[RESPONSES].removeprefix("event: response.failed\ndata: "))
    assert (body["type"], body["sequence_number"]) == ("response.failed", 1)
    assert body["response"]["error"]["message"] == "the request took longer than 5 s"
    assert body["response"]["usage"]["total_tokens"] == 43


# --- what a call leaves behind ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "key", "session"),
    [
        (None, None, ""),
        ("h", None, "h"),
        (None, "k", "k"),
        ("h", "k", "h"),
        (None, ["no name"], ""),
        ("x" * 257, None, ""),
    ],
)
async def test_a_call_may_name_its_session(header: str | None, key: Any, session: str) -> None:
    found: list[str] = []

    async def run(http: Request) -> ASGIApp:
        call = CURRENT.get()
        assert call is not None
        found.append(call.session)
        return JSONResponse({})

    headers = {} if header is None else {"X-Session-Id": header}
    body = {} if key is None else {"prompt_cache_key": key}
    await Guarded(run).post(CHAT, headers, **body)
    assert found == [session]


async def test_a_call_is_logged_and_counted(lines: Callable[[], list[dict[str, Any]]]) -> None:
    async def run(http: Request) -> ASGIApp:
        used(tokens=3, prompt=10)
        used(tokens=4, prompt=10, finish=None)
        return JSONResponse({})

    behind = Guarded(run, keys())
    await behind.post(CHAT, {**KEY, "X-Request-Id": "mine"})
    (line,) = lines()
    expected = {
        "id": "r0",
        "label": "mine",
        "endpoint": "chat",
        "key": "alice",
        "class": "default",
        "model": "tiny",
        "status": 200,
        "prompt_tokens": 10,
        "completion_tokens": 7,
        "outcome": "length+stop",
        "moves": 0,
        "resubmissions": 0,
    }
    assert expected.items() <= line.items()
    assert behind.metrics["mell_requests_total"] == {("default", "chat", "tiny", "length+stop", "i"): 1.0}
    assert behind.metrics["mell_request_completion_tokens_total"] == {("tiny", "i"): 7.0}


OUTCOMES: dict[str, tuple[int, str | None, str, int]] = {
    "an answer": (200, "stop", "stop", 200),
    "a refusal": (404, None, "not_found_error", 404),
    "a failure": (500, None, "server_error", 500),
}


@pytest.mark.parametrize(("status", "finish", "outcome", "logged"), OUTCOMES.values(), ids=OUTCOMES)
async def test_the_outcome_is_the_answers(
    lines: Callable[[], list[dict[str, Any]]], status: int, finish: str | None, outcome: str, logged: int
) -> None:
    async def run(http: Request) -> ASGIApp:
        if finish is not None:
            used(tokens=3, finish=finish)
        return JSONResponse({}, status)

    await Guarded(run).post()
    (line,) = lines()
    assert (line["outcome"], line["status"]) == (outcome, logged)


async def test_a_call_without_engine_requests_is_ok(lines: Callable[[], list[dict[str, Any]]]) -> None:
    await Guarded().post("/tokenize")
    (line,) = lines()
    assert (line["endpoint"], line["outcome"], line["status"]) == ("tokenize", "ok", 200)


async def test_a_client_that_left_is_logged_so(lines: Callable[[], list[dict[str, Any]]]) -> None:
    async def watch(http: Request) -> ASGIApp:
        await http.body()
        used(tokens=3, finish=None)
        while (await http.receive())["type"] != "http.disconnect":
            pass
        return JSONResponse(None)

    behind = Guarded(watch, keys(tokens_per_minute=1000))
    exchange = behind.exchange(headers=KEY)
    await asyncio.sleep(1)
    exchange.disconnect()
    await exchange.ended()
    (line,) = lines()
    assert (line["outcome"], line["status"], line["completion_tokens"]) == ("client_closed", 499, 3)
    meter = behind.gate._meters["alice"]
    assert meter._tokens is not None and meter._tokens.level == 1000 - 43


async def test_all_tasks_of_an_application_see_its_client_leave() -> None:
    """vLLM's handlers and Starlette's streams each watch for it."""

    async def patient(http: Request) -> ASGIApp:
        await http.body()
        messages = await asyncio.gather(http.receive(), http.receive())
        seen.extend(message["type"] for message in messages)
        return JSONResponse({})

    seen: list[str] = []
    api = Guarded(patient)
    exchange = api.exchange()
    await asyncio.sleep(1)
    assert not seen
    exchange.disconnect()
    await asyncio.sleep(1)
    assert seen == ["http.disconnect"] * 2
    assert len(asyncio.all_tasks()) == 1, "nothing watches any more"


# --- errors of the application ----------------------------------------------------------------------------

STATUSES = {
    400: "invalid_request_error",
    404: "not_found_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "api_error",
    501: "api_error",
    503: "overloaded_error",
}
"""Anthropic's types of errors."""
SHAPES: dict[str, Any] = {
    "OpenAI's": {"error": {"message": "so", "type": "BadRequestError", "param": None, "code": 400}},
    "Anthropic's with another type": {"type": "error", "error": {"type": "NotFoundError", "message": "so"}},
}


@pytest.mark.parametrize("body", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("status", "kind"), STATUSES.items())
async def test_on_messages_errors_have_anthropics_shape(status: int, kind: str, body: Any) -> None:
    async def refuse(http: Request) -> ASGIApp:
        return JSONResponse(body, status, {"Retry-After": "7"})

    response = await Guarded(refuse).post(MESSAGES)
    assert response.json() == {"type": "error", "error": {"type": kind, "message": "so"}}
    assert (response.status_code, response.headers["retry-after"]) == (status, "7")
    assert int(response.headers["content-length"]) == len(response.content)
    for path in (COMPLETIONS, CHAT, RESPONSES):
        assert (await Guarded(refuse).post(path)).json() == body, "vLLM's own shape"


@pytest.mark.parametrize("content", [b"", b"oh", b"[]", b'{"error": "so"}', b'{"detail": "so"}'])
async def test_on_messages_an_error_without_a_message_has_the_statuss_own(content: bytes) -> None:
    async def refuse(http: Request) -> ASGIApp:
        async def halves() -> Any:
            yield content[:3]
            yield content[3:]

        return StreamingResponse(halves(), 404, media_type="text/plain")

    response = await Guarded(refuse).post(MESSAGES)
    assert response.json() == {"type": "error", "error": {"type": "not_found_error", "message": "Not Found"}}
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES, MESSAGES])
async def test_an_exception_is_an_internal_error(
    lines: Callable[[], list[dict[str, Any]]], caplog: pytest.LogCaptureFixture, path: str
) -> None:
    async def fail(http: Request) -> ASGIApp:
        raise RuntimeError("a secret")

    response = await Guarded(fail).post(path)
    body = response.json()
    assert (response.status_code, body["error"]["message"]) == (500, "internal error")
    assert ("type" in body) == (path == MESSAGES)
    assert [line["outcome"] for line in lines()] == ["internal_error"] and "a secret" in caplog.text


def breaking(failure: ApiError | None, event: bytes | None = None) -> Handler:
    """Streams two events and then `event`, or breaks off."""

    async def stream(http: Request) -> ASGIApp:
        await http.body()
        used(tokens=3, finish=None)
        call = CURRENT.get()
        assert call is not None
        call.failure = failure

        async def chunks() -> Any:
            yield b'event: response.created\ndata: {"response": {"id": "resp_1", "status": "in_progress"}}\n\n'
            yield b"event: b\ndata: {}\n\n"
            if event is None:
                raise RuntimeError("a secret")
            yield event

        return StreamingResponse(chunks(), media_type="text/event-stream")

    return stream


UNTAKEN = ApiError.of(Loss(LossKind.UNAVAILABLE, "no replica is available"))
SUSPECT = ApiError.of(Loss(LossKind.SUSPECT, "two engines have died"))
BREAKS: dict[str, tuple[ApiError | None, int, str, str]] = {
    "no replica continues it": (UNTAKEN, 503, "no replica is available", "unavailable"),
    "engines have died": (SUSPECT, 503, "two engines have died", "engines_lost"),
    "a mistake": (None, 500, "internal error", "internal_error"),
}


@pytest.mark.parametrize(("failure", "status", "message", "outcome"), BREAKS.values(), ids=BREAKS)
async def test_a_stream_that_breaks_off_ends_with_an_error(
    lines: Callable[[], list[dict[str, Any]]], failure: ApiError | None, status: int, message: str, outcome: str
) -> None:
    ends = {}
    for path in (COMPLETIONS, RESPONSES, MESSAGES):
        response = await Guarded(breaking(failure)).post(path)
        assert response.status_code == 200
        ends[path] = response.text.split("\n\n", 2)[2]
    assert ends[COMPLETIONS].endswith("data: [DONE]\n\n") and message in ends[COMPLETIONS]
    event = json.loads(ends[RESPONSES].removeprefix("event: response.failed\ndata: "))
    assert (event["type"], event["sequence_number"]) == ("response.failed", 2)
    assert event["response"] == {
        "id": "resp_1",
        "status": "failed",
        "error": {"code": "server_error", "message": message},
        "usage": {
            "input_tokens": 40,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 43,
        },
    }
    kind = STATUSES[status]
    assert (
        ends[MESSAGES]
        == f"event: error\ndata: {json.dumps({'type': 'error', 'error': {'type': kind, 'message': message}})}\n\n"
    )
    assert {(line["outcome"], line["status"]) for line in lines()} == {(outcome, status)}


@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_no_replica_takes_has_the_status_and_headers_of_its_refusal(
    lines: Callable[[], list[dict[str, Any]]], path: str, stream: bool
) -> None:
    for failure, header in ((UNTAKEN, ("retry-after", "1")), (SUSPECT, ("x-should-retry", "false"))):
        response = await Guarded(refusing(failure, stream)).post(path)
        assert (response.status_code, response.headers[header[0]]) == (503, header[1])
        assert response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        assert error["message"] == failure.message and error.get("code", 503) == 503
        assert (error["type"] == "overloaded_error") == (path == MESSAGES)
    assert [(line["outcome"], line["status"]) for line in lines()] == [("unavailable", 503), ("engines_lost", 503)]


def refusing(failure: ApiError, stream: bool) -> Handler:
    """Answers as vLLM's application does if no replica takes a request."""

    async def refuse(http: Request) -> ASGIApp:
        await http.body()
        call = CURRENT.get()
        assert call is not None
        shape = {"error": {"message": failure.message, "type": "Service Unavailable", "param": None, "code": 503}}
        if not stream:
            call.failure = failure
            return JSONResponse(shape, 503)

        async def chunks() -> Any:
            if http.url.path == RESPONSES:
                yield b'event: response.created\ndata: {"response": {}}\n\n'
            call.failure = failure
            if http.url.path == RESPONSES:
                raise RuntimeError("vLLM has no event for it")
            kind = "event: error\n" if http.url.path == MESSAGES else ""
            yield f"{kind}data: {json.dumps(shape)}\n\n".encode()
            yield b"data: [DONE]\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    return refuse


async def test_the_head_of_a_stream_is_sent_once_a_replica_takes_the_request() -> None:
    taken, first_token = asyncio.Event(), asyncio.Event()

    async def stream(http: Request) -> ASGIApp:
        await http.body()

        async def chunks() -> Any:
            yield b"event: response.created\ndata: {}\n\n"
            await taken.wait()
            used(tokens=0, finish=None)
            await first_token.wait()
            yield b"data: [DONE]\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    exchange = Guarded(stream).exchange()
    await asyncio.sleep(1)
    assert not exchange.sent
    taken.set()
    await asyncio.sleep(1)
    assert [message["type"] for message in exchange.sent] == ["http.response.start", "http.response.body"]
    first_token.set()
    await exchange.ended()
    bodies = [message["body"] for message in exchange.sent if message.get("body")]
    assert bodies == [b"event: response.created\ndata: {}\n\n", b"data: [DONE]\n\n"]


@pytest.mark.parametrize(("failure", "status", "message", "outcome"), BREAKS.values(), ids=BREAKS)
async def test_an_error_event_of_messages_shows_no_internals(
    failure: ApiError | None, status: int, message: str, outcome: str
) -> None:
    shown = {"type": "error", "error": {"type": "internal_error", "message": "1 validation error for a class of vLLM"}}
    event = f"event: error\ndata: {json.dumps(shown)}\n\n".encode()
    *_, last, rest = (await Guarded(breaking(failure, event)).post(MESSAGES)).text.split("\n\n")
    error = {"type": STATUSES[status], "message": message}
    assert json.loads(last.removeprefix("event: error\ndata: ")) == {"type": "error", "error": error} and not rest


async def test_calls_do_not_mix() -> None:
    seen: list[Any] = []

    async def run(http: Request) -> ASGIApp:
        seen.append(CURRENT.get())
        await asyncio.sleep(1)
        seen.append(await asyncio.create_task(current()))
        return JSONResponse({})

    async def current() -> Any:
        return CURRENT.get()

    behind = Guarded(run)
    await asyncio.gather(*(behind.post(headers={"X-Request-Id": name}) for name in "ab"))
    await behind.post()
    assert sorted(call.label for call in seen) == ["", "", "a", "a", "b", "b"] and len(set(map(id, seen))) == 3
    assert CURRENT.get() is None, "the task of a call may go on with another one"


# --- caches -----------------------------------------------------------------------------------------------


async def tenants(gate: Gate | None, tenancy: Tenancy, calls: int = 1) -> list[str]:
    """The tenants of calls with alice's key."""
    found: list[str] = []

    async def seen(http: Request) -> ASGIApp:
        call = CURRENT.get()
        assert call is not None
        found.append(call.tenant)
        return JSONResponse({})

    behind = Guarded(seen, gate, tenancy)
    for _ in range(calls):
        await behind.post(headers={"authorization": "Bearer alice-key"})
    return found


@pytest.mark.parametrize(("tenancy", "tenant"), [(Tenancy.KEY, "alice"), (Tenancy.ALL, "")])
async def test_a_key_is_a_tenant_of_the_caches_if_keys_are_isolated(tenancy: Tenancy, tenant: str) -> None:
    assert await tenants(keys(), tenancy) == [tenant]
    assert await tenants(None, tenancy) == [""]


async def test_every_call_is_a_tenant_if_none_is_to_find_anything() -> None:
    assert len({"", *await tenants(keys(), Tenancy.CALL, 3)}) == 4
