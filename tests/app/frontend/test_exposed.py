"""vLLM's application behind the guard, over fake replicas: hostile input, keys, limits, time, and the log lines."""

import asyncio
import gc
import gzip
import json
import logging
import resource
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import pytest_asyncio
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from starlette.routing import Route, WebSocketRoute
from vllm.config import ProfilerConfig
from vllm.entrypoints.launchers.api_server.routers import register_api_routers
from vllm.entrypoints.serve.tokenize.api_router import router as tokenizer_router
from vllm.tasks import POOLING_TASKS

from app.frontend.guard.layers import guarded
from app.frontend.guard.models import GuardedModels
from app.frontend.guard.routes import CLOSED_ROUTES, OPEN_ROUTES, RouteTask
from app.ingress.access.admission import Gate
from app.ingress.access.classes import ClassChooser
from app.ingress.access.keys import ApiKey, digest
from app.ingress.access.limits import KeyLimits
from app.ingress.http.control import ROUTES, ControlRoutes
from app.ingress.http.openapi import document
from app.ingress.telemetry.requests import RequestTelemetry
from app.ingress.telemetry.tracing import NoTracer
from app.service.api import VllmApi, describe_routes
from app.settings import IngressSettings
from deployments.metrics.exposition import merge
from policies.model import RequestId
from policies.precedence import ServiceClass, ServiceClasses
from tests.app.frontend.conftest import CONTEXT, FrontendApi, config, serving
from tests.app.ingress.fakes import Exchange, GuardedApp, events, eventually, make_service
from tests.counts import LONG
from tests.deployments.engine.quick_engine import set_pace
from tests.deployments.metrics.test_exposition import parsed
from tests.migration.world import INGRESS

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    # vLLM's code warns of some inputs; an error in its place would be an answer of its own.
    pytest.mark.filterwarnings("default"),
]

JSON = {"Content-Type": "application/json"}
KEY = {"Authorization": "Bearer alice-key"}
COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
BATCH, SCORING = "/v1/chat/completions/batch", "/generative_scoring"
USER = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 2},
    CHAT: {"messages": USER, "max_tokens": 2},
    RESPONSES: {"input": "Hi", "max_output_tokens": 2},
    MESSAGES: {"model": "mell-tiny", "messages": USER, "max_tokens": 2},
    BATCH: {"messages": [USER, USER], "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "mell-tiny", "messages": USER},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5, 6]},
}
"""A small valid body for every open route of a model that generates, but for that of scores."""
SCORES: dict[str, Any] = {"query": "Hi", "items": ["a", "b"], "label_token_ids": [5, 6]}
"""A small valid body for that one. The replicas here have logprobs of no such tokens."""
VALID = {**BODIES, SCORING: SCORES}

CPU_S = 5.0
MEMORY = 300 << 20
"""Bounds of what one hostile request may cost the ingress's process."""


CLASSES = ServiceClasses({"batch": ServiceClass(-1), "chat": ServiceClass(1)})


class Exposed:
    """The guarded application over a service, with settings and keys of its own."""

    def __init__(self, api: FrontendApi, gate: Gate | None = None, **settings: Any) -> None:
        self.service = api.service
        self.gate = gate or Gate()
        self.telemetry = RequestTelemetry("mell-tiny")
        made = IngressSettings(**settings)
        models = GuardedModels([GuardedApp(api.app, made, "mell-tiny", CONTEXT)])
        self.app = guarded(models, self.gate, self.telemetry, made)

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://mell", trust_env=False, timeout=60
        ) as client:
            return await client.request(method, path, **options)

    async def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return await self.send("POST", path, json={**BODIES[path], **body}, headers=headers)

    async def content(self, path: str, content: bytes, headers: dict[str, str] | None = None) -> httpx.Response:
        return await self.send("POST", path, content=content, headers={**JSON, **(headers or {})})

    def exchange(self, path: str, **body: Any) -> Exchange:
        content = json.dumps({**BODIES[path], **body}).encode()
        return Exchange(SimpleNamespace(app=self.app), content, path)  # type: ignore[arg-type]

    @property
    def untouched(self) -> bool:
        """True if no replica runs a request."""
        return not self.service.streams.count and all(r.idle for r in self.service.replicas.values())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[FrontendApi]:
    async with serving(config()) as served:
        for path in BODIES:  # what vLLM makes at its first use
            await Exposed(served).post(path)
        yield served


