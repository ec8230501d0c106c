"""Many and misbehaving connections: their limits, and undisturbed service for other clients."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from app.frontend.guard.dialects import OPENAI
from app.ingress.asgi import ClientPace, EventStream, TrackedSend, within
from app.ingress.http.connections import Bounds
from app.ingress.http.server import HttpServer, listen
from deployments.engine.tokens import expected
from tests.app.ingress.fakes import PROMPT, Api, body, eventually, make_api, make_service, text_of
from tests.app.ingress.http.serving import Client, Server, post, serving
from tests.counts import LONG
from tests.deployments.engine.quick_engine import prompt_of
from tests.migration.world import spec

KIB = 1 << 10
MIB = 1 << 20
SHORT = {"head_s": 0.2, "flush_s": 0.2}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: mell\r\nContent-Type: application/json\r\n"


@asynccontextmanager
async def listening(app: Any, **bounds: Any) -> AsyncIterator[tuple[int, HttpServer]]:
    """The port of a server in this process with the given bounds."""
    bound = await listen("127.0.0.1", 0, "mell", wait_s=0)
    server = HttpServer(app, bound, Bounds(**bounds))
    try:
        yield bound.getsockname()[1], server
    finally:
        await server.close(1)


def connections(server: HttpServer) -> int:
    return len(server._server.server_state.connections)


# --- clients that do not ask ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "begun",
    [b"", b"\r\n\r\n", b"GET /li", b"GET /live HTTP/1.1\r\nHo", HEAD],
    ids=["nothing", "empty lines", "half a line", "half a header", "a head without an end"],
)
@pytest.mark.parametrize("asked_before", [False, True])
async def test_a_client_that_does_not_end_its_head_is_cut(api: Api, begun: bytes, asked_before: bool) -> None:
    if asked_before and not begun:
        pytest.skip("idle after an answer: uvicorn's keep-alive time, and the next test")
    async with listening(api.app, **SHORT) as (port, server):
        client = await Client.connect(port)
        if asked_before:
            assert await client.get("/live") == 200
        await client.send(begun)
        assert await client.ended() == b""
        await eventually(lambda: connections(server) == 0)


@pytest.mark.slow
async def test_a_client_that_sends_its_head_byte_by_byte_is_cut(api: Api) -> None:
    async with listening(api.app, **SHORT) as (port, _):
        client = await Client.connect(port)
        await client.send(HEAD)
        response = asyncio.create_task(client.ended())
        while not response.done():
            client.writer.write(b"x")
            await asyncio.sleep(0.01)
        assert response.result() == b""


async def test_a_client_idle_between_requests_is_not_cut(api: Api) -> None:
    async with listening(api.app, **SHORT) as (port, _):
        idle = await Client.connect(port)
        assert await idle.get("/live") == 200
        silent = await Client.connect(port)
        await silent.ended()
        assert await idle.get("/live") == 200
        idle.close()


async def test_a_client_waiting_for_its_answer_is_not_cut() -> None:
    api = make_api(make_service(step_s=0.05))
    async with listening(api.app, **SHORT) as (port, _):
        asking, silent = await Client.connect(port), await Client.connect(port)
        await asking.send(post({"prompt": PROMPT, "max_tokens": 20, "stream": True}))
        await silent.ended()
        assert (await asking.events())[-1] == "[DONE]"


async def test_a_client_that_stops_within_its_body_gets_408(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.ingress.asgi._BODY_S", 0.2)
    async with listening(api.app, **SHORT) as (port, _):
        client = await Client.connect(port)
        await client.send(HEAD + b'Content-Length: 100\r\n\r\n{"prompt"')
        response = await client.reader.readuntil(b"\r\n\r\n")
        assert response.startswith(b"HTTP/1.1 408 ")
        await client.send(b"x")
        assert b'"only 9 bytes of the body arrived in time","type":"timeout_error"' in await client.ended()
    assert api.backend.gate.running == 0


async def test_a_body_that_comes_slowly_and_steadily_is_read(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.ingress.asgi._BODY_S", 0.5)
    whole = body(max_tokens=1)
    async with listening(api.app) as (port, _):
        client = await Client.connect(port)
        await client.send(HEAD + f"Connection: close\r\nContent-Length: {len(whole)}\r\n\r\n".encode())
        step = len(whole) // 8 + 1
        for begin in range(0, len(whole), step):
            await asyncio.sleep(0.15)
            await client.send(whole[begin : begin + step])
        assert (await client.ended()).startswith(b"HTTP/1.1 200 ")


async def test_a_head_that_comes_slowly_and_steadily_is_read(api: Api) -> None:
    async with listening(api.app, head_s=0.5, flush_s=0.5) as (port, _):
        client = await Client.connect(port)
        for piece in (b"GET /live ", b"HTTP/1.1\r\n", b"Host: ", b"mell\r\n", b"Connection: ", b"close\r\n", b"\r\n"):
            await client.send(piece)
            await asyncio.sleep(0.15)
        assert (await client.ended()).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_only_trickles_is_too_slow() -> None:
    steady, trickle = ClientPace(0.0), ClientPace(0.0)
    for second in range(1, 1000):
        steady.add(500, second)
        trickle.add(1, second)
        assert steady.due(20) == second + 20
        assert trickle.due(20) == min(second + 20, 200 + second / 500)


# --- clients that ask for too much ------------------------------------------------------------------------


async def test_a_head_without_end_is_refused(api: Api) -> None:
    async with listening(api.app, head_bytes=10_000) as (port, _):
        client = await Client.connect(port)
        await client.send(HEAD + b"X-Long: ")
        response = asyncio.create_task(client.ended())
        while not response.done():
            client.writer.write(b"x" * 1000)
            await asyncio.sleep(0)
        # The response may be lost: a client that still writes may see only the cut.
        assert response.result() == b"" or b"head is larger than 10000 bytes" in response.result()


async def test_a_head_of_the_maximum_size_is_accepted(api: Api) -> None:
    async with listening(api.app, head_bytes=10_000) as (port, _):
        client = await Client.connect(port)
        for piece in (b"GET /live HTTP/1.1\r\n", b"X-Long: ", b"x" * 9_900, b"\r\n\r\n"):
            await client.send(piece)
            await asyncio.sleep(0.01)
        assert (await client.reader.readline()).startswith(b"HTTP/1.1 200 ")
        client.close()


async def test_a_trailer_without_end_is_cut(api: Api) -> None:
    async with listening(api.app, head_bytes=1_000) as (port, server):
        client = await Client.connect(port)
        await client.send(HEAD + b'Transfer-Encoding: chunked\r\n\r\n2\r\n{"\r\n0\r\nX-Long: ')
        response = asyncio.create_task(client.ended())
        while not response.done():
            client.writer.write(b"x" * 100)
            await asyncio.sleep(0)
        assert response.result() == b""
        await eventually(lambda: connections(server) == 0)


async def test_the_framing_of_a_body_does_not_count_as_a_head(api: Api) -> None:
    async with listening(api.app, head_bytes=100) as (port, _):
        client = await Client.connect(port)
        await client.send(HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
        for byte in body(max_tokens=1):
            await client.send(b"1\r\n%c\r\n" % byte)
            await asyncio.sleep(0)
        await client.send(b"0\r\n\r\n")
        assert (await client.ended()).startswith(b"HTTP/1.1 200 ")


async def test_the_number_of_connections_is_limited(api: Api) -> None:
    async with listening(api.app, connections=3) as (port, server):
        first, *others = [await Client.connect(port) for _ in range(3)]
        assert [await client.get("/live") for client in (first, *others)] == [200] * 3
        assert await (await Client.connect(port)).ended() == b""
        assert await first.get("/live") == 200
        others[0].close()
        await eventually(lambda: connections(server) == 2)
        late = await Client.connect(port)
        assert await late.get("/live") == 200
        for client in (first, others[1], late):
            client.close()


async def test_by_default_a_quarter_of_the_files_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (1000, 9999))
    assert Bounds().connections == 750


# --- clients that offer another protocol -------------------------------------------------------------------

OFFERS = {
    "HTTP/2": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n",
    "TLS": b"Upgrade: TLS/1.2\r\nConnection: upgrade\r\n",
    "a websocket": b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: eA==\r\n",
    "several": b"Connection: Upgrade\r\nUpgrade: h2c\r\nUpgrade: websocket\r\n",
    "nothing": b"Connection: Upgrade\r\n",
}
PIECES = {"at once": 1 << 20, "byte by byte": 1, "in pieces": 50}


def framed(offer: bytes, chunked: bool, **fields: Any) -> bytes:
    whole = body(**fields)
    if chunked:
        return HEAD + offer + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(whole), whole)
    return HEAD + offer + b"Content-Length: %d\r\n\r\n%s" % (len(whole), whole)


@pytest.mark.parametrize("chunked", [False, True], ids=["with a length", "chunked"])
@pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
async def test_an_offer_of_another_protocol_is_ignored(api: Api, offer: bytes, piece: int, chunked: bool) -> None:
    async with listening(api.app) as (port, _):
        client = await Client.connect(port)
        first = framed(offer, chunked, max_tokens=2)
        for begin in range(0, len(first), piece):
            await client.send(first[begin : begin + piece])
            await asyncio.sleep(0)
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        assert b'"finish_reason":"length"' in await client.reader.readexactly(length)
        assert await client.get("/live") == 200
        client.close()


async def test_calls_behind_one_another_may_all_offer(api: Api) -> None:
    async with listening(api.app) as (port, _):
        client = await Client.connect(port)
        get = b"GET /live HTTP/1.1\r\nHost: mell\r\n%s\r\n"
        await client.send(get % OFFERS["HTTP/2"] * 3 + get % b"Connection: close\r\n")
        assert (await client.ended()).count(b"HTTP/1.1 200 ") == 4


async def test_a_tunnel_is_refused(api: Api) -> None:
    async with listening(api.app) as (port, _):
        client = await Client.connect(port)
        await client.send(b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\nGET / HTTP/1.1\r\n\r\n")
        assert (await client.ended()).count(b"HTTP/1.1 400 ") == 1


SOCKET = frozenset({"/socket"})
UPGRADE = (
    b"GET /socket HTTP/1.1\r\nHost: mell\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


@pytest.mark.parametrize(
    "more", [b"Content-Length: 5\r\n\r\nhello", b"X: %s\r\n\r\n" % bytes(9000)], ids=["body", "long"]
)
async def test_an_upgrade_that_is_none_of_a_websocket_gets_400(api: Api, more: bytes) -> None:
    async with listening(api.app, websockets=SOCKET) as (port, server):
        client = await Client.connect(port)
        await client.send(UPGRADE + more.replace(b"\0", b"x"))
        assert (await client.ended()).startswith(b"HTTP/1.1 400 ")
        await eventually(lambda: connections(server) == 0)


async def test_an_upgrade_behind_a_call_that_runs_ends_the_connection_and_its_call() -> None:
    api = make_api(make_service(step_s=0.05))
    async with listening(api.app, websockets=SOCKET) as (port, _):
        client = await Client.connect(port)
        await client.send(framed(b"", chunked=False, max_tokens=500, stream=True))
        await client.reader.readuntil(b"data: ")
        await client.send(UPGRADE + b"\r\n")
        assert b" 400 " in await client.ended()
        await eventually(lambda: api.backend.service.streams.count == 0)


async def test_a_websocket_whose_client_does_not_read_is_cut_behind_its_end() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "bytes": bytes(32 * MIB)})

    async with listening(app, websockets=SOCKET, bytes_per_s=1e9, **SHORT) as (port, server):
        client = await Client.connect(port, limit=KIB)
        await client.send(UPGRADE + b"\r\n")
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        await eventually(lambda: connections(server) == 0)
        client.close()


async def test_keep_alive_probes_detect_vanished_clients() -> None:
    bound = await listen("127.0.0.1", 0, "mell", wait_s=0)
    client = socket.create_connection(bound.getsockname())
    await eventually(lambda: True)
    bound.setblocking(True)
    accepted, _ = bound.accept()
    with bound, client, accepted:
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle, interval, count = (accepted.getsockopt(socket.IPPROTO_TCP, option) for option in options)
    assert idle + interval * count == 120


# --- clients that do not read -----------------------------------------------------------------------------


async def _endless(scope: Scope, receive: Receive, send: Send) -> None:
    async def events() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65536
            await asyncio.sleep(0)

    await within(0.3, EventStream(events()), scope, receive, TrackedSend(send), OPENAI.ending)


async def test_a_client_that_does_not_read_is_cut_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.ingress.asgi._LAST_EVENT_S", 0.1)
    async with listening(_endless, bytes_per_s=MIB, **SHORT) as (port, server):
        client = await Client.connect(port, limit=1)
        await client.send(b"GET / HTTP/1.1\r\nHost: mell\r\n\r\n")
        await client.reader.readexactly(1)
        await eventually(lambda: connections(server) == 0, within_s=30)
        client.close()


LARGE = 8 * MIB


async def _large(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LARGE)]})
    await send({"type": "http.response.body", "body": bytes(LARGE)})


async def read_slowly(port: int, head: bytes, pause_s: float, pieces: int) -> int:
    """The number of bytes of a large body that a client gets that pauses before each piece, and reads the rest."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * KIB)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, head)
        got, pauses = b"", iter(range(pieces))
        while True:
            if next(pauses, None) is not None:
                await asyncio.sleep(pause_s)
            try:
                more = await loop.sock_recv(client, 64 * KIB)
            except ConnectionResetError:
                break
            got += more
            if not more or len(got.partition(b"\r\n\r\n")[2]) == LARGE:
                break
        return len(got.partition(b"\r\n\r\n")[2])


