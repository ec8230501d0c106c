"""The page's routes: files, their headers, and access to the events."""

import asyncio
import json
import re
from pathlib import Path

import httpx
import pytest

from app.ingress.http.control import ControlRoutes
from tests.app.ingress.fakes import Api, completions, eventually
from tests.app.page.synthetic import SyntheticBackend, SyntheticCluster

FOLDER = Path("app/page")
FILES = sorted(path.name for path in FOLDER.iterdir())
STRANGER = ("192.0.2.7", 4711)


class Following:
    """A GET of the events, message by message, as a server makes it."""

    def __init__(self, api: Api, headers: dict[str, str] | None = None) -> None:
        self.sent: list[dict[str, object]] = []
        self._left = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": "/mell/events",
            "raw_path": b"/mell/events",
            "root_path": "",
            "query_string": b"",
            "headers": [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()],
            "client": api.address,
            "server": ("mell", 80),
        }
        self.task = asyncio.create_task(api.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, object]:
        if not self._left.is_set():
            await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: object) -> None:
        assert isinstance(message, dict)
        self.sent.append(message)

    def leave(self) -> None:
        self._left.set()

    @property
    def body(self) -> bytes:
        return b"".join(bytes(m.get("body", b"")) for m in self.sent)  # type: ignore[call-overload]


def make(admin_key: str | None = None) -> tuple[Api, ControlRoutes, SyntheticBackend]:
    backend = SyntheticBackend(SyntheticCluster(3, 12), admin_key)
    routes = ControlRoutes(backend)
    return Api(backend, routes.app(completions(backend))), routes, backend


async def refused(api: Api, headers: dict[str, str] | None = None) -> httpx.Response:
    """The answer to a GET of the events that ends at once."""
    async with asyncio.timeout(5):
        return await api.get("/mell/events", headers=headers)


async def test_the_page_is_html_without_external_resources() -> None:
    api, _, _ = make()
    response = await api.get("/mell/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert not re.search(r"""(src|href)=["']?(https?:)?//|\sstyle=|\son\w+=|<script>""", response.text)


async def test_the_page_is_found_without_the_slash() -> None:
    response = await make()[0].get("/mell")
    assert (response.status_code, response.headers["location"]) == (307, "http://mell/mell/")


@pytest.mark.parametrize("path", FILES)
async def test_every_file_is_served_with_its_type(path: str) -> None:
    api, _, _ = make()
    response = await api.get(f"/mell/assets/{path}")
    assert response.content == (FOLDER / path).read_bytes()
    kind = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}[
        path.rpartition(".")[2]
    ]
    assert response.headers["content-type"].split(";")[0] == kind
    assert response.headers["x-content-type-options"] == "nosniff"


async def test_a_cached_file_is_not_sent_again() -> None:
    api, _, _ = make()
    tag = (await api.get("/mell/assets/page.js")).headers["etag"]
    known = await api.get("/mell/assets/page.js", headers={"If-None-Match": f'"other", W/{tag}'})
    assert known.status_code == 304 and known.content == b"" and known.headers["etag"] == tag
    assert (await api.get("/mell/assets/page.js", headers={"If-None-Match": '"other"'})).status_code == 200


@pytest.mark.parametrize("path", ["none.js", "..%2Fmain.py", "%2E%2E/main.py", "..%5Cmain.py"])
async def test_there_are_no_other_files(path: str) -> None:
    api, _, _ = make()
    assert (await api.get(f"/mell/assets/{path}")).status_code == 404


async def test_without_the_slash_there_is_a_redirect() -> None:
    api, _, _ = make()
    response = await api.get("/mell")
    assert response.status_code == 307 and response.headers["location"].endswith("/mell/")


def test_modules_import_only_existing_files() -> None:
    imported = {name for path in FOLDER.glob("*.js") for name in re.findall(r'from "\./([^"]+)"', path.read_text())}
    assert imported and imported <= set(FILES)


async def test_the_stream_of_events_ends_on_a_disconnect() -> None:
    api, routes, backend = make()
    routes._page.feed._interval_s = 60.0
    following = Following(api)
    await eventually(lambda: b"event: snapshot" in following.body)
    data = json.loads(following.body.split(b"data: ")[1].split(b"\n")[0])
    assert len(data["requests"]) == 12 and len(data["points"]) == 1
    start = following.sent[0]
    assert start["status"] == 200
    assert (b"content-type", b"text/event-stream; charset=utf-8") in start["headers"]  # type: ignore[operator]
    following.leave()
    async with asyncio.timeout(5):
        await following.task
    assert backend.looks == 1


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer other"}, {"Authorization": "secret"}])
async def test_the_events_need_the_admin_key(header: dict[str, str]) -> None:
    api, _, backend = make("secret")
    response = await refused(api, header)
    assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
    assert backend.looks == 0


async def test_the_events_with_the_admin_key() -> None:
    api, _, _ = make("secret")
    following = Following(api, {"Authorization": "Bearer secret"})
    await eventually(lambda: b"event: snapshot" in following.body)
    following.leave()
    await following.task


async def test_without_an_admin_key_the_events_are_open_on_loopback_only() -> None:
    api, _, _ = make()
    api.address = STRANGER
    response = await refused(api)
    assert response.status_code == 403
    assert "ingress.admin_key" in response.json()["error"]["message"]
    assert (await api.get("/mell/")).status_code == 200, "the page itself is public"


async def test_closing_the_routes_ends_the_events() -> None:
    api, routes, _ = make()
    following = Following(api)
    await eventually(lambda: b"event: snapshot" in following.body)
    routes.close()
    async with asyncio.timeout(5):
        await following.task
    assert following.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    late = await refused(api)
    assert late.status_code == 503 and "retry-after" in late.headers
