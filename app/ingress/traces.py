"""Who tells what for traces, in the order of a request's life:

    Incoming    the headers that it came with, for whoever begins its trace
    Watch       `begin` ... `end`: the request, as its client sees it
    Streams     `opened` ... `closed`: one choice of its answer
    Submitter   `hosted` before a replica is asked, `lost` if that does not take it
    Streams     `took` when an event has come, `hosted` when the request has moved
    Recovery    `lost` when its replica is gone, `hosted` when it goes on where it was moving to

Nothing here knows of OpenTelemetry: that is in `app.ingress.spans`, which is imported where traces are asked for.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from app.ingress.conversation import Conversation
from app.ingress.journey import By

INCOMING: ContextVar[Scope | None] = ContextVar("incoming", default=None)
"""The ASGI scope of the HTTP request that is being answered."""


class Trace(Protocol):
    """The trace of one request."""

    @property
    def id(self) -> str | None:
        """The trace's id in hexadecimal digits; None where there is no trace."""
        ...

    def end(self, line: Mapping[str, Any]) -> None:
        """The request has ended; `line` is what is logged of it, see `app.ingress.observed`."""
        ...


class Tracer(Protocol):
    """Is told what happens to requests. Nothing of it raises, and nothing but `close` waits."""

    def begin(self, endpoint: str) -> Trace:
        """A request has arrived; what is opened in this context is a part of it, until its end."""
        ...

    def opened(self, conversation: Conversation) -> None:
        """A choice of the answer begins."""
        ...

    def hosted(self, conversation: Conversation, by: By, index: int) -> None:
        """`conversation.host` has the request or is asked to take it; output tokens from `index` on are its."""
        ...

    def took(self, conversation: Conversation) -> None:
        """An event of it has come, with or without tokens."""
        ...

    def lost(self, conversation: Conversation, reason: str) -> None:
        """`conversation.host` does not have the request, or not any more if it was `submitted`."""
        ...

    def closed(self, conversation: Conversation) -> None:
        """The choice is not read any more."""
        ...

    async def close(self, within_s: float) -> None:
        """Send what has been told, for at most so long, and nothing from then on."""
        ...


class NoTrace:
    """See `Trace`: there is none."""

    id = None

    def end(self, line: Mapping[str, Any]) -> None:
        """See `Trace.end`."""


class NoTracer:
    """See `Tracer`: nobody is told."""

    def begin(self, endpoint: str) -> Trace:
        """See `Tracer.begin`."""
        return _NO_TRACE

    def opened(self, conversation: Conversation) -> None:
        """See `Tracer.opened`."""

    def hosted(self, conversation: Conversation, by: By, index: int) -> None:
        """See `Tracer.hosted`."""

    def took(self, conversation: Conversation) -> None:
        """See `Tracer.took`."""

    def lost(self, conversation: Conversation, reason: str) -> None:
        """See `Tracer.lost`."""

    def closed(self, conversation: Conversation) -> None:
        """See `Tracer.closed`."""

    async def close(self, within_s: float) -> None:
        """See `Tracer.close`."""


_NO_TRACE = NoTrace()
NO_TRACER = NoTracer()


class Incoming:
    """Middleware: keeps the HTTP request where whoever begins its trace finds it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        token = INCOMING.set(scope)
        try:
            await self._app(scope, receive, send)
        finally:
            INCOMING.reset(token)
