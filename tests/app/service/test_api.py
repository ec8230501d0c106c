"""The API of an ingress beside the operator's routes, and the OpenAPI document of both."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import pytest_asyncio
from starlette.responses import PlainTextResponse
from vllm.envs import disable_envs_cache

from app.frontend.guard.layers import guarded
from app.frontend.guard.models import GuardedModels
from app.frontend.guard.routes import OPEN_ROUTES, RouteTask
from app.ingress.errors import ApiError
from app.ingress.http.control import ControlRoutes
from app.ingress.http.openapi import document
from app.ingress.http.orders import CopyPrompt, DropOrder, MatchOrder
from app.main import _engine_configs, _ingress_config, read_settings
from app.service.api import VllmApi, describe_routes
from migration.protocol.core_messages import Adapter, CoreRequest, decode_request
from migration.protocol.request import IngressId
from policies.cluster.changes import Arrival
from policies.precedence import DEFAULT_CLASS
from tests.app.ingress.fakes import LOOPBACK, Backend, GuardedApp, make_service
from tests.migration.world import INGRESS

pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def _serving() -> AsyncIterator[tuple[VllmApi, httpx.AsyncClient]]:
    os.environ["VLLM_API_KEY"] = "of another server"
    settings = read_settings({"engine_kwargs": {"max_model_len": 512}})
    config = _ingress_config(settings, _engine_configs(settings))
    api = VllmApi(config, config.models[0])
    backend = Backend(make_service(), "mell-tiny")
    await api.start(backend.streams, backend.id)
    models = GuardedModels([GuardedApp(api.app, config, "mell-tiny", 512)])
    app = ControlRoutes(backend).app(guarded(models, backend.gate, backend.telemetry, config))
    backend.document = partial(describe_routes, [api])  # type: ignore[method-assign]
    transport = httpx.ASGITransport(app, client=LOOPBACK)
    async with httpx.AsyncClient(transport=transport, base_url="http://mell", timeout=60) as client:
        yield api, client
    await api.close()
    await backend.service.idle()
    disable_envs_cache()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[tuple[VllmApi, httpx.AsyncClient]]:
    async with _serving() as served:
        yield served


async def test_the_api_stands_beside_the_operators_routes(served: tuple[VllmApi, httpx.AsyncClient]) -> None:
    api, client = served
    api.check_health()
    answer = await client.post("/v1/completions", json={"model": "mell-tiny", "prompt": [5, 6], "max_tokens": 16})
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 16)
    assert "replicas" in (await client.get("/mell/state")).json()
    assert (await client.get("/version")).json()["vllm"] == "2"
    assert (await client.get("/metrics")).text == "# all\n"
    assert (await client.get("/v1/unknown")).status_code == 404
    text = api.decode([5, 2])
    assert text.startswith("#") and text.endswith("</s>")


def made_api() -> VllmApi:
    """The API of the tiny model, not started."""
    settings = read_settings({})
    config = _ingress_config(settings, _engine_configs(settings))
    return VllmApi(config, config.models[0])


async def test_adapters_that_come_before_the_application_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ingress reads the list of adapters while its application starts, and never again unless the list changes."""
    api = made_api()
    served: list[list[Adapter]] = []

    async def started(*given: object) -> Any:
        return SimpleNamespace(app=None, max_context=8, serve_adapters=lambda adapters: served.append([*adapters]))

    monkeypatch.setattr("app.frontend.app.VllmFrontend.start", started)
    api.serve_adapters([Adapter("a", 1, "/a")])
    await api.start(make_service().streams, INGRESS)
    disable_envs_cache()
    api.serve_adapters([])
    assert served == [[Adapter("a", 1, "/a")], []]


SQL = Adapter("sql", 7, "/adapters/sql")


class Prompts:
    """In the place of a frontend: a text is as many tokens as it has characters."""

    app = None
    max_context = 8

    def __init__(self) -> None:
        self.named: list[CoreRequest] = []
        self.bodies: list[dict[str, Any]] = []

    async def tokens(self, body: bytes) -> list[int]:
        self.bodies.append(json.loads(body))
        return list(body_text(self.bodies[-1]).encode())

    def names(self, request: CoreRequest) -> tuple[int, ...]:
        self.named.append(request)
        return (4, 2) if len(self.named[-1].prompt_token_ids or ()) > 1 else ()

    def why_unnamed(self, request: CoreRequest) -> str:
        return "the one cause"

    def serve_adapters(self, adapters: Any) -> None:
        pass


