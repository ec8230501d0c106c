"""The APIs of an ingress, beside the operator's routes."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal

import httpx
import pytest
from vllm.envs import disable_envs_cache

from app.ingress.frontends import MellApi, VllmApi, make_frontend
from app.ingress.http.control import ControlRoutes
from app.ingress.telemetry.vllm_requests import NO_STATISTICS, VllmRequestMetrics
from app.main import _engine_config, _ingress_config, read_settings
from tests.app.ingress.fakes import LOOPBACK, Backend, make_service


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    yield
    disable_envs_cache()


@pytest.mark.parametrize(
    ("name", "kind", "statistics"),
    [("mell", MellApi, VllmRequestMetrics), ("vllm", VllmApi, type(NO_STATISTICS))],
)
async def test_an_api_stands_beside_the_operators_routes(
    name: Literal["mell", "vllm"], kind: type, statistics: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of another server")
    settings = read_settings({"engine_kwargs": {"max_model_len": 512}, "ingress": {"frontend": name}})
    frontend = make_frontend(_ingress_config(settings, _engine_config(settings)))
    assert type(frontend) is kind and type(frontend.statistics) is statistics
    model: Any = SimpleNamespace(id="mell-tiny")
    backend = Backend(make_service(), model)
    app = ControlRoutes(backend).app(await frontend.routes(backend))
    frontend.check_health()
    transport = httpx.ASGITransport(app, client=LOOPBACK)
    async with httpx.AsyncClient(transport=transport, base_url="http://mell") as client:
        answer = await client.post("/v1/completions", json={"model": "mell-tiny", "prompt": [5, 6], "max_tokens": 16})
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 16)
        state = await client.get("/mell/state")
        assert set(state.json()) == {"replicas"}
        assert (await client.get("/version")).json()["vllm"] == "2"
        assert (await client.get("/metrics")).text == "# metrics\n"
        assert (await client.get("/v1/unknown")).status_code == 404
    text = frontend.decode([5, 2])
    assert text.startswith("#") and text.endswith("</s>")
    await frontend.close()
    await backend.service.idle()
