"""One HTTP call to the Rust frontend: asyncio and httptools alone, since each chunk of a stream passes here.

A call has a connection of its own. On a Unix socket that costs less than what a pool would have to get right: an idle
connection that its server closes just when it is used again.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import httptools

_MAX_BUFFER = 256 << 10
"""Bytes that wait for a slow client; above, the frontend has to wait."""

Headers = Sequence[tuple[bytes, bytes]]


class ExchangeBroken(Exception):
    """The connection ended before the answer."""


@dataclass(slots=True)
class AnswerHead:
    """Status and headers of an answer; names are in lower case."""

    status: int
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)

    def header(self, name: bytes) -> bytes:
        """The value of a header, empty without it."""
        return next((value for key, value in self.headers if key == name), b"")


class HttpExchange(asyncio.Protocol):
    """The client's side of the call. `chunks` are those of the body as they have arrived, joined if several have."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._head: asyncio.Future[AnswerHead] = asyncio.get_running_loop().create_future()
        self._arriving = AnswerHead(0)
        self._transport: asyncio.Transport | None = None
        self._body: list[bytes] = []
        self._bytes = 0
        self._paused = self._complete = self._broken = False
        self._wake: asyncio.Future[None] | None = None

    @classmethod
    async def begin(cls, address: str, method: str, path: str, headers: Headers, body: bytes) -> "HttpExchange":
        """Send a request to the Unix socket at `address`.

        Raises:
            ExchangeBroken: nothing listens there.
        """
        lines = [f"{method} {path} HTTP/1.1".encode(), b"host: vllm-rs", b"connection: close"]
        lines += [b"%b: %b" % pair for pair in headers]
        lines += [b"content-length: %d" % len(body), b"", b""]
        try:
            transport, exchange = await asyncio.get_running_loop().create_unix_connection(cls, address)
        except OSError as error:
            raise ExchangeBroken(f"no connection: {error}") from error
        transport.write(b"\r\n".join(lines) + body)
        return exchange

    async def head(self) -> AnswerHead:
        """The head of the answer, once it has arrived. Raises ExchangeBroken."""
        return await asyncio.shield(self._head)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body. Raises ExchangeBroken if it is incomplete."""
        while True:
            if self._body:
                chunk = self._body[0] if len(self._body) == 1 else b"".join(self._body)
                self._body.clear()
                self._bytes = 0
                if self._paused:
                    self._pause(False)
                yield chunk
            elif self._complete:
                return
            elif self._broken:
                raise ExchangeBroken("the connection ended before the answer")
            else:
                self._wake = asyncio.get_running_loop().create_future()
                await self._wake

    async def content(self) -> bytes:
        """The whole body. Raises ExchangeBroken."""
        return b"".join([chunk async for chunk in self.chunks()])

    def close(self) -> None:
        """End the call. The frontend aborts a request whose answer is incomplete."""
        if self._transport is not None:
            self._transport.abort()
        self._head.cancel()

    def _pause(self, paused: bool) -> None:
        assert self._transport is not None
        self._paused = paused
        if paused:
            self._transport.pause_reading()
        elif not self._transport.is_closing():
            self._transport.resume_reading()

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    # --- called by the event loop ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.connection_lost(None)
            self.close()
        self._wake_up()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._broken = True
        if not self._head.done():
            self._head.set_exception(ExchangeBroken("the connection ended before the answer"))
            self._head.exception()  # that nobody waits for it is no error
        self._wake_up()

    # --- called by the parser -------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        self._arriving.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._arriving.status = self._parser.get_status_code()
        if not self._head.done():
            self._head.set_result(self._arriving)

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._body.append(body)
        self._bytes += len(body)
        if self._bytes > _MAX_BUFFER and not self._paused:
            self._pause(True)

    def on_message_complete(self) -> None:
        """See httptools."""
        self._complete = True