@pytest.fixture
def exposed(served: FrontendApi) -> Exposed:
    return Exposed(served)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """The log lines of requests so far."""
    with caplog.at_level(logging.INFO, logger="ray.serve.mell.request"):
        yield lambda: [record.__dict__["request"] for record in caplog.records if "request" in record.__dict__]


class Cost:
    """The time and memory that the `with` block's calls cost this process.

    No garbage is collected meanwhile: a full collection looks at everything that earlier cases have left in the
    process, which takes seconds after thousands of them.
    """

    def __enter__(self) -> None:
        gc.disable()
        self._began = time.process_time()
        self._memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def __exit__(self, *raised: object) -> None:
        gc.enable()
        if raised[0] is None:
            memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self._memory) << 10
            took = time.process_time() - self._began
            assert took < CPU_S and memory < MEMORY, f"{took:.2f} s, {memory >> 20} MiB"


ANTHROPICS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's types of errors."""


def refusal(response: httpx.Response, path: str, status: int = 400) -> Any:
    """The error of a refusal, in the shape of the route's API, and of a bounded size."""
    assert response.status_code == status, response.text[:300]
    assert len(response.content) < 20_000
    body = response.json()
    error = body["error"]
    assert error["message"] is not None and error["type"]
    if path.startswith(MESSAGES):
        assert body == {"type": "error", "error": {"type": ANTHROPICS[status], "message": error["message"]}}
    else:
        assert {"param", "code"} <= set(error)
    return error


# --- what is served ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
async def test_every_open_route_answers(exposed: Exposed, path: str) -> None:
    response = await exposed.post(path)
    assert response.status_code == 200, response.text


async def test_scores_are_asked_of_replicas(exposed: Exposed) -> None:
    error = refusal(await exposed.send("POST", SCORING, json=SCORES), SCORING)
    assert "not found in logprobs for item 0" in error["message"]
    error = refusal(await exposed.send("POST", SCORING, json={**SCORES, "items": ["a"] * 129}), SCORING)
    assert error["param"] == "items" and exposed.untouched


OWN = {"/health", "/ping", "/load", "/version", "/metrics", "/openapi.json"}
"""Routes of vLLM that Mell answers itself."""