KEPT = {
    "that closes": b"GET / HTTP/1.1\r\nHost: mell\r\nConnection: close\r\n\r\n",
    "of HTTP/1.0": b"GET / HTTP/1.0\r\n\r\n",
    "that keeps its connection": b"GET / HTTP/1.1\r\nHost: mell\r\n\r\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("head", KEPT.values(), ids=KEPT)
async def test_a_client_that_reads_slowly_and_steadily_gets_all(head: bytes) -> None:
    """Its kernel acknowledges nothing for longer than `flush_s` at a time."""
    async with listening(_large, head_s=0.1, flush_s=0.1, keep_alive_s=0.1) as (port, server):
        assert await read_slowly(port, head, 0.1, 30) == LARGE
        await eventually(lambda: connections(server) == 0)


@pytest.mark.parametrize("head", KEPT.values(), ids=KEPT)
async def test_a_client_that_stops_reading_its_answer_is_cut(head: bytes) -> None:
    async with listening(_large, head_s=0.2, flush_s=0.2, bytes_per_s=MIB, keep_alive_s=0.2) as (port, server):
        client = await Client.connect(port, limit=1)
        await client.send(head)
        await client.reader.readexactly(1)
        await eventually(lambda: connections(server) == 0, within_s=30)
        client.close()


async def test_an_idle_connection_is_closed_after_the_keep_alive_time(api: Api) -> None:
    async with listening(api.app, keep_alive_s=0.2, **SHORT) as (port, _):
        client = await Client.connect(port)
        assert await client.get("/live") == 200
        assert await client.ended() == b""


# --- a server process -------------------------------------------------------------------------------

IDLE, STREAMS = (1000, 500) if LONG else (200, 100)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


def prompts(count: int) -> list[list[int]]:
    return [list(prompt_of(spec(f"p{number}"))) for number in range(count)]


def answer(prompt: list[int], tokens: int) -> str:
    """The text of an undisturbed run."""
    return text_of(expected(tuple(prompt), tokens))


async def ask(port: int, prompt: list[int], tokens: int, **fields: Any) -> Client:
    """Request a stream."""
    client = await Client.connect(port)
    await client.send(post({"prompt": prompt, "max_tokens": tokens, "stream": True, **fields}))
    return client


async def lively(server: Server, idle: Client) -> None:
    """Assert that the server answers on an idle connection and on new ones."""
    assert await idle.get("/live") == 200
    fresh = await Client.connect(server.port)
    assert [await fresh.get(path) for path in ("/live", "/health")] == [200, 200]
    fresh.close()


async def crowd(server: Server, asked: list[list[int]], idle: list[Client], tokens: int) -> tuple[list[str], int]:
    """Run all streams concurrently; their texts, and the peak memory of the server."""
    await server.control("hold")
    clients = [await ask(server.port, prompt, tokens) for prompt in asked]
    await server.until(lambda counts: counts["conversations"] == len(asked))
    await lively(server, idle[0])
    most = server.rss
    await server.control("go")
    reading = [asyncio.create_task(client.text()) for client in clients]
    while any(not task.done() for task in reading):
        await lively(server, random.choice(idle))
        most = max(most, server.rss)
        await asyncio.sleep(0.05)
    await server.at_rest()
    return [task.result() for task in reading], most


@pytest.mark.slow
async def test_idle_clients_and_streams_cost_bounded_memory(server: Server) -> None:
    await (await ask(server.port, PROMPT, 5)).text()
    empty = server.rss
    idle = [await Client.connect(server.port) for _ in range(IDLE)]
    assert {await client.get("/live") for client in idle} == {200}
    crowded = server.rss
    assert crowded - empty < IDLE * 64 * KIB

    asked = [prompt for prompt in prompts(50) for _ in range(STREAMS // 50)]
    texts = [answer(prompt, 16) for prompt in asked]
    after = []
    for _ in range(3):
        response, most = await crowd(server, asked, idle, 16)
        assert response == texts
        assert most - crowded < STREAMS * 256 * KIB
        after.append(server.rss)
    assert after[2] - after[1] < 4 * MIB, "the first two rounds have filled what is kept"

    assert {await client.get("/live") for client in idle} == {200}
    for client in idle:
        client.close()


@pytest.mark.slow
async def test_streams_wait_for_slow_readers(server: Server) -> None:
    readers, tokens = 8, 1500
    (prompt,) = prompts(1)
    await (await ask(server.wordy, prompt, 5)).text()
    before = server.rss
    late = [await ask(server.wordy, prompt, tokens) for _ in range(readers)]
    # All tokens are generated; the streams, 6 MiB each, wait for their sockets, which hold less.
    await server.until(lambda counts: counts["idle"] and counts["conversations"] == readers)
    assert server.rss - before < readers * MIB
    assert await (await ask(server.port, prompt, 24)).text() == answer(prompt, 24)
    for client in late:
        assert await client.text() == answer(prompt, tokens)
    await server.at_rest()


@pytest.mark.slow
async def test_disconnected_clients_leave_nothing(server: Server) -> None:
    rest, draw = server.files, random.Random(7)
    asked = prompts(50)

    async def leave(number: int) -> None:
        client = await ask(server.port, asked[number % 50], 4000)
        await client.reader.readexactly(draw.randrange(1, 1000))
        client.close()

    tasks = (await server.inside())["tasks"]
    for begin in range(0, STREAMS, 100):
        async with asyncio.timeout(120):
            await asyncio.gather(*[leave(number) for number in range(begin, begin + 100)])
    await server.at_rest()
    await eventually(lambda: server.files <= rest, within_s=60)
    await server.until(lambda counts: counts["tasks"] <= tasks)
