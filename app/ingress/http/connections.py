"""Time and size limits of HTTP connections, and offers of other protocols, which are ignored.

uvicorn limits only the idle time of a connection after an answer. A connection that never sends a request, that stops
in the middle of a head, or whose client does not read the rest of an answer after the server has closed it, stays open
for as long as the client likes, and a head may have any size. Failing clients do this as well as hostile ones, and each
connection costs a file descriptor. A reverse proxy has the same limits, but there may be none. (The time limit of a
request's body is in `asgi.read_body`, that of an answer is `request_timeout_s`.)

Time limits count from the last progress (`asgi.ClientPace`). The progress of an answer is the number of bytes that the
client's kernel has acknowledged: the server's holds megabytes of an answer that it has written whole. A client's kernel
whose buffer is full acknowledges nothing until a sixteenth of it, and at least a segment, has been read (Linux,
`__tcp_select_window`). So a client that reads slowly and steadily makes progress in steps, and the limit between two
of them rises with what its kernel may hold.

A request may offer another protocol by `Upgrade`, as Java's clients offer HTTP/2. Only the paths of `Bounds.websockets`
take an offer. RFC 9110, section 7.8, lets a server ignore any other. The parser takes the end of such a head for the
end of HTTP/1.1, so the head is parsed once more without the offer.
"""

import asyncio
import logging
import math
import resource
import socket
import struct
from asyncio.events import TimerHandle
from dataclasses import dataclass, field
from typing import Any, ClassVar

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from app.ingress.asgi import ClientPace

log = logging.getLogger("ray.serve")

_LOG_EVERY_S = 60.0
_BYTES_ACKED = struct.Struct("=120xQ")
"""`tcpi_bytes_acked` in Linux's `struct tcp_info`."""
_LARGEST_BUFFER = 8 << 20
"""The largest buffer of a client's kernel that is allowed for, in bytes; Linux's default maximum is 6 MiB."""
_STEPS = 16
"""The steps in which a kernel whose buffer was full acknowledges what is read."""


def _most_connections() -> int:
    """Three quarters of the process's file limit; the rest is for Ray's sockets, logs and key files."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a connection. Precedents: Apache's `RequestReadTimeout header=20`, h11's 64 KiB."""

    keep_alive_s: float = 60
    """Idle time after an answer."""
    head_s: float = 20.0
    """Time without a byte of a request's head, from connecting, or from its first byte after an answer."""
    head_bytes: int = 64 << 10
    """Size of a head beyond its first read, and of the framing between chunks of a body."""
    flush_s: float = 150.0
    """Time in which a client's kernel acknowledges nothing of an answer after the server has closed the connection,
    beside the time for its buffer. It suffices for a segment of 64 KiB, the largest, at `bytes_per_s`.
    """
    bytes_per_s: float = 500.0
    """The slowest steady reading that counts as progress; that of Apache's `RequestReadTimeout`."""
    connections: int = field(default_factory=_most_connections)
    """Open connections; further ones are cut at once."""
    websockets: frozenset[str] = frozenset()
    """The paths of WebSockets."""
    message_bytes: int = 16 << 20
    """The longest message of a WebSocket; a longer one ends it."""

    @property
    def check_s(self) -> float:
        """Interval between checks of a connection; limits are exceeded by up to this time."""
        return min(self.head_s, self.flush_s) / 4


class Connection(HttpToolsProtocol):
    """uvicorn's connection with limits."""

    _logged_at: ClassVar[float] = -math.inf

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._bounds = bounds or Bounds()
        self._head: ClientPace | None = None
        """The progress of a request's head; None during a request and during the keep-alive time."""
        self._closing: ClientPace | None = None
        """The progress of the client's reading since the server has closed the connection."""
        self._acked = 0
        """Bytes that the client's side has acknowledged in all, at the last look."""
        self._loose_bytes = 0
        """Bytes received since a head began, or since the last chunk of a body."""
        self._timer: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a client, or cut it if too many are connected."""
        super().connection_made(transport)
        if len(self.connections) > self._bounds.connections:
            self._log_refused()
            transport.abort()
            return
        self._head = ClientPace(self.loop.time())
        self._timer = self.loop.call_later(self._bounds.check_s, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the checks."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, within the limit on heads."""
        self._loose_bytes += len(data)
        if self._head is not None:
            self._head.add(len(data), self.loop.time())
        self._unset_keepalive_if_required()
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self.transport.is_closing() or self.transport.get_protocol() is not self:
            return
        answering = self.cycle is not None and not self.cycle.response_complete
        if self._loose_bytes > self._bounds.head_bytes:
            if answering:
                self.transport.abort()
            else:
                self.send_400_response(f"The request's head is larger than {self._bounds.head_bytes} bytes.")
        elif self._head is None and not answering:
            self._head = ClientPace(self.loop.time())

    def on_message_begin(self) -> None:
        """Count the bytes of a new head from zero."""
        self._loose_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """End the time limit of the head."""
        self._loose_bytes, self._head = 0, None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Count the framing of the next chunk from zero."""
        self._loose_bytes = 0
        super().on_body(body)

    def _parse(self, data: memoryview) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if self._get_upgrade() == b"websocket" and self._path() in self._bounds.websockets:
                    self._become_websocket()
                    return
                data = data[offer.args[0] :]
            else:
                return
            if (method := self.parser.get_method()) == b"CONNECT":
                raise httptools.HttpParserInvalidMethodError("no proxy")
            version = self.parser.get_http_version().encode()
            lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
            lines += [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def _path(self) -> str:
        return (httptools.parse_url(self.url).path or b"").decode("latin-1")

    def _become_websocket(self) -> None:
        """Hand the connection over. The checks go on: they cut it if it is closed, and its client does not read."""
        if self.cycle is not None and not self.cycle.response_complete:
            raise httptools.HttpParserError("an upgrade before the end of the answer")
        self.handle_websocket_upgrade()
        if not getattr(self.transport.get_protocol(), "handshake_initiated", False):
            self.send_400_response("The head is none of a WebSocket.")

    def _should_upgrade(self) -> bool:
        # uvicorn then leaves the request alone that ends with an offer.
        return True

    def _check(self) -> None:
        now = self.loop.time()
        if self._closing is not None:
            before, self._acked = self._acked, self._bytes_acked()
            self._closing.add(self._acked - before, now)
        elif self.transport.is_closing():
            self._closing, self._acked = ClientPace(now), self._bytes_acked()
        late_head = self._head is not None and now >= self._head.due(self._bounds.head_s)
        if late_head or (self._closing is not None and now >= self._closing.due(self._flush_s)):
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(self._bounds.check_s, self._check)

    @property
    def _flush_s(self) -> float:
        held = min(self._acked, _LARGEST_BUFFER)
        return self._bounds.flush_s + held / _STEPS / self._bounds.bytes_per_s

    def _bytes_acked(self) -> int:
        try:
            info = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
        except OSError:  # The client has left.
            return self._acked
        (acked,) = _BYTES_ACKED.unpack(info)
        return int(acked)

    def _log_refused(self) -> None:
        now = self.loop.time()
        if now - Connection._logged_at > _LOG_EVERY_S:
            Connection._logged_at = now
            log.warning("%d connections are open and further ones are cut: raise `ulimit -n`", self._bounds.connections)
