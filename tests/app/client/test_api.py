"""The client against a fake server, and against broken connections."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from app.client.api import ApiClient, check_url, is_loopback
from app.client.errors import BadAnswer, ClientError, ErrorAnswer, NoAnswer, NobodyListens
from app.client.sse import Event

EVENT = b'data: {"choices": [{"text": "x"}]}\n\n'
DONE = b"data: [DONE]\n\n"

Server = Callable[[httpx.Request], httpx.Response]


def client(server: Server, admin_key: str | None = None) -> ApiClient:
    return ApiClient("http://mell/", admin_key, transport=httpx.MockTransport(server))


def always(status: int, **body: object) -> Server:
    return lambda _: httpx.Response(status, **body)  # type: ignore[arg-type]


async def collect(api: ApiClient, seen: list[Event]) -> None:
    async with api.stream({}) as events:
        async for event in events:
            seen.append(event)


async def streamed(server: Server) -> list[Event]:
    seen: list[Event] = []
    async with client(server) as api:
        await collect(api, seen)
    return seen


async def test_an_order_is_sent_once_with_the_key_and_only_the_given_members() -> None:
    sent: list[httpx.Request] = []

    def server(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(503, json={"error": {"message": "busy"}})

    async with client(server, "secret") as api:
        with pytest.raises(ErrorAnswer):
            await api.move("r", "kv")
    (request,) = sent
    assert (request.method, str(request.url)) == ("POST", "http://mell/mell/migrations")
    assert request.headers["authorization"] == "Bearer secret"
    assert json.loads(request.content) == {"request_id": "r", "path": "kv"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"json": {"error": {"message": "full", "code": 1}}}, "full"),
        ({"json": {"error": "full"}}, "full"),
        ({"json": {"detail": "full"}}, "full"),
        ({"content": b"full"}, "HTTP 503 Service Unavailable: full"),
        ({"json": [1]}, "HTTP 503 Service Unavailable: [1]"),
        ({"content": b""}, "HTTP 503 Service Unavailable"),
    ],
)
async def test_an_error_answer_has_the_message_of_the_server(body: dict[str, object], message: str) -> None:
    async with client(always(503, **body)) as api:
        with pytest.raises(ErrorAnswer) as raised:
            await api.state()
    assert (raised.value.message, raised.value.status, raised.value.kind) == (message, 503, "HTTP 503")
    with pytest.raises(ErrorAnswer) as raised:
        await streamed(always(503, **body))
    assert raised.value.message == message


async def test_an_error_answer_keeps_the_document_of_the_server() -> None:
    document = {"error": {"message": "full", "candidates": [1]}}
    async with client(always(422, json=document)) as api:
        with pytest.raises(ErrorAnswer) as raised:
            await api.drain("r")
    assert raised.value.document == document


@pytest.mark.parametrize("body", [{"content": b"hello"}, {"json": []}, {"json": {"migrations": [3]}}, {"json": {}}])
async def test_an_answer_of_another_api_is_bad(body: dict[str, object]) -> None:
    async with client(always(200, **body)) as api:
        with pytest.raises(BadAnswer, match="GET /mell/migrations is not understood"):
            await api.migrations()


async def test_a_replica_id_cannot_lead_to_another_path() -> None:
    seen: list[bytes] = []

    def server(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.raw_path)
        return httpx.Response(202, json={})

    async with client(server) as api:
        await api.drain("../x?b")
    assert seen == [b"/mell/replicas/..%2Fx%3Fb/drain"]


async def test_a_stream_is_its_events() -> None:
    assert len(await streamed(always(200, content=EVENT + EVENT + DONE))) == 2


async def test_a_stream_without_done_is_bad() -> None:
    with pytest.raises(BadAnswer) as raised:
        await streamed(always(200, content=EVENT))
    assert raised.value.kind == "no [DONE]"


def breaking(error: type[httpx.HTTPError]) -> Server:
    def server(request: httpx.Request) -> httpx.Response:
        raise error("")

    return server


@pytest.mark.parametrize(
    ("error", "raises", "message"),
    [
        (httpx.ConnectError, NobodyListens, "ConnectError"),
        (httpx.ReadTimeout, NoAnswer, "POST /v1/completions took too long"),
        (httpx.ReadError, NoAnswer, "ReadError"),
    ],
)
async def test_errors_of_the_connection_have_their_classes(
    error: type[httpx.HTTPError], raises: type[ClientError], message: str
) -> None:
    with pytest.raises(raises) as raised:
        await streamed(breaking(error))
    assert (raised.value.kind, raised.value.message) == (error.__name__, message)


@asynccontextmanager
async def listening(answer: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that answers every connection with the given bytes and closes it; the requests that it got."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", requests


async def test_a_broken_stream_raises_after_its_events_and_is_not_retried() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(EVENT), EVENT)
    seen: list[Event] = []
    async with listening(chunked) as (url, requests), ApiClient(url) as api:
        with pytest.raises(NoAnswer) as raised:
            await collect(api, seen)
        assert raised.value.kind == "RemoteProtocolError"
    assert (len(seen), len(requests)) == (1, 1)


@pytest.mark.parametrize("url", ["8000", "http://host:port", "ftp://host", "http://"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not a URL"):
        check_url(url)


@pytest.mark.parametrize(
    ("url", "own"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://localhost", True),
        ("http://[::1]:1", True),
        ("http://10.0.0.1", False),
        ("https://llm.example.org", False),
    ],
)
def test_loopback_is_recognized(url: str, own: bool) -> None:
    assert is_loopback(url) is own
