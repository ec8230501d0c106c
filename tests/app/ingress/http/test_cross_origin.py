"""Web pages of other origins may call the API from allowed origins only, and operators' routes never."""

from typing import Any

import httpx
import pytest

from app.ingress.access.admission import Gate
from app.ingress.access.keys import ApiKey, digest
from app.settings import IngressSettings
from tests.app.ingress.fakes import Api, Backend, make_app, make_service

PAGE = "https://chat.example.com"
ASKING = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


def serving(gate: Gate | None = None, **settings: Any) -> Api:
    backend = Backend(make_service(), gate=gate)
    backend.settings = IngressSettings(**settings)
    return Api(backend, make_app(backend))


def allowed(response: httpx.Response) -> str | None:
    origin: str | None = response.headers.get("access-control-allow-origin")
    return origin


@pytest.mark.parametrize("origins", [[PAGE], [PAGE, "https://b.example"], ["*"]])
async def test_pages_of_allowed_origins_ask_and_call(origins: list[str]) -> None:
    api = serving(allowed_origins=origins)
    shown = "*" if origins == ["*"] else PAGE
    preflight = await api.send("OPTIONS", "/v1/completions", headers={"Origin": PAGE, **ASKING})
    assert (preflight.status_code, allowed(preflight)) == (200, shown)
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in preflight.headers
    for path in ("/health", "/version", "/openapi.json"):
        assert allowed(await api.get(path, headers={"Origin": PAGE})) == shown
    for answer in (await api.complete({"Origin": PAGE}), await api.complete({"Origin": PAGE}, stream=True)):
        assert (answer.status_code, allowed(answer)) == (200, shown)


async def test_errors_can_be_read_as_well() -> None:
    api = serving(Gate([ApiKey("alice", digest("alice-key"))]), allowed_origins=[PAGE])
    refused = await api.complete({"Origin": PAGE})
    assert (refused.status_code, allowed(refused)) == (401, PAGE)
    assert allowed(await api.get("/v1/unknown", headers={"Origin": PAGE})) == PAGE
    asked = await api.send("OPTIONS", "/v1/completions", headers={"Origin": PAGE, **ASKING})
    assert asked.status_code == 200, "a preflight call has no key"
    assert api.backend.gate.running == 0


@pytest.mark.parametrize("settings", [{}, {"allowed_origins": ["https://other.example"]}], ids=["none", "another"])
@pytest.mark.parametrize("origin", [PAGE, "null", "https://chat.example.com.evil.example", "https://CHAT.example.com"])
async def test_other_pages_cannot(settings: dict[str, Any], origin: str) -> None:
    api = serving(**settings)
    preflight = await api.send("OPTIONS", "/v1/completions", headers={"Origin": origin, **ASKING})
    assert preflight.status_code in (400, 405) and allowed(preflight) is None
    assert allowed(await api.complete({"Origin": origin})) is None


@pytest.mark.parametrize("origins", [[PAGE], ["*"]])
@pytest.mark.parametrize(
    "path",
    [
        "/mell/state",
        "/mell/migrations",
        "/mell/replicas/a/drain",
        "/mell/cache/match",
        "/mell/cache/copy",
        "/mell/cache/pin",
        "/mell/cache",
        "/mell/",
        "/mell",
        "/v1/load_lora_adapter",
    ],
)
async def test_no_page_reaches_the_operators_routes(origins: list[str], path: str) -> None:
    api = serving(allowed_origins=origins)
    for method in ("OPTIONS", "GET", "POST"):
        response = await api.send(method, path, headers={"Origin": PAGE, **ASKING})
        assert allowed(response) is None
        assert method != "OPTIONS" or response.status_code in (307, 404, 405)


async def test_methods_headers_and_credentials_are_the_settings() -> None:
    settings: dict[str, Any] = {"allowed_methods": ["GET"], "allowed_headers": ["x-a"], "allow_credentials": True}
    api = serving(allowed_origins=[PAGE], **settings)
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "x-a"}
    preflight = await api.send("OPTIONS", "/v1/models", headers=asked)
    assert (preflight.status_code, preflight.headers["access-control-allow-credentials"]) == (200, "true")
    for more in ({"Access-Control-Request-Method": "POST"}, {"Access-Control-Request-Headers": "x-b"}):
        assert (await api.send("OPTIONS", "/v1/models", headers=asked | more)).status_code == 400
