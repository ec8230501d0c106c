"""The Rust frontend over fake replicas: vLLM's own program where there is one, and a program in its place."""

import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from starlette.types import ASGIApp

from app.frontend.guard.layers import guarded
from app.frontend.rust.frontend import RustFrontend
from app.frontend.rust.process import find_binary
from app.ingress.access.admission import Gate
from app.ingress.telemetry.requests import RequestTelemetry
from app.settings import IngressSettings
from tests.app.frontend.conftest import CONTEXT, PATIENCE_S, config
from tests.app.ingress.fakes import PATIENT, Service, make_service
from tests.migration.world import INGRESS

ROOT = Path(__file__).parents[4]


def real_binary() -> str | None:
    """The path of vLLM's own program, None without one."""
    try:
        return find_binary()
    except ValueError:
        return None


REAL = pytest.mark.skipif(real_binary() is None, reason="this build of vLLM has no vllm-rs, and MELL_VLLM_RS is unset")


@dataclass
class RustApi:
    """A client of the Rust frontend behind Mell's layers, over a service of replicas `a` and `b`."""

    frontend: RustFrontend
    service: Service
    real: bool
    app: ASGIApp

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://mell", timeout=20) as client:
            return await client.request(method, path, **options)

    async def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return await self.send("POST", path, json=body, headers=headers)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of an output."""
        return self.frontend.decode(tokens) if self.real else "".join(f"{token} " for token in tokens)


def answer_text(response: httpx.Response) -> str:
    """The text of a completion, whole or streamed."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    parts = [json.loads(line) for line in lines if line != "[DONE]"]
    return "".join(choice["text"] for part in parts for choice in part.get("choices", ()))


@pytest.fixture(scope="package")
def fake_binary(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("bin") / "vllm-rs"
    path.write_text(f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m tests.app.frontend.rust.fake_vllm_rs "$@"\n')
    path.chmod(0o755)
    return str(path)


@asynccontextmanager
async def rust(binary: str, model: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[RustApi]:
    """The frontend over a service of its own."""
    service = make_service(step_s=0.002, lease_s=5, place_timeout_s=30, no_replica_timeout_s=PATIENCE_S, limits=PATIENT)
    given = config(model).model_copy(update={"frontend": "rust", "rust_binary": binary, **settings})
    frontend = await RustFrontend.start(given, service.streams, INGRESS)
    try:
        app = guarded(frontend.app, Gate(), RequestTelemetry("mell-tiny"), IngressSettings(), CONTEXT)
        yield RustApi(frontend, service, binary == real_binary(), app)
    finally:
        await frontend.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["fake", pytest.param("real", marks=REAL)])
async def api(request: pytest.FixtureRequest, fake_binary: str) -> AsyncIterator[RustApi]:
    """For tests that leave the process running, and both replicas alive and idle."""
    async with rust(fake_binary if request.param == "fake" else real_binary() or "") as served:
        yield served


@pytest_asyncio.fixture(loop_scope="module", params=["fake", pytest.param("real", marks=REAL)])
async def own(request: pytest.FixtureRequest, fake_binary: str) -> AsyncIterator[RustApi]:
    async with rust(fake_binary if request.param == "fake" else real_binary() or "") as served:
        yield served
