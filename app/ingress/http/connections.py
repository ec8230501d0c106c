"""Time and size limits of HTTP connections.

uvicorn limits only the idle time of a connection after an answer. A connection that never sends a request, that stops
in the middle of a head, or whose client does not read the rest of an answer after the server has closed it, stays open
for as long as the client likes, and a head may have any size. Failing clients do this as well as hostile ones, and each
connection costs a file descriptor. A reverse proxy has the same limits, but there may be none. (The time limit of a
request's body is in `asgi.read_body`, that of an answer is `request_timeout_s`.)
"""

import asyncio
import logging
import math
import resource
from asyncio.events import TimerHandle
from dataclasses import dataclass, field
from typing import Any, ClassVar

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

log = logging.getLogger("ray.serve")

_LOG_EVERY_S = 60.0


def _most_connections() -> int:
    """Three quarters of the process's file limit; the rest is for Ray's sockets, logs and key files."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a connection. Precedents: Apache's `RequestReadTimeout header=20`, h11's 64 KiB."""

    keep_alive_s: int = 60
    """Idle time after an answer."""
    head_s: float = 20.0
    """Time from connecting, or from the first byte after an answer, to the end of a request's head."""
    head_bytes: int = 64 << 10
    """Size of a head beyond its first read, and of the framing between chunks of a body."""
    flush_s: float = 10.0
    """Time for a client to read the rest of an answer after the server has closed the connection."""
    connections: int = field(default_factory=_most_connections)
    """Open connections; further ones are cut at once."""

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
        self._due: float | None = None
        """Time at which the connection is cut; None during a request and during uvicorn's keep-alive time."""
        self._closing = False
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
        self._due = self.loop.time() + self._bounds.head_s
        self._timer = self.loop.call_later(self._bounds.check_s, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the checks."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, within the limit on heads."""
        self._loose_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        answering = self.cycle is not None and not self.cycle.response_complete
        if self._loose_bytes > self._bounds.head_bytes:
            if answering:
                self.transport.abort()
            else:
                self.send_400_response(f"The request's head is larger than {self._bounds.head_bytes} bytes.")
        elif self._due is None and not answering:
            self._due = self.loop.time() + self._bounds.head_s

    def on_message_begin(self) -> None:
        """Count the bytes of a new head from zero."""
        self._loose_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """End the time limit of the head."""
        self._loose_bytes, self._due = 0, None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Count the framing of the next chunk from zero."""
        self._loose_bytes = 0
        super().on_body(body)

    def _check(self) -> None:
        now = self.loop.time()
        if self.transport.is_closing() and not self._closing:
            self._closing, self._due = True, now + self._bounds.flush_s
        if self._due is not None and now >= self._due:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(self._bounds.check_s, self._check)

    def _log_refused(self) -> None:
        now = self.loop.time()
        if now - Connection._logged_at > _LOG_EVERY_S:
            Connection._logged_at = now
            log.warning("%d connections are open and further ones are cut: raise `ulimit -n`", self._bounds.connections)