def vllms_routes(served: FrontendApi, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The paths of all routes that vLLM's server has with some flags, in its developer mode, and for other models."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    monkeypatch.setattr(tokenizer_router, "routes", [*tokenizer_router.routes])  # to which vLLM adds
    state = served.frontend._application.state
    flags = {"enable_scale_out", "enable_tokenizer_info_endpoint", "enable_fault_tolerance", "enable_offline_docs"}
    application = FastAPI()
    profiler = ProfilerConfig(profiler="torch", torch_profiler_dir="/nowhere")
    application.state.args = Namespace(
        **{**vars(state.args), **dict.fromkeys(flags, True), "profiler_config": profiler}
    )
    tasks = ("generate", "transcription", "realtime", *POOLING_TASKS)
    register_api_routers(application.state.args, application, tasks, state.engine_client.model_config)
    return {str(route.path) for route in application.routes if isinstance(route, Route | WebSocketRoute)}


async def test_every_route_of_vllm_is_open_or_closed_with_a_reason(
    exposed: Exposed, served: FrontendApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = vllms_routes(served, monkeypatch) - OWN - {"/static"}
    assert {"/scale_elastic_ep", "/invocations", "/collective_rpc", "/update_weights", "/v1/load_lora_adapter"} <= paths
    assert paths - OPEN_ROUTES.keys() == CLOSED_ROUTES.keys() and not OPEN_ROUTES.keys() & CLOSED_ROUTES.keys()
    assert {path for path, route in OPEN_ROUTES.items() if route.task is not RouteTask.POOL} <= paths
    assert {route.path for route in served.frontend.routes} == {*BODIES, SCORING, "/v1/models"}


async def test_the_tokenizer_is_described_with_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_router, "routes", [*tokenizer_router.routes])
    async with serving(config(enable_tokenizer_info_endpoint=True)) as served:
        described = (await Exposed(served).send("GET", "/tokenizer_info")).json()
        assert described["tokenizer_class"] and "/tokenizer_info" in {route.path for route in served.frontend.routes}
        keys = Gate([ApiKey("alice", digest("alice-key"))])
        assert (await Exposed(served, keys).send("GET", "/tokenizer_info")).status_code == 401


async def test_without_its_flag_the_tokenizer_is_not_described(exposed: Exposed) -> None:
    assert (await exposed.send("GET", "/tokenizer_info")).status_code == 404


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
async def test_streams_pass_through(exposed: Exposed, served: FrontendApi, path: str) -> None:
    direct = await served.post(path, **BODIES[path], stream=True, temperature=0)
    response = await exposed.post(path, stream=True, temperature=0)
    assert response.headers["content-type"] == direct.headers["content-type"]
    assert response.text.count("\n\n") == direct.text.count("\n\n") > 2


async def test_the_label_is_vllms_name_and_the_logs(
    exposed: Exposed, lines: Callable[[], list[dict[str, Any]]]
) -> None:
    response = await exposed.post(COMPLETIONS, {"X-Request-Id": "mi ne\\"}, max_tokens=3)
    answer = response.json()
    assert answer["id"] == "cmpl-mine"
    (line,) = lines()
    usage = {"prompt_tokens": answer["usage"]["prompt_tokens"], "completion_tokens": 3}
    assert {"label": "mine", "outcome": "length", "status": 200, **usage}.items() <= line.items()
    assert 0 < line["ttft_s"] < line["duration_s"]
    metrics = parsed(merge([exposed.telemetry.expose("i")]))
    assert metrics["mell_request_ttft_seconds_count"][("default", "mell-tiny", "i")] == 1
    assert metrics["mell_request_itl_seconds_count"][("default", "mell-tiny", "i")] == 2


async def test_the_engines_request_belongs_to_its_calls_context(
    exposed: Exposed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traces depend on it: a request's span is in the context of its call."""
    caller: ContextVar[str] = ContextVar("caller")
    seen: list[str] = []

    class Recorder(NoTracer):
        def opened(self, request: RequestId) -> None:
            seen.append(caller.get("nobody"))

    monkeypatch.setattr(exposed.service.streams, "_tracer", Recorder())

    async def call(name: str) -> None:
        caller.set(name)
        await exposed.post(COMPLETIONS, n=2)

    await asyncio.gather(asyncio.create_task(call("a")), asyncio.create_task(call("b")))
    assert sorted(seen) == ["a", "a", "b", "b"]


async def test_a_key_pays_for_what_its_requests_use(served: FrontendApi) -> None:
    gate = Gate([ApiKey("alice", digest("alice-key"), KeyLimits(tokens_per_minute=100_000))], clock=lambda: 0.0)
    exposed = Exposed(served, gate)
    spent = 100_000
    for path, body in (
        (COMPLETIONS, {"prompt": ["Hi there", "Ho"], "n": 2, "max_tokens": 5}),
        (COMPLETIONS, {"prompt": "Hi", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}),
        (CHAT, {"n": 2}),
    ):
        response = await exposed.post(path, KEY, **body)
        answer = response.json() if not body.get("stream") else events(response)[-2]
        usage = answer["usage"]
        spent -= usage["prompt_tokens"] + usage["completion_tokens"]
        tokens = gate._meters["alice"]._tokens
        assert tokens is not None and tokens.level == spent
    assert (await exposed.post(MESSAGES, {"x-api-key": "alice-key"})).status_code == 200
    assert refusal(await exposed.post(MESSAGES, {"x-api-key": "eve"}), MESSAGES, 401)


async def test_sixteen_stop_strings_pass_vllms_own_limit(exposed: Exposed) -> None:
    stops = [f"<{n}>" for n in range(16)]
    assert (await exposed.post(COMPLETIONS, stop=stops)).status_code == 200
    assert (await exposed.post(MESSAGES, stop_sequences=stops)).status_code == 200
    refusal(await exposed.post(COMPLETIONS, stop=[*stops, "x"]), COMPLETIONS)


async def test_the_length_of_prompts_is_limited() -> None:
    async with serving(config().model_copy(update={"max_prompt_tokens": 4})) as served:
        exposed = Exposed(served, max_prompt_tokens=4)
        assert (await exposed.post(COMPLETIONS, prompt=[1, 2, 3, 4])).status_code == 200
        assert "limit is 4" in refusal(await exposed.post(COMPLETIONS, prompt=[1, 2, 3, 4, 5]), COMPLETIONS)["message"]
        assert "limit is 4" in refusal(await exposed.post(COMPLETIONS, prompt="word " * 50), COMPLETIONS)["message"]


@pytest.mark.slow
async def test_the_ingress_serves_it_beside_its_own_routes() -> None:
    from vllm.envs import disable_envs_cache

    service = make_service()
    settings = config()
    api = VllmApi(settings, settings.models[0])
    backend = SimpleNamespace(
        id=INGRESS,
        streams=service.streams,
        gate=Gate([ApiKey("alice", digest("alice-key"))]),
        telemetry=RequestTelemetry("mell-tiny"),
        settings=settings,
        health=lambda: None,
        version=lambda: {"version": "1", "vllm": "2", "ray": "3", "torch": "4"},
        document=partial(describe_routes, [api]),
    )
    await api.start(service.streams, INGRESS)
    models = GuardedModels([GuardedApp(api.app, settings, "mell-tiny", CONTEXT)])
    app = ControlRoutes(backend).app(guarded(models, backend.gate, backend.telemetry, settings))
    try:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://mell", trust_env=False, headers=KEY
        ) as client:
            answer = await client.post(COMPLETIONS, json=BODIES[COMPLETIONS])
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2
            described = (await client.get("/openapi.json")).json()
            own = (route.path.replace(":path}", "}") for route in ROUTES)
            assert set(described["paths"]) == {*BODIES, SCORING, "/v1/models", *own}
            for path, status in (("/health", 200), ("/version", 200), ("/v1/models", 200), ("/load", 200), ("/", 404)):
                assert (await client.get(path)).status_code == status
            client.headers["Authorization"] = "Bearer eve"
            assert refusal(await client.post(COMPLETIONS, json=BODIES[COMPLETIONS]), COMPLETIONS, 401)
            assert (await client.get("/v1/models")).status_code == 401
    finally:
        await api.close()
        disable_envs_cache()


# --- time -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_late_stream_ends_with_an_error(served: FrontendApi, path: str) -> None:
    exposed = Exposed(served, request_timeout_s=0.5)
    response = await exposed.post(path, stream=True, max_tokens=400)
    *chunks, error, done = events(response)
    assert len(chunks) > 3 and done == "[DONE]" and error["error"]["code"] == "timeout"
    await exposed.service.idle()
    assert refusal(await exposed.post(path, max_tokens=400), path, 504)["code"] == "timeout"
    await exposed.service.idle()


@pytest.mark.parametrize("stream", [True, False])
async def test_the_request_of_a_late_call_ends_with_it(served: FrontendApi, stream: bool) -> None:
    exposed, engines = Exposed(served, request_timeout_s=0.5), [r.engine for r in served.service.replicas.values()]
    for engine in engines:
        set_pace(engine, decode_s=0.05)
    try:
        await exposed.post(COMPLETIONS, stream=stream, max_tokens=400)
        await eventually(lambda: not exposed.service.streams.count, within_s=2)  # of the 20 s that it would run
    finally:
        for engine in engines:
            set_pace(engine, decode_s=0.002)
    await exposed.service.idle()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_left_is_logged_so(
    exposed: Exposed, lines: Callable[[], list[dict[str, Any]]], stream: bool
) -> None:
    exchange = exposed.exchange(COMPLETIONS, stream=stream, max_tokens=400)
    await eventually(lambda: exposed.service.streams.count == 1)
    await asyncio.sleep(0.1)
    exchange.disconnect()
    await exchange.ended()
    await exposed.service.idle()
    (line,) = lines()
    assert (line["outcome"], line["status"]) == ("client_closed", 499) and 0 < line["completion_tokens"] < 400


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_cannot_be_completed_is_logged_so(
    stream: bool, lines: Callable[[], list[dict[str, Any]]]
) -> None:
    async with serving(config()) as api:
        asking = asyncio.create_task(Exposed(api).post(COMPLETIONS, max_tokens=400, stream=stream))
        await eventually(lambda: any(run.reader.cursor.next_index > 20 for run in api.service.streams._live.values()))
        api.service.kill("a")
        api.service.kill("b")
        answer = await asking
        assert answer.status_code == (200 if stream else 503) and ("retry-after" in answer.headers) != stream
        (line,) = lines()
    assert (line["outcome"], line["status"]) == ("unavailable", 503) and line["completion_tokens"] > 20


# --- errors -----------------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[dict[str, Any], int]] = {
    "a model that is not served": ({"model": "another"}, 404),
    "a wrong member": ({"messages": 5}, 400),
    "a wrong member of a member": ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, 400),
    "a missing member": ({"messages": None}, 400),
}