def body_text(body: dict[str, Any]) -> str:
    return str(body["prompt"] if "prompt" in body else body["messages"][0]["content"])


async def started_api(monkeypatch: pytest.MonkeyPatch) -> tuple[Prompts, VllmApi]:
    api, prompts = made_api(), Prompts()

    async def started(*given: object) -> Any:
        return prompts

    monkeypatch.setattr("app.frontend.app.VllmFrontend.start", started)
    api.serve_adapters([SQL])
    with pytest.raises(ApiError, match="starting"):
        await api.arrival(MatchOrder(prompt="x"))
    await api.start(make_service().streams, INGRESS)
    disable_envs_cache()
    return prompts, api


async def looked_up(monkeypatch: pytest.MonkeyPatch, **order: Any) -> tuple[Prompts, Arrival]:
    prompts, api = await started_api(monkeypatch)
    return prompts, await api.arrival(MatchOrder(**order))


async def test_a_prompt_arrives_as_its_request_would(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, found = await looked_up(monkeypatch, prompt=[5, 6, 7], model="sql", cache_salt="a:", prompt_cache_key="s")
    assert (found.tokens, found.names, found.session, found.adapter) == (3, (4, 2), "s", 7)
    assert found.precedence.service_class == DEFAULT_CLASS and found.precedence.arrived_s > 0
    (request,) = prompts.named
    assert (request.prompt_token_ids, request.cache_salt, request.lora_request) == ([5, 6, 7], "a:", SQL)
    assert prompts.bodies == []


@pytest.mark.parametrize("body", [{"prompt": "move"}, {"messages": [{"role": "user", "content": "move"}]}])
async def test_the_tokens_of_text_are_those_of_the_frontend(
    monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    prompts, found = await looked_up(monkeypatch, **body, model="mell-tiny")
    assert prompts.bodies == [body] and prompts.named[0].prompt_token_ids == list(b"move")
    assert (found.tokens, found.session, found.adapter) == (4, "", None)


async def test_a_prompt_to_copy_becomes_a_request_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    _, api = await started_api(monkeypatch)
    order = CopyPrompt(prompt=[5, 6, 7], model="sql", cache_salt="a:", source="a", target="b")
    spec = await api.prefix(order, IngressId("i"))
    request = decode_request(spec.body)
    assert (request.prompt_token_ids, request.cache_salt, request.max_tokens) == ([5, 6, 7], "a:", 1)
    assert (spec.prompt_tokens, spec.ingress) == (3, "i")
    assert spec.adapter is not None and spec.adapter.lora_name == "sql"


async def test_the_blocks_of_a_prompt_have_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, api = await started_api(monkeypatch)
    assert await api.block_names(DropOrder(prompt=[5, 6, 7], model="sql", cache_salt="a:")) == (4, 2)
    (request,) = prompts.named
    assert (request.prompt_token_ids, request.cache_salt, request.lora_request) == ([5, 6, 7], "a:", SQL)
    for order, status in (({"prompt": [5]}, 422), ({"prompt": "too long."}, 400), ({"prompt": "x", "model": "y"}, 404)):
        with pytest.raises(ApiError) as refused:
            await api.block_names(DropOrder(**order))
        assert refused.value.status == status and (status != 422 or refused.value.message == "the one cause")


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}


@pytest.mark.parametrize(
    ("order", "status", "param", "code"),
    [
        ({"prompt": "move", "model": "other"}, 404, "model", None),
        ({"prompt": []}, 400, "prompt", "invalid_value"),
        ({"prompt": [5, -6]}, 400, "prompt", "invalid_value"),
        ({"prompt": [5] * 9}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": "too long."}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": "move", "cache_salt": "s" * 257}, 400, "cache_salt", "invalid_value"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "messages", "invalid_value"),
    ],
    ids=["model", "empty", "negative", "long", "long text", "long salt", "image"],
)
async def test_prompts_are_refused(
    monkeypatch: pytest.MonkeyPatch, order: dict[str, Any], status: int, param: str, code: str | None
) -> None:
    with pytest.raises(ApiError) as refused:
        await looked_up(monkeypatch, **order)
    assert (refused.value.status, refused.value.param, refused.value.code) == (status, param, code)


