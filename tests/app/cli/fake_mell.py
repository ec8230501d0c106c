"""A fake of the operator's part of the HTTP API."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from app.ingress.errors import ApiError
from tests.app.client.sample import BUSY, MATCHED, MOVED


@dataclass
class FakeMell:
    """Its answers, its refusal, and the orders that it got."""

    state: dict[str, Any] = field(default_factory=lambda: BUSY)
    migrations: dict[str, Any] = field(default_factory=lambda: MOVED)
    refusal: ApiError | None = None
    """The answer to every call, if set."""
    admin_key: str | None = None
    orders: list[Any] = field(default_factory=list)
    dropped: dict[str, Any] = field(default_factory=lambda: {"blocks": {"b": 75, "a": 1}, "failed": {}})

    draining: list[str] = field(default_factory=list)
    on_nodes: list[str] = field(default_factory=list)
    unpinned: dict[str, str] = field(default_factory=dict)
    handing: dict[str, Any] = field(
        default_factory=lambda: {"to": None, "here": 2, "there": 0, "staying": {}, "taken": 0, "silent": []}
    )

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/health", self._answer(lambda _: PlainTextResponse("OK"))),
                Route("/mell/state", self._answer(lambda _: JSONResponse(self.state))),
                Route("/mell/migrations", self._answer(lambda _: JSONResponse(self.migrations)), methods=["GET"]),
                Route("/mell/migrations", self._move, methods=["POST"]),
                Route("/mell/replicas/{replica}/drain", self._answer(self._drain), methods=["POST"]),
                Route("/mell/nodes/{node}/drain", self._drain_node, methods=["POST"]),
                Route("/mell/replicas/{replica}/role", self._set_role, methods=["POST"]),
                Route("/mell/replicas/{replica}/memory", self._set_role, methods=["POST"]),
                Route("/mell/{kind}/{name}/sleep", self._sleep, methods=["POST"]),
                Route("/mell/{kind}/{name}/wake", self._sleep, methods=["POST"]),
                Route("/mell/hand-over", self._hand_over, methods=["GET", "POST", "DELETE"]),
                Route("/mell/mode", self._answer(lambda _: JSONResponse(self._mode())), methods=["GET"]),
                Route("/mell/mode", self._echo, methods=["POST"]),
                Route("/mell/bounds", self._echo, methods=["POST"]),
                Route("/mell/level", self._echo, methods=["POST"]),
                Route("/mell/cache/match", self._match, methods=["POST"]),
                Route("/mell/cache/copy", self._copy, methods=["POST"]),
                Route("/mell/cache/pin", self._pin, methods=["POST"]),
                Route("/mell/cache", self._drop, methods=["DELETE"]),
            ]
        )

    def _answer(self, answer: Callable[[Request], Response]) -> Callable[[Request], Response]:
        return lambda request: self._refused(request) or answer(request)

    def _refused(self, request: Request) -> Response | None:
        refusal = self.refusal
        if self.admin_key and request.headers.get("authorization") != f"Bearer {self.admin_key}":
            refusal = ApiError(401, "this call requires Authorization: Bearer <admin key>", code="invalid_api_key")
        return JSONResponse(refusal.body(), refusal.status) if refusal else None

    async def _sleep(self, request: Request) -> Response:
        _, _, kind, name, verb = request.url.path.split("/")
        self.orders.append((kind, name, verb))
        return self._refused(request) or JSONResponse({"id": name, "asleep": verb == "sleep"}, 202)

    async def _move(self, request: Request) -> Response:
        self.orders.append(await request.json())
        return self._refused(request) or JSONResponse({"id": "0123456789abcdef"}, 202)

    async def _set_role(self, request: Request) -> Response:
        replica, order = request.path_params["replica"], await request.json()
        self.orders.append((replica, order))
        return self._refused(request) or JSONResponse({"id": replica} | order, 202)

    def _mode(self) -> dict[str, Any]:
        return {name: self.state[name] for name in ("mode", "configured_mode")}

    async def _echo(self, request: Request) -> Response:
        self.orders.append(order := await request.json())
        return self._refused(request) or JSONResponse(order)

    async def _match(self, request: Request) -> Response:
        self.orders.append(await request.json())
        return self._refused(request) or JSONResponse(MATCHED)

    async def _copy(self, request: Request) -> Response:
        self.orders.append(await request.json())
        copied = {"held": 75, "blocks": 70, "bytes": 9_175_040, "duration_s": 0.041}
        return self._refused(request) or JSONResponse(copied)

    async def _pin(self, request: Request) -> Response:
        self.orders.append(order := await request.json())
        pinned = {"blocks": {"b": 75}, "failed": self.unpinned, "ttl_s": order["ttl_s"]}
        return self._refused(request) or JSONResponse(pinned)

    async def _drop(self, request: Request) -> Response:
        self.orders.append(await request.json())
        return self._refused(request) or JSONResponse(self.dropped)

    async def _hand_over(self, request: Request) -> Response:
        if request.method == "POST":
            self.orders.append(order := await request.json())
            self.handing |= {"to": order["to"]}
        elif request.method == "DELETE":
            self.handing |= {"to": None}
        return self._refused(request) or JSONResponse(self.handing)

    async def _drain_node(self, request: Request) -> Response:
        self.orders.append((request.path_params["node"], await request.json()))
        return self._refused(request) or JSONResponse({"nodes": self.draining, "replicas": self.on_nodes}, 202)

    def _drain(self, request: Request) -> Response:
        replica = request.path_params["replica"]
        self.orders.append(replica)
        return JSONResponse({"id": replica, "state": "DRAINING"}, 202)


def free_port() -> int:
    """An unused port of loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Fake(Protocol):
    """A server for tests."""

    def app(self) -> Starlette:
        """The ASGI application."""


@contextmanager
def serving(fake: Fake, port: int = 0) -> Iterator[str]:
    """Serve the fake for the duration of the block; its URL."""
    server = uvicorn.Server(uvicorn.Config(fake.app(), log_level="critical", lifespan="off", ws="none"))
    with socket.create_server(("127.0.0.1", port)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        while not server.started:
            time.sleep(0.001)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