@pytest.mark.parametrize("path", [MESSAGES, "/v1/messages/count_tokens"])
@pytest.mark.parametrize(("members", "status"), REFUSED.values(), ids=REFUSED)
async def test_vllms_errors_on_messages_have_anthropics_shape(
    exposed: Exposed, path: str, members: dict[str, Any], status: int
) -> None:
    refusal(await exposed.post(path, **members), path, status)


async def test_a_chat_beyond_the_context_is_refused_on_messages(exposed: Exposed) -> None:
    response = await exposed.post(MESSAGES, messages=[{"role": "user", "content": "word " * 5_000}])
    assert "context" in refusal(response, MESSAGES)["message"]


def ending(response: httpx.Response) -> tuple[int, Any]:
    """The number of events before the last one, and the last one, `[DONE]` aside."""
    assert response.status_code == 200
    *before, last = [block for block in response.text.split("\n\n") if block and block != "data: [DONE]"]
    return len(before), json.loads(last.rpartition("data: ")[2])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
async def test_a_stream_that_no_replica_takes_does_not_begin(
    path: str, lines: Callable[[], list[dict[str, Any]]]
) -> None:
    async with serving(config()) as api:
        exposed = Exposed(api)
        for replica in api.service.replicas.values():
            replica.host.stopping = True
        answer = await exposed.post(path, stream=True, max_tokens=4)
        (line,) = lines()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    error = answer.json()["error"]
    assert "the replica is stopping" in error["message"]
    assert error["type" if path == MESSAGES else "code"] == ("overloaded_error" if path == MESSAGES else 503)
    assert (line["outcome"], line["status"]) == ("unavailable", 503)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
