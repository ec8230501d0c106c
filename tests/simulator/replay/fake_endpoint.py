"""A fake OpenAI-compatible endpoint for replays, which answers with the letter x."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

OLD_MIGRATION = {"id": "old", "path": "kv", "outcome": "committed", "pause_s": 9.0}
NEW_MIGRATION = {"id": "new", "path": "tokens", "outcome": "committed", "bytes": 10, "pause_s": 0.25}


@dataclass
class FakeEndpoint:
    """Faults by label of the request, and the requests received."""

    faults: Mapping[str, str] = field(default_factory=dict)
    mell: bool = True
    context: int = 4096
    models_status: int = 200
    hold_until: int = 0
    """No stream ends before this number of streams has begun."""
    on_request: Callable[[int], None] = lambda count: None
    bodies: dict[str, dict[str, Any]] = field(default_factory=dict)
    moves: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    _released: asyncio.Event = field(default_factory=asyncio.Event)

    def app(self) -> Starlette:
        """The ASGI application."""
        mell = [
            Route("/mell/state", self._state),
            Route("/mell/migrations", self._migrations),
            Route("/mell/migrations", self._move, methods=["POST"]),
        ]
        openai = [
            Route("/v1/models", self._models),
            Route("/v1/completions", self._complete, methods=["POST"]),
        ]
        return Starlette(routes=openai + (mell if self.mell else []))

    async def _models(self, request: Request) -> Response:
        if self.models_status != 200:
            return JSONResponse({"error": {"message": "still starting"}}, self.models_status)
        return JSONResponse({"data": [{"id": "fake", "max_model_len": self.context}]})

    async def _complete(self, request: Request) -> Response:
        label, body = request.headers["x-request-id"], await request.json()
        self.bodies[label] = body
        self.on_request(len(self.bodies))
        if len(self.bodies) >= self.hold_until:
            self._released.set()
        fault = self.faults.get(label)
        if fault == "refuse":
            return JSONResponse({"error": {"message": "saturated"}}, 503)
        return StreamingResponse(self._stream(body["max_tokens"], fault), media_type="text/event-stream")

    async def _stream(self, wanted: int, fault: str | None) -> AsyncIterator[str]:
        tokens = wanted - 1 if fault == "lose a token" else wanted
        for _ in range(tokens):
            yield event(choices=[{"text": "x", "finish_reason": None}])
            await asyncio.sleep(0.001)
            if fault == "break off":
                raise ConnectionError("as if the process had died")
            if fault == "garble":
                yield "data: {half\n\n"
            if fault == "report an error":
                yield event(error={"message": "engine died"})
        await self._released.wait()
        yield event(choices=[], usage={"completion_tokens": tokens})
        if fault != "end early":
            yield "data: [DONE]\n\n"

    async def _state(self, request: Request) -> Response:
        self.keys.add(request.headers.get("authorization"))
        listed = {"label": "", "tokens": 10, "phase": "decode", "hop": 0}
        requests = [listed | {"id": "r1", "movable": True}, listed | {"id": "r2", "movable": False}]
        replica = {"state": "RUNNING", "node": "n", "capacity_tokens": 200, "used_tokens": 50, "preemptions": 0}
        replicas = [replica | {"id": "a", "requests": requests}, replica | {"id": "b", "requests": []}]
        return JSONResponse({"as_of": 0.0, "mode": "act", "replicas": replicas})

    async def _migrations(self, request: Request) -> Response:
        # The first request of the replay brings about a migration.
        return JSONResponse({"migrations": ([NEW_MIGRATION] if self.bodies else []) + [OLD_MIGRATION]})

    async def _move(self, request: Request) -> Response:
        self.moves.append(await request.json())
        return JSONResponse({"detail": "busy"}, 409) if len(self.moves) == 1 else JSONResponse({"id": "m"}, 202)


def event(**fields: Any) -> str:
    """One SSE event with a JSON object."""
    return f"data: {json.dumps(fields)}\n\n"


@contextmanager
def serving(endpoint: FakeEndpoint) -> Iterator[str]:
    """Serve the endpoint on a free port for the duration of the block; its URL."""
    config = uvicorn.Config(endpoint.app(), log_level="critical", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        while not server.started:
            time.sleep(0.001)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()
