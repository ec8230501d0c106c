"""Middleware of the operator's own, by its import path."""

from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from app.service.deployment import add_middleware


class Stamp:
    """A class of ASGI."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def stamped(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-stamp", b"class")]
            await send(message)

        await self._app(scope, receive, stamped)


async def refuse_lines(request: Request, call_next: Any) -> Response:
    """A function."""
    if "x-line" in request.headers:
        return PlainTextResponse("no", 418)
    answer: Response = await call_next(request)
    return answer


async def _hello(http: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


async def test_classes_and_functions_are_put_around_all_routes() -> None:
    app = Starlette(routes=[Route("/", _hello)])
    for name in ("Stamp", "refuse_lines"):
        add_middleware(app, f"{__name__}.{name}")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://mell") as client:
        answer = await client.get("/")
        assert (answer.text, answer.headers["x-stamp"]) == ("hello", "class")
        assert (await client.get("/", headers={"X-Line": "1"})).status_code == 418


@pytest.mark.parametrize(("path", "error"), [("no.such.Thing", ImportError), (f"{__name__}.Nothing", AttributeError)])
def test_a_wrong_path_ends_the_start(path: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        add_middleware(Starlette(), path)