async def test_a_stream_that_cannot_be_completed_ends_with_the_reason(
    path: str, lines: Callable[[], list[dict[str, Any]]]
) -> None:
    async with serving(config()) as api:
        asking = asyncio.create_task(Exposed(api).post(path, max_tokens=400, max_output_tokens=400, stream=True))
        await eventually(lambda: any(run.reader.cursor.next_index > 20 for run in api.service.streams._live.values()))
        api.service.kill("a")
        api.service.kill("b")
        before, event = ending(await asking)
        (line,) = lines()
    error = event["response"]["error"] if path == RESPONSES else event["error"]
    assert error["message"] == "no replica is available"
    if path == MESSAGES:
        assert error["type"] == "overloaded_error"
    elif path == RESPONSES:
        assert (event["type"], event["sequence_number"], error["code"]) == ("response.failed", before, "server_error")
        response, usage = event["response"], event["response"]["usage"]
        assert (response["object"], response["status"]) == ("response", "failed") and response["id"]
        assert (usage["input_tokens"], usage["output_tokens"]) == (line["prompt_tokens"], line["completion_tokens"])
    else:
        assert error["code"] == 503
    assert (line["outcome"], line["status"]) == ("unavailable", 503) and line["completion_tokens"] > 20


# --- hostile input ----------------------------------------------------------------------------------------


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


