"""The real HTTP server over fake replicas: `python -m tests.app.ingress.http.server_process`.

It prints two ports and serves until its standard input ends; on the second port the model's name makes each chunk of a
stream 4 KiB longer. A separate process has its own memory, files and event loop. `GET /inside` counts its open
conversations, requests and tasks. After `POST /hold`, answers stop at their next token until `POST /go`.
"""

import asyncio
import gc
import json
import sys
from typing import ClassVar

import uvloop
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.ingress.http.connections import Bounds
from app.ingress.http.server import HttpServer, listen
from tests.app.ingress import fakes

CONTEXT = 8192


class HeldEngine(fakes.StoppingEngine):
    """An engine with room for long answers, which makes no step while it is on hold."""

    going: ClassVar[bool] = True

    def __init__(self, step_s: float) -> None:
        super().__init__(step_s, CONTEXT)

    def _turn(self) -> None:
        if self.going:
            super()._turn()
        else:
            self._timer = self._loop.call_later(0.01, self._turn)


async def _serve() -> None:
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
        HeldEngine.going = False
        return Response()

    async def go(http: Request) -> Response:
        HeldEngine.going = True
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
