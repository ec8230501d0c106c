"""HTTP connections that nobody can keep open for nothing.

uvicorn bounds how long a connection idles after an answer, and nothing else. One that never asks, that stops in the
middle of a head, or that is being closed while its client does not read the rest, stays for as long as the client
likes; a head is taken however large it is. Clients that fail do that, not only bad ones, and each costs a file. A
reverse proxy bounds the same, but nothing says that there is one. (A request's body has its time in `asgi.read_body`,
an answer in `request_timeout_s`.)
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

_TELL_EVERY_S = 60.0


def _most_connections() -> int:
    """A quarter of the files that the process may open stays for everything else: Ray's sockets, logs, key files."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a connection may take. Precedents: Apache's `RequestReadTimeout header=20`, h11's 64 KiB."""

    keep_alive_s: int = 60
    """Idle after an answer."""
    head_s: float = 20.0
    """From connecting, or from the first byte after an answer, until the head of a request is there."""
    head_bytes: int = 64 << 10
    """Of a head, beyond what the first read of it brings; of what stands between pieces of a body, too."""
    flush_s: float = 10.0
    """For a client to read what was written before its connection was closed."""
    connections: int = field(default_factory=_most_connections)
    """Open at a time; more are cut at once."""

    @property
    def check_s(self) -> float:
        """How often a connection is looked at: it may take that much longer."""
        return min(self.head_s, self.flush_s) / 4


class Connection(HttpToolsProtocol):
    """uvicorn's connection, within `bounds`."""

    _told_at: ClassVar[float] = -math.inf

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
        """When the connection is cut; None while a request is under way, or uvicorn's keep-alive time runs."""
        self._closing = False
        self._loose_bytes = 0
        """Received since a head began, or since the last piece of a body."""
        self._timer: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        super().connection_made(transport)
        if len(self.connections) > self._bounds.connections:
            self._tell_refused()
            transport.abort()
            return
        self._due = self.loop.time() + self._bounds.head_s
        self._timer = self.loop.call_later(self._bounds.check_s, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """The client said something."""
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
        """A head begins."""
        self._loose_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A head is there."""
        self._loose_bytes, self._due = 0, None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """So is a piece of the body."""
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

    def _tell_refused(self) -> None:
        now = self.loop.time()
        if now - Connection._told_at > _TELL_EVERY_S:
            Connection._told_at = now
            log.warning("%d connections are open: more are cut; raise `ulimit -n`", self._bounds.connections)
