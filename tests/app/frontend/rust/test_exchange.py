"""HTTP calls over a Unix socket: heads, chunks, backpressure, and connections that break."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio
import uvloop

from app.frontend.rust import exchange as module
from app.frontend.rust.exchange import ExchangeBroken, HttpExchange
from tests.app.ingress.fakes import eventually

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Begin = Callable[[Serve], Awaitable[HttpExchange]]


@pytest_asyncio.fixture
async def begin(tmp_path: Path) -> AsyncIterator[Begin]:
    """Begins a POST of `{}` to a server that answers it with a function."""
    servers: list[asyncio.Server] = []
    exchanges: list[HttpExchange] = []

    async def start(serve: Serve) -> HttpExchange:
        async def serve_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await serve(reader, writer)
            finally:
                writer.close()

        address = str(tmp_path / "http")
        servers.append(await asyncio.start_unix_server(serve_and_close, address))
        exchanges.append(await HttpExchange.begin(address, "POST", "/x", [(b"a", b"b")], b"{}"))
        return exchanges[-1]

    yield start
    for exchange in exchanges:
        exchange.close()
    for server in servers:
        server.close()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def test_the_request_is_complete(begin: Begin) -> None:
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        assert await reader.readexactly(2) == b"{}"
        writer.write(b"HTTP/1.1 404 X\r\nContent-Length: 4\r\nA: c\r\n\r\ngone")

    exchange = await begin(serve)
    head = await exchange.head()
    assert (head.status, head.header(b"a"), head.header(b"b")) == (404, b"c", b"")
    assert await exchange.content() == b"gone"
    assert {b"POST /x HTTP/1.1", b"a: b", b"content-length: 2"} <= set(heads[0].split(b"\r\n"))


async def test_chunks_come_as_they_arrive(begin: Begin) -> None:
    more = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunk(b"one") + chunk(b" two")[:3])
        await more.wait()
        writer.write(chunk(b" two")[3:] + b"0\r\n\r\n")

    exchange = await begin(serve)
    assert (await exchange.head()).header(b"content-type") == b"text/event-stream"
    chunks = exchange.chunks()
    first = await anext(chunks)
    more.set()
    assert first.startswith(b"one") and first + b"".join([each async for each in chunks]) == b"one two"


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200", b"no HTTP at all\r\n\r\n"], ids=["nothing", "half a head", "no HTTP"]
)
async def test_a_broken_head_is_an_error(begin: Begin, answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    exchange = await begin(serve)
    with pytest.raises(ExchangeBroken):
        await exchange.head()


async def test_a_broken_body_is_an_error_after_what_has_come(begin: Begin) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunk(b"one"))

    exchange = await begin(serve)
    chunks = exchange.chunks()
    assert await anext(chunks) == b"one"
    with pytest.raises(ExchangeBroken):
        await anext(chunks)


async def test_an_address_without_a_server_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ExchangeBroken, match="no connection"):
        await HttpExchange.begin(str(tmp_path / "nobody"), "GET", "/", (), b"")


async def test_the_server_waits_for_a_client_that_does_not_read(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_BUFFER", 1 << 10)
    written = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(STREAM)
        for _ in range(512):
            writer.write(chunk(b"x" * 4096))
            written += 4096
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    exchange = await begin(serve)
    await exchange.head()
    await eventually(lambda: exchange._paused)
    await asyncio.sleep(0.2)
    assert written < 2 << 20 and exchange._bytes < 1 << 20
    assert len(await exchange.content()) == 2 << 20


async def test_closing_ends_the_connection(begin: Begin) -> None:
    left = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        assert await reader.read() == b""
        left.set()

    exchange = await begin(serve)
    await asyncio.sleep(0.05)
    exchange.close()
    await asyncio.wait_for(left.wait(), 5)


def test_a_stream_is_read_in_the_event_loop_of_rays_processes(tmp_path: Path) -> None:
    address = str(tmp_path / "http")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunk(b"x" * (1 << 20)) + b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def exchange() -> bytes:
        async with await asyncio.start_unix_server(serve, address):
            asked = await HttpExchange.begin(address, "GET", "/", (), b"")
            try:
                return await asked.content()
            finally:
                asked.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert len(runner.run(exchange())) == 1 << 20
