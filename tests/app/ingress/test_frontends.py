"""The API of an ingress beside the operator's routes, and the OpenAPI document of both."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import pytest_asyncio
from vllm.envs import disable_envs_cache

from app.frontend.guard.routes import OPEN_ROUTES, RouteTask
from app.ingress.description.openapi import own_document
from app.ingress.frontends import VllmApi
from app.ingress.http.control import ControlRoutes
from app.main import _engine_config, _ingress_config, read_settings
from migration.protocol.core_messages import Adapter
from tests.app.ingress.fakes import LOOPBACK, Backend, make_service

pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def _serving() -> AsyncIterator[tuple[VllmApi, httpx.AsyncClient]]:
    os.environ["VLLM_API_KEY"] = "of another server"
    settings = read_settings({"engine_kwargs": {"max_model_len": 512}})
    api = VllmApi(_ingress_config(settings, _engine_config(settings)))
    backend = Backend(make_service(), "mell-tiny")
    app = ControlRoutes(backend).app(await api.start(backend))
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
    assert set((await client.get("/mell/state")).json()) == {"replicas"}
    assert (await client.get("/version")).json()["vllm"] == "2"
    assert (await client.get("/metrics")).text == "# metrics\n"
    assert (await client.get("/v1/unknown")).status_code == 404
    text = api.decode([5, 2])
    assert text.startswith("#") and text.endswith("</s>")


async def test_adapters_that_come_before_the_application_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ingress reads the list of adapters while its application starts, and never again unless the list changes."""
    settings = read_settings({})
    api = VllmApi(_ingress_config(settings, _engine_config(settings)))
    served: list[list[Adapter]] = []

    async def started(backend: Backend) -> Any:
        return SimpleNamespace(app=None, max_context=8, serve_adapters=lambda adapters: served.append([*adapters]))

    monkeypatch.setattr(api, "_start", started)
    api.serve_adapters([Adapter("a", 1, "/a")])
    await api.start(Backend(make_service()))
    disable_envs_cache()
    api.serve_adapters([])
    assert served == [[Adapter("a", 1, "/a")], []]


def _references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"].rpartition("/")[2]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(_references, value.values()))
    return set[str]().union(*map(_references, value)) if isinstance(value, list) else set()


async def test_the_document_has_the_open_and_the_operators_routes(served: tuple[VllmApi, httpx.AsyncClient]) -> None:
    document = (await served[1].get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1.")
    own = own_document()
    calls = {path for path, route in OPEN_ROUTES.items() if route.task is not RouteTask.POOL} - {"/tokenizer_info"}
    assert own["paths"].keys() | calls <= document["paths"].keys() <= own["paths"].keys() | OPEN_ROUTES.keys()
    for path in document["paths"].keys() - own["paths"].keys():
        assert document["paths"][path].keys() == {OPEN_ROUTES[path].method.lower()}
    schemas = document["components"]["schemas"]
    assert _references(document) == schemas.keys() - {
        name for name in own["components"]["schemas"] if name not in _references(own)
    }
    assert schemas.items() >= own["components"]["schemas"].items(), "vLLM's schemas have other names"