URL = "http://127.0.0.1:9/x.png"
HOSTILE: dict[str, tuple[str, dict[str, Any]]] = {
    "a connector's path": (COMPLETIONS, {"kv_transfer_params": {"mell_load": {"segment": "/etc/passwd"}}}),
    "a connector's path as a text": (CHAT, {"vllm_xargs": {"kv_transfer_params": '{"mell_load": {}}'}}),
    "a thousand items": (SCORING, {"items": ["x"] * 1000}),
    "a hundred thousand labels": (SCORING, {"label_token_ids": list(range(100_000))}),
    "labels beyond the vocabulary": (SCORING, {"label_token_ids": [2**40]}),
    "no label": (SCORING, {"label_token_ids": []}),
    "an item beyond the context": (SCORING, {"items": ["word " * 100_000]}),
    "a thousand chats": (BATCH, {"messages": [USER] * 1000}),
    "chats that are none": (BATCH, {"messages": [5]}),
    "parts that are none in a batch": (BATCH, {"messages": [[5] * 2000] * 2}),
    "a response after another one": (RESPONSES, {"previous_response_id": "resp_1"}),
    "a thousand prompts": (COMPLETIONS, {"prompt": ["x"] * 1000, "n": 16}),
    "two thousand choices": (COMPLETIONS, {"n": 2000}),
    "two thousand choices of a chat": (CHAT, {"n": 2000}),
    "two thousand beams": (COMPLETIONS, {"n": 2000, "use_beam_search": True}),
    "a hundred thousand wrong parts": (CHAT, {"messages": [{"role": "user", "content": [5] * 100_000}]}),
    "fifteen thousand wrong parts": (CHAT, {"messages": [{"role": "user", "content": [5.5] * 15_000}]}),
    "two thousand empty parts": (CHAT, {"messages": [{"role": "user", "content": [{}] * 2_000}]}),
    "two thousand empty messages": (CHAT, {"messages": [{}] * 2_000}),
    "two thousand empty items": (RESPONSES, {"input": [{}] * 2_000}),
    "two thousand wrong items": (RESPONSES, {"input": [{"type": "message", "role": "user", "content": 5}] * 2_000}),
    "an answer without a part": (
        RESPONSES,
        {"input": [{"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": []}]},
    ),
    "thirty wrong items": (RESPONSES, {"input": [{"type": "message", "role": "user", "content": 5}] * 30}),
    "two thousand wrong parts": (RESPONSES, {"input": [{"role": "user", "content": [{"type": "x"}] * 2_000}]}),
    "two thousand wrong tools of a response": (RESPONSES, {"tools": [{}] * 2_000}),
    "two thousand wrong blocks": (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "x"}] * 2_000}]}),
    "two thousand wrong tools": (CHAT, {"tools": [{}] * 2_000}),
    "a hundred thousand wrong ids": ("/detokenize", {"tokens": [-1] * 100_000}),
    "ids beyond the vocabulary": ("/detokenize", {"tokens": [2**40] * 100_000}),
    "many members": (COMPLETIONS, {f"x{n}": n for n in range(50_000)}),
    "a hundred thousand stops": (COMPLETIONS, {"stop": ["a"] * 100_000}),
    "a long stop": (COMPLETIONS, {"stop": "a" * 100_000}),
    "too many tokens of bad words": (COMPLETIONS, {"bad_words": ["é" * 600]}),
    "a long detection of repetitions": (
        COMPLETIONS,
        {"repetition_detection": {"max_pattern_size": 4000, "min_pattern_size": 1300, "min_count": 2}},
    ),
    "half of a surrogate pair as a stop": (COMPLETIONS, {"stop": "\ud83d"}),
    "a foreign template": (CHAT, {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}),
    "a foreign template in arguments": (CHAT, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
    "fifty logprobs": (COMPLETIONS, {"logprobs": 50}),
    "all logprobs": (COMPLETIONS, {"logprobs": -1}),
    "fifty logprobs of a chat": (CHAT, {"logprobs": True, "top_logprobs": 50}),
    "an image's address": (CHAT, {"messages": [{"role": "user", "content": [{"image_url": {"url": URL}}]}]}),
    "a number of more than 64 bits": (COMPLETIONS, {"top_k": 10**30}),
    "an interval of more than 64 bits": (CHAT, {"stream_interval": 10**30}),
    "a tool without a function": (CHAT, {"tools": [{}], "tool_choice": {"function": {"name": "f"}}}),
    "a token id beyond the vocabulary": (COMPLETIONS, {"prompt": [10**9]}),
    "a stop token beyond the vocabulary": (COMPLETIONS, {"stop_token_ids": [10**9]}),
    "a bias beyond the vocabulary": (COMPLETIONS, {"logit_bias": {"9" * 30: 1}}),
    "a prompt beyond the context": (COMPLETIONS, {"prompt": "word " * 100_000}),
    "a chat beyond the context": (CHAT, {"messages": [{"role": "user", "content": "word " * 100_000}]}),
    "an answer beyond the context": (COMPLETIONS, {"max_tokens": 10**9}),
    "a repetition in a schema": (
        COMPLETIONS,
        {"structured_outputs": {"json": {"properties": {f"p{n}": {"pattern": "(a){1,9000}"} for n in range(50)}}}},
    ),
    "a repetition in a tool": (
        CHAT,
        {
            "tool_choice": "required",
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"properties": {"a": {"pattern": "a{9999}"}}}},
                }
            ],
        },
    ),
    "a wrong expression": (COMPLETIONS, {"structured_outputs": {"regex": "("}}),
    "a wrong grammar": (COMPLETIONS, {"structured_outputs": {"grammar": "root ::= " + "(" * 10_000}}),
    "a deep schema as a text": (COMPLETIONS, {"structured_outputs": {"json": deep(5_000)}}),
    "a salt of a path": (COMPLETIONS, {"cache_salt": "../../x"}),
    "a stored response": (RESPONSES, {"background": True}),
    "embeddings for a prompt": (COMPLETIONS, {"prompt": None, "prompt_embeds": "AAAA"}),
}


