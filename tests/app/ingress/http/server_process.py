"""The real HTTP server over fake replicas: `python -m tests.app.ingress.http.server_process`.

It prints two ports and serves until its standard input ends; on the second port the model's name makes each chunk of a
stream 4 KiB longer. A separate process has its own memory, files and event loop. `GET /inside` counts its open
conversations, requests and tasks. After `POST /hold`, answers stop at their next token until `POST /go`.
"""

import asyncio
import gc
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import ClassVar

import uvloop
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.ingress.http.connections import Bounds
from app.ingress.http.server import HttpServer, listen
from migration.protocol.messages import Tail
from migration.protocol.ports import Generated
from migration.protocol.request import RequestSpec
from tests.app.ingress import fakes

CONTEXT = 8192


class HeldEngine(fakes.StoppingEngine):
    """An engine with room for long answers, which waits after each token while it is on hold."""

    going: ClassVar[asyncio.Event]

    def __init__(self, step_s: float) -> None:
        super().__init__(step_s, num_blocks=CONTEXT // 4, block_size=4)

    async def drawn(
        self, key: str, spec: RequestSpec, outputs: tuple[int, ...], tail: Tail | None = None
    ) -> AsyncGenerator[Generated]:
        """See `Engine.generate`."""
        async with aclosing(super().drawn(key, spec, outputs, tail)) as steps:
            async for step in steps:
                yield step
                await self.going.wait()


async def _serve() -> None:
    HeldEngine.going = asyncio.Event()
    HeldEngine.going.set()
    fakes.StoppingEngine = HeldEngine  # type: ignore[misc, assignment]
    service = fakes.make_service(step_s=0.002, lease_s=60, place_timeout_s=60)
    names = ("tiny", "tiny" + 4096 * "-")
    apis = [fakes.make_api(service, model=name) for name in names]

    async def inside(http: Request) -> JSONResponse:
        gc.collect()
        return JSONResponse(
            {
                "conversations": service.streams.count,
                "requests": sum(api.backend.gate.running for api in apis),
                "idle": all(replica.idle for replica in service.replicas.values()),
                "tasks": len(asyncio.all_tasks()),
            }
        )

    async def hold(http: Request) -> Response:
        HeldEngine.going.clear()
        return Response()

    async def go(http: Request) -> Response:
        HeldEngine.going.set()
        return Response()

    servers, ports = [], []
    for api in apis:
        for handler, method in ((inside, "GET"), (hold, "POST"), (go, "POST")):
            api.app.router.routes.insert(0, Route(f"/{handler.__name__}", handler, methods=[method]))
        listening = await listen("127.0.0.1", 0, "mell", wait_s=0)
        ports.append(listening.getsockname()[1])
        servers.append(HttpServer(api.app, listening, Bounds(keep_alive_s=3600, head_s=3600)))
    print(json.dumps(ports), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for server in servers:
        await server.close(1)


if __name__ == "__main__":
    uvloop.run(_serve())