@pytest.mark.slow
async def test_the_document_has_the_open_and_the_operators_routes(served: tuple[VllmApi, httpx.AsyncClient]) -> None:
    whole, own = (await served[1].get("/openapi.json")).json(), document()
    assert whole["openapi"].startswith("3.1.")
    calls = {path for path, route in OPEN_ROUTES.items() if route.task is not RouteTask.POOL} - {"/tokenizer_info"}
    assert own["paths"].keys() | calls <= whole["paths"].keys() <= own["paths"].keys() | OPEN_ROUTES.keys()
    for path in whole["paths"].keys() - own["paths"].keys():
        assert whole["paths"][path].keys() == {OPEN_ROUTES[path].method.lower()}
    schemas = whole["components"]["schemas"]
    # An enumeration of vLLM's has the same name as Mell's, so both have the names of their modules, too.
    assert own["components"]["schemas"].keys() - schemas.keys() == {"Role"} and "policies__model__Role" in schemas


class Starting:
    """In the place of a pooling model's frontend, which waits for a replica; `failure` is raised then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failure: Exception | None = None) -> None:
        self.has_replica = asyncio.Event()
        self.api = made_api()
        self.frontend = Prompts()

        async def started(config: Any, model: Any, streams: Any, ingress: Any, waiting: Callable[[], None]) -> Any:
            waiting()
            await self.has_replica.wait()
            if failure is not None:
                raise failure
            return SimpleNamespace(app=_hello, max_context=8, serve_adapters=lambda adapters: None)

        monkeypatch.setattr("app.frontend.app.VllmFrontend.start", started)

    async def ask(self, method: str = "POST") -> httpx.Response:
        transport = httpx.ASGITransport(self.api.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://mell") as client:
            return await client.request(method, "/v1/embeddings")


async def _hello(scope: Any, receive: Any, send: Any) -> None:
    await PlainTextResponse("hello")(scope, receive, send)


async def test_an_application_that_waits_for_a_replica_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Starting(monkeypatch)
    await asyncio.wait_for(made.api.begin(make_service().streams, INGRESS), 5)
    with pytest.raises(ApiError, match="no replica of the model has run yet"):
        await made.ask("GET")
    assert made.api.limits.prompt_tokens > 1 << 30 and made.api.routes == ()
    asked = asyncio.create_task(made.ask())
    await asyncio.sleep(0.05)
    assert not asked.done()
    made.has_replica.set()
    assert (await asked).text == "hello"
    assert made.api.limits.prompt_tokens == 8
    disable_envs_cache()


async def test_a_call_waits_for_an_application_no_longer_than_for_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Starting(monkeypatch)
    monkeypatch.setattr(made.api, "_config", made.api._config.model_copy(update={"no_replica_timeout_s": 0.05}))
    await made.api.begin(make_service().streams, INGRESS)
    with pytest.raises(ApiError, match="no replica of the model has run yet"):
        await made.ask()
    await made.api.close()


async def test_an_application_that_cannot_start_later_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = Starting(monkeypatch, ValueError("no such task"))
    await made.api.begin(make_service().streams, INGRESS)
    made.has_replica.set()
    with pytest.raises(ApiError, match="could not start, see the log"):
        await made.ask()
    made.api.check_health()
    assert "the application of the model mell-tiny could not start" in caplog.text


async def test_an_application_that_cannot_start_at_once_fails_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def started(*given: Any) -> Any:
        raise ValueError("an argument is invalid")

    monkeypatch.setattr("app.frontend.app.VllmFrontend.start", started)
    with pytest.raises(ValueError, match="an argument is invalid"):
        await made_api().begin(make_service().streams, INGRESS)