@pytest.mark.parametrize(("path", "members"), HOSTILE.values(), ids=HOSTILE)
async def test_hostile_input_is_refused_at_a_bounded_cost(exposed: Exposed, path: str, members: dict[str, Any]) -> None:
    content = json.dumps({**VALID[path], **members}).encode()
    with Cost():
        response = await exposed.content(path, content)
    refusal(response, path)
    assert exposed.untouched


ACCEPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "all choices": (COMPLETIONS, {"prompt": ["x"] * 16, "n": 8}),
    "an expression with nested repetitions": (
        COMPLETIONS,
        {"structured_outputs": {"regex": "((((a{1,200}){1,200}){1,200}){1,200})"}},
    ),
    "a repetition in a grammar": (COMPLETIONS, {"structured_outputs": {"grammar": 'root ::= (("a"{1,1000}){1,1000})'}}),
    "a schema that doubles": (
        COMPLETIONS,
        {
            "structured_outputs": {
                "json": {
                    "$ref": "#/$defs/d0",
                    "$defs": {
                        **{f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)},
                        "d40": {"type": "string"},
                    },
                }
            }
        },
    ),
    "a schema of itself": (COMPLETIONS, {"structured_outputs": {"json": {"$ref": "#"}}}),
    "a schema elsewhere": (COMPLETIONS, {"structured_outputs": {"json": {"$ref": "http://127.0.0.1:9/x.json"}}}),
    "a large enumeration": (COMPLETIONS, {"structured_outputs": {"json": {"enum": [f"e{n}" for n in range(5_000)]}}}),
    "many tools": (CHAT, {"tools": [TOOL] * 500}),
    "a session": (COMPLETIONS, {"session_id": "x" * 100_000, "vllm_xargs": {"session_id": "y"}}),
    "a long name": (COMPLETIONS, {"request_id": "x" * 1_000_000, "stream": True}),
    "a NUL": (CHAT, {"messages": [{"role": "user", "content": "\x00"}]}),
    "halves of a surrogate pair that nothing reads": (CHAT, {"user": "\ud83d", "a\udc00": {"metadata": "\ud83d"}}),
    "half of a surrogate pair in a prompt": (CHAT, {"messages": [{"role": "user", "content": "\ud83d"}]}),
    "half of a surrogate pair in a schema": (COMPLETIONS, {"structured_outputs": {"json": {"enum": ["\ud83d"]}}}),
    "half of a surrogate pair in a bad word": (COMPLETIONS, {"bad_words": ["\ud83d"]}),
    "half of a surrogate pair in metadata": (RESPONSES, {"metadata": {"a": "\ud83d"}}),
    "a stream by number": (MESSAGES, {"stream": 1}),
    "a negative priority": (COMPLETIONS, {"priority": -(2**63)}),
}


@pytest.mark.parametrize(("path", "members"), ACCEPTED.values(), ids=ACCEPTED)
async def test_unusual_input_is_answered_at_a_bounded_cost(
    exposed: Exposed, path: str, members: dict[str, Any]
) -> None:
    content = json.dumps({**BODIES[path], **members}).encode()
    with Cost():
        response = await exposed.content(path, content)
    assert response.status_code in (200, 400), response.text[:300]
    assert len(response.content) < 1 << 20
    await exposed.service.idle()


