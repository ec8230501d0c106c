"""The ingress's own HTTP server: its socket, its end, and the echoed X-Request-Id."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from app.ingress.http.ports import _opening
from app.ingress.http.server import BelowPath, HttpServer, endpoint, listen


async def _slow(http: Request) -> StreamingResponse:
    async def body() -> AsyncIterator[bytes]:
        for _ in range(5):
            await asyncio.sleep(0.02)
            yield b"x"

    return StreamingResponse(body())


async def _hello(http: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[HttpServer, httpx.AsyncClient]]:
    app = Starlette(routes=[Route("/", _hello), Route("/slow", _slow)])
    listening = await listen("127.0.0.1", 0, "mell", wait_s=0)
    url = endpoint(*listening.getsockname()[:2])
    server = HttpServer(app, listening)
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        yield server, client
    await server.close(1)


@pytest.mark.parametrize("label", ["mine", None])
async def test_the_request_id_is_echoed(label: str | None) -> None:
    async with serving() as (_, client):
        response = await client.get("/", headers={"X-Request-Id": label} if label else {})
    assert response.headers.get_list("x-request-id") == ([label] if label else [])


async def _path(http: Request) -> PlainTextResponse:
    return PlainTextResponse(http.url.path)


@pytest.mark.parametrize(
    ("asked", "reached"),
    [
        ("/llm/v1/models", "/v1/models"),
        ("/v1/models", "/v1/models"),
        ("/llm", "/llm"),
        ("/llmx/v1", "/llmx/v1"),
        ("/llm/", "/"),
        ("/llm/llm/v1", "/llm/v1"),
        ("/llm/mell/state", "/llm/mell/state"),
        ("/llm/mell", "/llm/mell"),
        ("/mell/state", "/mell/state"),
    ],
)
async def test_a_prefix_is_taken_off_all_paths_but_the_operators(asked: str, reached: str) -> None:
    app = BelowPath(Starlette(routes=[Route("/{path:path}", _path)]), "/llm")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://mell") as client:
        assert (await client.get(asked)).text == reached


async def test_closing_lets_open_answers_end() -> None:
    async with serving() as (server, client):
        async with client.stream("GET", "/slow") as answer:
            closing = asyncio.create_task(server.close(5))
            assert await answer.aread() == b"xxxxx"
        await closing


@pytest.mark.parametrize("shares", [False, True], ids=["a plain socket", "a socket that shares its port"])
async def test_a_busy_port_is_an_error_that_names_the_setting(shares: bool) -> None:
    with socket.socket() as other:
        if shares:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError, match=r"set ingress\.port") as caught:
            await listen("127.0.0.1", other.getsockname()[1], "mell", wait_s=0)
        assert caught.value.errno == errno.EADDRINUSE


async def test_the_port_of_a_stopping_predecessor_is_retried() -> None:
    first = await listen("127.0.0.1", 0, "before", wait_s=0)
    port = first.getsockname()[1]
    asyncio.get_running_loop().call_later(0.1, first.close)
    second = await listen("127.0.0.1", port, "mell", wait_s=5)
    assert second.getsockname()[1] == port
    second.close()


async def test_ingresses_of_one_service_share_a_port_and_others_do_not() -> None:
    first = await listen("127.0.0.1", 0, "mell", wait_s=0)
    port = first.getsockname()[1]
    second = await listen("127.0.0.1", port, "mell", wait_s=0)
    first.close()
    for address in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(OSError, match=r"set ingress\.port"):
            await listen(address, port, "another", wait_s=0)
    third = await listen("127.0.0.1", port, "mell", wait_s=0)
    second.close()
    third.close()
    (await listen("127.0.0.1", port, "another", wait_s=0)).close()


async def test_a_port_is_opened_by_one_process_at_a_time() -> None:
    first = await listen("127.0.0.1", 0, "mell", wait_s=0)
    port = first.getsockname()[1]
    with _opening(port), pytest.raises(OSError, match=r"set ingress\.port"):
        await listen("127.0.0.1", port, "mell", wait_s=0)
    first.close()
