"""vLLM's application over fake replicas. It takes half a second to make, and its imports take several."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest_asyncio
from starlette.types import ASGIApp

from app.frontend.guard.layers import vllm_environment
from app.ingress.config import IngressConfig
from app.main import _engine_configs, _ingress_config, read_settings
from app.service.api import ENVIRONMENT
from app.settings import IngressSettings
from tests.app.ingress.fakes import PATIENT, Service, make_service
from tests.migration.world import INGRESS

os.environ.update(ENVIRONMENT | vllm_environment(IngressSettings()))

CONTEXT = 512
PATIENCE_S = 0.3


POOLING = {"runner": "pooling", "convert": "embed"}
"""Engine settings that make vectors of the tiny model's last hidden states."""


def config(
    model: dict[str, Any] | None = None, engine: dict[str, Any] | None = None, **frontend_kwargs: Any
) -> IngressConfig:
    """The configuration of an ingress with vLLM's application."""
    ingress = {"frontend_kwargs": frontend_kwargs, "no_replica_timeout_s": PATIENCE_S}
    engine_kwargs = {"max_model_len": CONTEXT, **(engine or {})}
    settings = read_settings({"model_loading_config": model or {}, "engine_kwargs": engine_kwargs, "ingress": ingress})
    return _ingress_config(settings, _engine_configs(settings))


@dataclass
class FrontendApi:
    """A client of vLLM's application, over a service of replicas `a` and `b`."""

    frontend: Any
    service: Service

    @property
    def app(self) -> ASGIApp:
        app: ASGIApp = self.frontend.app
        return app

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://mell", timeout=20) as client:
            return await client.request(method, path, **options)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.send("POST", path, json=body)


@asynccontextmanager
async def serving(
    config: IngressConfig, step_s: float = 0.002, tasks: tuple[str, ...] = ("generate",)
) -> AsyncIterator[FrontendApi]:
    """The application over a service of its own."""
    from app.frontend.app import VllmFrontend

    service = make_service(
        step_s=step_s, lease_s=5, place_timeout_s=30, no_replica_timeout_s=PATIENCE_S, limits=PATIENT
    )
    for replica in service.replicas.values():
        replica.engine.tasks = tasks
    (model,) = config.models
    frontend = await VllmFrontend.start(config, model, service.streams, INGRESS)
    frontend.serve_adapters(model.adapters)
    try:
        yield FrontendApi(frontend, service)
    finally:
        await frontend.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[FrontendApi]:
    """For tests that leave both replicas alive and idle."""
    async with serving(config()) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="module")
async def own() -> AsyncIterator[FrontendApi]:
    async with serving(config()) as served:
        yield served
