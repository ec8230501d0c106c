"""The ingress's own HTTP server, to which clients connect without a proxy.

Serve's proxy costs more per streamed chunk than all of Mell's work on it (docs/where-time-goes.md), and it applies no
backpressure. Here the stream of a slow reader waits for its socket.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable
from functools import partial
from typing import Any

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.ingress.hand_over.wire import PING_S, SILENCE_S
from app.ingress.http.connections import Bounds, Connection
from app.ingress.http.cross_origin import of_operators
from app.ingress.http.ports import open_port
from app.ingress.http.tls import TlsFiles

log = logging.getLogger("ray.serve")

_BACKLOG = 2048
_BIND_RETRY_S = 0.25


class EchoRequestId:
    """Middleware: copies the request's X-Request-Id to its response, like Serve's proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the wrapped application."""
        label = next((v for k, v in scope.get("headers", ()) if k == b"x-request-id"), None)
        if scope["type"] != "http" or label is None:
            await self._app(scope, receive, send)
            return

        def echo(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = label.decode("latin-1")
            return send(message)

        await self._app(scope, receive, echo)


class BelowPath:
    """Takes a prefix off the paths of calls; calls without it are passed on as they are, as in vLLM's server.

    Operators' routes are not below it, since a proxy may pass on whatever is.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the wrapped application."""
        path = scope.get("path", "")
        rest = path.removeprefix(self._prefix)
        if path.startswith(f"{self._prefix}/") and not of_operators(rest):
            scope = {**scope, "path": rest, "raw_path": rest.encode()}
        await self._app(scope, receive, send)


class HttpServer:
    """uvicorn on the running event loop. `close` stops accepting and lets open streams end.

    `tls` are the files of HTTPS, which are loaded again when they have changed.
    """

    def __init__(
        self, app: ASGIApp, listening: socket.socket, bounds: Bounds | None = None, tls: TlsFiles | None = None
    ) -> None:
        bounds = bounds or Bounds()
        config = uvicorn.Config(
            EchoRequestId(app),
            **({} if tls is None else tls.for_uvicorn),
            http=partial(Connection, bounds=bounds),  # type: ignore[arg-type]  # uvicorn only calls it
            ws="websockets-sansio",
            ws_max_size=bounds.message_bytes,
            ws_ping_interval=PING_S,
            ws_ping_timeout=SILENCE_S,
            ws_per_message_deflate=False,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=bounds.keep_alive_s,  # type: ignore[arg-type]  # uvicorn only waits for it
            proxy_headers=False,
        )
        self._server = uvicorn.Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]))
        self._refreshing: asyncio.Task[None] | None = None
        if tls is not None:
            config.load()
            assert config.ssl is not None
            self._refreshing = asyncio.create_task(tls.refresh(config.ssl))

    async def close(self, grace_s: float) -> None:
        """Stop; connections still open after `grace_s` seconds are cut."""
        self._server.config.timeout_graceful_shutdown = max(1, int(grace_s))
        self._server.should_exit = True
        await asyncio.wait({self._task})
        if self._refreshing is not None:
            self._refreshing.cancel()


async def listen(host: str, port: int, service: str, wait_s: float) -> socket.socket:
    """A listening socket, whose port other ingresses of the service share.

    A busy port is retried for `wait_s` seconds, since a stopping predecessor may still hold it.

    Raises:
        OSError: the port is not available.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return open_port(host, port, service, _BACKLOG)
        except OSError as error:
            if time.monotonic() > deadline:
                raise OSError(error.errno, f"{host}:{port}: {error.strerror}; set ingress.port") from None
            await asyncio.sleep(_BIND_RETRY_S)


def endpoint(host: str, port: int, tls: bool = False) -> str:
    """The URL at which clients on this machine reach a socket bound to `host`."""
    shown: Any = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    return f"http{'s' if tls else ''}://{shown}:{port}"
