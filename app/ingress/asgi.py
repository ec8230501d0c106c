"""ASGI plumbing beyond Starlette, for all rooms: labels, bounded bodies, event streams, deadlines, disconnects."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.ingress.errors import ApiError

Result = TypeVar("Result")

_LAST_EVENT_S = 1.0
"""Longest wait for a client to read the error event of its time-out."""

_BODY_S = 20.0
"""Time without a byte of a request's body."""
_PATIENCE = 10
_BYTES_PER_S = 500
"""In all, a client may take ten times as long as without progress, and longer at this rate or above, which is that of
Apache's `RequestReadTimeout`."""


MAX_LABEL = 128
_NOT_IN_LABEL = re.compile(r"[^A-Za-z0-9._:/@+=-]")


@dataclass(slots=True)
class ClientPace:
    """How a client sends or reads something: when it `began`, the `last` progress (seconds), and the bytes so far."""

    began: float
    last: float = field(init=False)
    bytes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.last = self.began

    def add(self, bytes: int, now: float) -> None:
        """Count some bytes more; none are no progress."""
        if bytes:
            self.bytes += bytes
            self.last = now

    def due(self, silence_s: float) -> float:
        """The time at which the client is too slow: after `silence_s` without a byte, or if it only trickles."""
        return min(self.last + silence_s, self.began + _PATIENCE * silence_s + self.bytes / _BYTES_PER_S)


class EventStream(Response):
    """A response of server-sent events. `events` is closed at its end and on cancellation."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self._events = events
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    def init_headers(self, headers: Any = None) -> None:
        """Set Starlette's headers without a content length."""
        super().init_headers(headers)
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            async for chunk in events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def read_body(http: Request, limit: int) -> bytes:
    """The body, of at most `limit` bytes.

    Raises:
        ApiError: 415 if the declared content type is not JSON; 413 as soon as the body is too large; 408 if the
            client sends too slowly.
        ClientDisconnect: the client disconnected.
    """
    media_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    # For security: a web page may send other types to loopback, where /mell is open, without a CORS preflight.
    if media_type not in ("", "application/json"):
        raise ApiError(415, f"the body is {media_type}: send Content-Type: application/json")
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")
    declared = http.headers.get("content-length", "")
    # int() rejects numbers of thousands of digits; no limit has twenty.
    if declared.isdecimal() and (len(declared) >= 20 or int(declared) > limit):
        raise too_large
    body = bytearray()
    clock = asyncio.get_running_loop().time
    progress = ClientPace(clock())
    try:
        async with asyncio.timeout_at(progress.due(_BODY_S)) as deadline:
            async for chunk in http.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large
                progress.add(len(chunk), clock())
                deadline.reschedule(progress.due(_BODY_S))
    except TimeoutError:
        raise ApiError(408, f"only {len(body)} bytes of the body arrived in time", code="timeout") from None
    return bytes(body)


def read_label(header: str | None) -> str | None:
    """The client's X-Request-Id, reduced to at most 128 allowed characters; None if none is left."""
    return _NOT_IN_LABEL.sub("", header or "")[:MAX_LABEL] or None


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled if the client disconnects. Raises ClientDisconnect.

    Only receiving reveals a disconnect: uvicorn silently drops data sent to a closed connection. (Serve's proxy
    cancels the whole call instead.)
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait({working, leaving})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def is_event_stream(start: Message) -> bool:
    """True if a message begins an event stream."""
    content_type = Headers(raw=list(start.get("headers", ()))).get("content-type", "")
    return content_type.startswith(EventStream.media_type)


class TrackedSend:
    """Passes messages on and tracks the progress of the answer. `status` is None until the answer has started.

    `chunks` is the number of messages of its body, each of which is one event of a stream, and `first` is the first.
    `usage` gives the number of tokens of the prompts and of the answer so far.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None
        self.chunks = 0
        self.first = b""
        self.usage: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.complete = self.is_event_stream = False

    def __call__(self, message: Message) -> Awaitable[None]:
        """Send a message, which counts from the call on. No coroutine: each chunk of an answer passes here."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.is_event_stream = is_event_stream(message)
        else:
            if not self.chunks:
                self.first = message.get("body", b"")
            self.chunks += 1
            self.complete = not message.get("more_body", False)
        return self._send(message)


async def within(
    timeout_s: float | None,
    app: ASGIApp,
    scope: Scope,
    receive: Receive,
    send: TrackedSend,
    ending: Callable[[ApiError, TrackedSend], bytes],
) -> ApiError | None:
    """Run `app`, cancel it after `timeout_s`, and then send the client an error. Returns the error, None without one.

    An event stream ends with `ending` of the error and the answer so far; any other answer is cut off.

    Raises:
        ApiError: 504 if nothing had been sent yet.
    """
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            await app(scope, receive, send)
    except TimeoutError:
        if not deadline.expired():
            raise
        error = ApiError(504, f"the request took longer than {timeout_s:g} s", code="timeout")
        if send.status is None:
            raise error from None
        if send.is_event_stream and not send.complete:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_EVENT_S):
                    await send({"type": "http.response.body", "body": ending(error, send), "more_body": False})
        return error
    return None