ENCODED: dict[str, tuple[bytes, int]] = {
    "forty megabytes": (b'{"prompt": "' + b"x" * (40 << 20) + b'"}', 413),
    "an abyss": (b'{"prompt": ' + deep(50_000).encode() + b"}", 400),
    "a cliff": (b'{"prompt": ' + deep(100).encode() + b"}", 400),
    "NaN": (b'{"prompt": "x", "temperature": NaN}', 400),
    "infinity": (b'{"prompt": "x", "temperature": 1e999}', 400),
    "a long number": (b'{"prompt": "x", "seed": ' + b"9" * 5_000 + b"}", 400),
    "gzip": (gzip.compress(b'{"prompt": "x"}'), 400),
    "a surrogate": (b'{"prompt": "\\ud800"}', 400),
    "nothing": (b"", 400),
    "a list": (b"[]", 400),
    "two values": (b'{"prompt": "x"}{"prompt": "y"}', 400),
    "one member a hundred thousand times": (b'{"prompt": "x"' + b',"seed":[]' * 100_000 + b"}", 400),
}


@pytest.mark.parametrize("path", [COMPLETIONS, MESSAGES])
@pytest.mark.parametrize(("content", "status"), ENCODED.values(), ids=ENCODED)
async def test_what_is_no_request_is_refused(exposed: Exposed, path: str, content: bytes, status: int) -> None:
    with Cost():
        response = await exposed.content(path, content)
    refusal(response, path, status)
    assert exposed.untouched


HEADS: dict[str, dict[str, str]] = {
    "another media type": {"Content-Type": "text/plain"},
    "a rank": {"X-data-parallel-rank": "7"},
    "a rank of many digits": {"X-data-parallel-rank": "9" * 10_000},
    "a priority of many digits": {"X-Vllm-Priority": "9" * 4_000},
    "a session": {"X-Session-ID": "x" * 60_000},
    "a class, where there are none": {"X-Mell-Class": "x" * 60_000},
    "a long label": {"X-Request-Id": "x" * 1_000_000},
    "another origin": {"Origin": "http://evil.example"},
    "a trace": {"traceparent": "00-" + "z" * 60_000},
    "a format": {"endpoint-load-metrics-format": "JSON"},
    "a session of SageMaker": {"X-Amzn-SageMaker-Session-Id": "NEW_SESSION"},
}


@pytest.mark.parametrize("headers", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("path", BODIES)
async def test_no_head_causes_a_server_error(exposed: Exposed, path: str, headers: dict[str, str]) -> None:
    response = await exposed.post(path, headers)
    assert response.status_code == (415 if "Content-Type" in headers else 200), response.text[:300]
    assert not {"access-control-allow-origin", "endpoint-load-metrics"} & set(response.headers)
    assert len(response.content) < 10_000


# --- described --------------------------------------------------------------------------------------------

SHORT = 64
"""The context of the model: a call may ask for all of it."""
BOUNDED = settings(
    max_examples=400 if LONG else 4,
    derandomize=not LONG,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@dataclass
class Described:
    """The guarded application over replicas that take no time, and vLLM's description of it."""

    exposed: Exposed
    schema: Any

    def bodies(self, path: str, mode: GenerationMode) -> st.SearchStrategy[Any]:
        """Bodies for a route that are as described or, in the negative mode, are not."""
        calls: st.SearchStrategy[Any] = self.schema[path]["POST"].as_strategy(mode)
        return calls.map(lambda call: call.body)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def described() -> AsyncIterator[Described]:
    async with serving(config(engine={"max_model_len": SHORT}), step_s=0.0) as served:
        exposed = Exposed(served, Gate(chooser=ClassChooser(CLASSES)))
        yield Described(exposed, schemathesis.openapi.from_dict(document(served.frontend.routes)))


@pytest.mark.slow
@BOUNDED
@given(data=st.data())
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", VALID)
async def test_no_described_call_causes_a_server_error(
    described: Described, path: str, mode: GenerationMode, data: st.DataObject
) -> None:
    """Calls of vLLM's OpenAPI document: as described and not, and single members of them in a body that is valid."""
    drawn = data.draw(described.bodies(path, mode))
    bodies = [drawn]
    if isinstance(drawn, dict):
        bodies += [{**VALID[path], name: member} for name, member in drawn.items()]
    for body in bodies:
        content = json.dumps(body, default=str).encode()
        with Cost():
            response = await described.exposed.content(path, content)
        assert response.status_code < 500, (content[:1000], response.text[:1000])
        failed = '"code": 500' in response.text or '"code":500' in response.text
        assert not failed, (content[:1000], response.text[:1000])
