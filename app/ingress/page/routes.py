"""The routes of the live page: its files, from app/page, and its stream of events.

The files reveal nothing about the cluster and are open to every client; the events need the access of `/mell/state`.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.ingress.asgi import EventStream, unless_disconnected
from app.ingress.errors import ApiError
from app.ingress.page.charts import WindowedQuantiles, point
from app.ingress.page.feed import Feed
from app.ingress.page.updates import PageSample
from app.ingress.telemetry.requests import RequestTelemetry

_FOLDER = Path(__file__).resolve().parents[2] / "page"
_INDEX = "index.html"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageBackend(Protocol):
    """The page's port to the ingress, a part of `app.ingress.http.backend.ControlBackend`."""

    telemetry: RequestTelemetry

    async def snapshot(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """`/mell/state` and `/mell/migrations` as of the scheduler's last epoch, without a call to any replica."""
        ...


@dataclass(frozen=True, slots=True)
class _Asset:
    content: bytes
    media_type: str
    etag: str


class PageRoutes:
    """The page's routes. `check` raises ApiError for a caller who may not see other clients' requests."""

    def __init__(self, backend: PageBackend, check: Callable[[Request], None]) -> None:
        self._backend = backend
        self._check = check
        self._ttft = WindowedQuantiles(backend.telemetry.ttft)
        self._itl = WindowedQuantiles(backend.telemetry.itl)
        self._assets = {path.name: _asset(path) for path in _FOLDER.iterdir() if path.suffix in _TYPES}
        self.feed = Feed(self._sample)

    def routes(self) -> list[Route]:
        """The routes of the page, its files, and its events."""
        return [
            Route("/mell/", self.index, methods=["GET"]),
            Route("/mell/assets/{name}", self.asset, methods=["GET"]),
            Route("/mell/events", self.events, methods=["GET"]),
        ]

    async def index(self, http: Request) -> Response:
        """GET /mell/."""
        return _answer(http, self._assets[_INDEX])

    async def asset(self, http: Request) -> Response:
        """GET /mell/assets/{name}."""
        asset = self._assets.get(http.path_params["name"])
        if asset is None:
            raise HTTPException(404)
        return _answer(http, asset)

    async def events(self, http: Request) -> "_Events":
        """GET /mell/events."""
        self._check(http)
        if self.feed.full:
            raise ApiError(503, "too many pages are open, or the ingress is stopping", retry_after_s=5)
        return _Events(self.feed)

    async def _sample(self) -> PageSample:
        state, listed = await self._backend.snapshot()
        now, clock = time.time(), time.monotonic()
        ttft, itl = self._ttft.quantiles(clock), self._itl.quantiles(clock)
        records = listed["migrations"]
        return PageSample(state, records, await asyncio.to_thread(point, state, records, now, ttft, itl), now)


class _Events:
    """The ASGI response to a page; it ends when the page closes."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await unless_disconnected(receive, EventStream(self._feed.events())(scope, receive, send))


def _asset(path: Path) -> _Asset:
    content = path.read_bytes()
    return _Asset(content, _TYPES[path.suffix], f'"{sha256(content).hexdigest()[:32]}"')


def _answer(http: Request, asset: _Asset) -> Response:
    headers = {**_HEADERS, "ETag": asset.etag}
    known = [tag.strip().removeprefix("W/") for tag in http.headers.get("if-none-match", "").split(",")]
    if asset.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(asset.content, headers=headers, media_type=asset.media_type)
