"""The tracing port, and its callers in the order of a request's life:

    KeepHttpScope     the HTTP scope, from whose headers `Tracer.begin` reads the caller's trace
    RequestObserver   `begin` ... `end`: the request, as its client sees it
    Streams           `opened` ... `closed`: one choice of its answer
    RequestJournal    `hosted` before the call to a replica, `lost` if the replica refuses
                      `took` after each event, `hosted` when the request has moved
                      `lost` when the replica is gone, `hosted` when the request continues on its migration target

This module does not import OpenTelemetry; `app.ingress.telemetry.spans`, imported only if tracing is enabled, does.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from migration.protocol.reading import Reader, SegmentOrigin
from policies.model import RequestId

HTTP_SCOPE: ContextVar[Scope | None] = ContextVar("http_scope", default=None)
"""The ASGI scope of the HTTP request that the current task answers."""


class RequestTrace(Protocol):
    """The trace of one request."""

    @property
    def id(self) -> str | None:
        """The trace's id in hexadecimal digits; None without tracing."""
        ...

    def end(self, line: Mapping[str, Any]) -> None:
        """The request has ended; `line` is its log line, see `app.ingress.telemetry.requests`."""
        ...


class Tracer(Protocol):
    """Receives the events of requests. No method raises, and only `close` waits."""

    def begin(self, endpoint: str) -> RequestTrace:
        """A request has arrived; requests opened in this context belong to it until its end."""
        ...

    def opened(self, request: RequestId) -> None:
        """A choice of the answer begins."""
        ...

    def hosted(self, request: RequestId, reader: Reader, origin: SegmentOrigin, index: int) -> None:
        """`reader.host` owns the request, or is about to be asked; it generates output tokens from `index` on."""
        ...

    def took(self, request: RequestId, reader: Reader) -> None:
        """An event of the request has arrived, with or without tokens."""
        ...

    def lost(self, request: RequestId, reason: str, had: bool) -> None:
        """The replica has lost the request or, if it never `had` it, refused it."""
        ...

    def closed(self, request: RequestId, finish: str | None) -> None:
        """The choice is no longer read; `finish` is its finish reason, None if it has not ended."""
        ...

    async def close(self, within_s: float) -> None:
        """Export all pending spans within `within_s` seconds, and none afterwards."""
        ...


class NoRequestTrace:
    """A `RequestTrace` without effect."""

    id = None

    def end(self, line: Mapping[str, Any]) -> None:
        """See `RequestTrace.end`."""


class NoTracer:
    """A `Tracer` without effect."""

    def begin(self, endpoint: str) -> RequestTrace:
        """See `Tracer.begin`."""
        return _NO_TRACE

    def opened(self, request: RequestId) -> None:
        """See `Tracer.opened`."""

    def hosted(self, request: RequestId, reader: Reader, origin: SegmentOrigin, index: int) -> None:
        """See `Tracer.hosted`."""

    def took(self, request: RequestId, reader: Reader) -> None:
        """See `Tracer.took`."""

    def lost(self, request: RequestId, reason: str, had: bool) -> None:
        """See `Tracer.lost`."""

    def closed(self, request: RequestId, finish: str | None) -> None:
        """See `Tracer.closed`."""

    async def close(self, within_s: float) -> None:
        """See `Tracer.close`."""


_NO_TRACE = NoRequestTrace()
NO_TRACER = NoTracer()


class KeepHttpScope:
    """Middleware: sets `HTTP_SCOPE` while a request is answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the wrapped application."""
        token = HTTP_SCOPE.set(scope)
        try:
            await self._app(scope, receive, send)
        finally:
            HTTP_SCOPE.reset(token)
