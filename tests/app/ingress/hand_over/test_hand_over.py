"""Two Mells and HTTP between them: streams of the one continue at the other, with the tokens of an undisturbed run."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from app.client.api import HAND_OVER, HAND_OVER_REQUESTS
from app.ingress.hand_over import orders, successor, taking
from app.ingress.hand_over.rules import PROTOCOL, PROTOCOL_HEADER
from app.ingress.http.connections import Bounds
from app.ingress.http.server import HttpServer, listen
from deployments.engine.port import Tie
from migration.protocol.core_messages import Adapter
from migration.protocol.request import RequestSpec, Trait
from migration.run.reader import NotServed
from policies.model import ReplicaId
from policies.plan import Reason
from tests.app.ingress.fakes import (
    PATIENT,
    Api,
    Conversation,
    Service,
    eventually,
    make_api,
    make_service,
    output,
)
from tests.app.ingress.streams.streaming import whole
from tests.migration.world import spec

KEY, OWN_KEY = "the-admin-key-of-b", "the-admin-key-of-a"
STEP_S = 0.004
LONG = 300


@dataclass
class Mell:
    """A Mell at `url`, until it is cut off."""

    api: Api
    url: str
    server: HttpServer
    key: str

    @property
    def bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    @property
    def service(self) -> Service:
        return self.api.backend.service

    def cut_links(self) -> None:
        """End all connections."""
        for connection in list(self.server._server.server_state.connections):
            connection.transport.abort()

    async def cut(self) -> None:
        """End all connections, and take no more."""
        self.cut_links()
        await self.server.close(1)

    def kill_replicas(self) -> None:
        for name in "ab":
            self.service.kill(name)

    async def state(self) -> dict[str, Any]:
        document: dict[str, Any] = (await self.api.get(HAND_OVER, headers=self.bearer)).json()
        return document


async def start(key: str, step_s: float = STEP_S, patience_s: float = 0.3) -> Mell:
    options: Any = {"no_replica_timeout_s": patience_s, "max_engine_losses": 9}
    service = make_service("ab", step_s=step_s, limits=PATIENT, **options)
    api = make_api(service, admin_key=key)
    listening = await listen("127.0.0.1", 0, "mell", wait_s=0)
    bounds = Bounds(websockets=frozenset({HAND_OVER_REQUESTS}))
    return Mell(api, f"http://127.0.0.1:{listening.getsockname()[1]}", HttpServer(api.app, listening, bounds), key)


@dataclass
class Two:
    """`a` hands over to `b`."""

    a: Mell
    b: Mell

    async def hand_over(self, to: str | None = None, key: str | None = KEY) -> httpx.Response:
        order = {"to": to or self.b.url, "admin_key": key}
        return await self.a.api.post(HAND_OVER, json=order, headers=self.a.bearer)

    async def handed_over(self) -> None:
        """Order it, and wait until all requests of `a` run at `b`, and none on its replicas."""
        response = await self.hand_over()
        assert response.status_code == 200, response.text
        a, b = self.a.service, self.b.api.backend.taken
        await eventually(lambda: b.count == a.streams.count and not any(r.host._runs for r in a.replicas.values()))


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    async with two_mells() as pair:
        yield pair


@contextlib.asynccontextmanager
async def two_mells(**options: Any) -> AsyncIterator[Two]:
    """Two; `options` are of the one that takes over."""
    pair = Two(await start(OWN_KEY), await start(KEY, **options))
    yield pair
    for mell in (pair.a, pair.b):
        await mell.api.backend.hand_over.close()
        await mell.cut()


async def opened(two: Two, stack: contextlib.AsyncExitStack, *requests: RequestSpec) -> list[Conversation]:
    conversations = [await stack.enter_async_context(two.a.service.open(request)) for request in requests]
    for conversation in conversations:
        await two.a.service.reading(conversation, 5)
    return conversations


async def test_streams_continue_at_the_other_mell_and_replicas_are_idle(two: Two) -> None:
    requests = [spec(f"r{n}", tokens=LONG + n) for n in range(40)]
    async with contextlib.AsyncExitStack() as stack:
        conversations = await opened(two, stack, *requests)
        await two.handed_over()
        assert (await two.a.state())["there"] == 40 and (await two.b.state())["taken"] == 40
        assert not any(conversation.ended for conversation in conversations)
        for request, conversation in zip(requests, conversations, strict=True):
            assert await output(conversation, 30) == whole(request)
            assert conversation.reader.host == two.b.url
    records = two.a.service.scheduler.records
    assert len(records) == 40 and {record.trigger for record in records} == {Reason.HAND_OVER}
    await two.a.service.idle()
    await two.b.service.idle()
    assert two.b.api.backend.taken.count == 0


async def test_new_requests_begin_there(two: Two) -> None:
    await two.handed_over()
    response = await two.a.api.complete(max_tokens=9)
    direct = await two.b.api.complete(max_tokens=9)
    assert response.json()["choices"] == direct.json()["choices"]
    assert not [call for call in two.a.service.wires.calls if call[1] == "submit"]


async def test_they_begin_there_without_a_replica_here(two: Two) -> None:
    async with contextlib.AsyncExitStack() as stack:
        (conversation,) = await opened(two, stack, request := spec(tokens=LONG))
        await two.handed_over()
        two.a.kill_replicas()
        assert two.a.service.streams.serving
        assert (await two.a.api.complete(max_tokens=9)).status_code == 200
        assert await output(conversation, 30) == whole(request)


async def test_a_client_that_leaves_ends_its_request_there(two: Two) -> None:
    async with contextlib.AsyncExitStack() as stack:
        await opened(two, stack, spec(tokens=LONG))
        await two.handed_over()
        assert two.b.api.backend.taken.count == 1
    await eventually(lambda: two.b.api.backend.taken.count == 0)
    await two.b.service.idle()


async def test_streams_come_back_if_the_connection_breaks(two: Two) -> None:
    requests = [spec(f"r{n}", tokens=LONG) for n in range(10)]
    async with contextlib.AsyncExitStack() as stack:
        conversations = await opened(two, stack, *requests)
        await two.handed_over()
        await two.b.cut()
        for request, conversation in zip(requests, conversations, strict=True):
            assert await output(conversation, 30) == whole(request)
            assert conversation.reader.host in two.a.service.replicas
        assert (await two.a.api.complete(max_tokens=9)).status_code == 200


async def test_without_a_replica_here_a_broken_connection_ends_them_as_lost(two: Two) -> None:
    async with contextlib.AsyncExitStack() as stack:
        (conversation,) = await opened(two, stack, spec(tokens=LONG))
        await two.handed_over()
        two.a.kill_replicas()
        await two.b.cut()
        with pytest.raises(NotServed, match="no replica is available"):
            await output(conversation, 30)


async def test_streams_survive_a_death_at_the_other_mell(two: Two) -> None:
    async with contextlib.AsyncExitStack() as stack:
        (conversation,) = await opened(two, stack, request := spec(tokens=LONG))
        await two.handed_over()
        two.b.service.kill("a")
        assert await output(conversation, 30) == whole(request)
        assert conversation.reader.host == two.b.url


async def test_what_cannot_be_continued_exactly_stays_to_its_end(two: Two) -> None:
    for replica in two.b.service.replicas.values():
        replica.engine.tied = lambda traits: Tie.SEEDED if Trait.SEEDED in traits else None  # type: ignore[method-assign]
    seeded = replace(spec("seeded", tokens=LONG), traits=frozenset({Trait.SEEDED}))
    adapted = replace(spec("adapted", tokens=LONG), adapter=Adapter("sql", 1, "/sql"))
    async with contextlib.AsyncExitStack() as stack:
        conversations = await opened(two, stack, seeded, adapted, spec("plain", tokens=LONG))
        response = await two.hand_over()
        assert response.status_code == 200
        await eventually(lambda: conversations[2].reader.host == two.b.url)
        state = await two.a.state()
        assert (state["here"], state["there"]) == (2, 1) and sum(state["staying"].values()) == 2
        for conversation in conversations:
            assert await output(conversation, 30) == whole(conversation.spec)
        assert [c.reader.host for c in conversations] == ["a", "a", two.b.url]


async def test_what_is_refused_there_goes_on_here_and_is_not_tried_again(two: Two) -> None:
    two.b.service.tie()
    async with contextlib.AsyncExitStack() as stack:
        (conversation,) = await opened(two, stack, request := spec(tokens=LONG))
        assert (await two.hand_over()).status_code == 200
        async with asyncio.timeout(5):
            while (await two.a.state())["staying"] != {"refused there": 1}:
                await asyncio.sleep(0.01)
        assert await output(conversation, 30) == whole(request) and conversation.reader.host in "ab"
        assert two.b.service.wires.calls.count(("a", "submit")) == 1


async def test_it_is_repeated_and_undone(two: Two) -> None:
    async with contextlib.AsyncExitStack() as stack:
        (conversation,) = await opened(two, stack, request := spec(tokens=LONG))
        await two.handed_over()
        await two.handed_over()
        assert (await two.a.state())["to"] == two.b.url
        for _ in range(2):
            assert (await two.a.api.send("DELETE", HAND_OVER, headers=two.a.bearer)).json()["to"] is None
        (second,) = await opened(two, stack, other := spec("other", tokens=LONG))
        assert second.reader.host == "a" and conversation.reader.host == two.b.url
        assert await output(conversation, 30) == whole(request) and await output(second, 30) == whole(other)


async def test_what_other_weights_have_begun_stays(two: Two) -> None:
    """A stream has begun before its replica was replaced by one with the weights that both have now."""
    replica = two.a.service.replicas[ReplicaId("a")]
    served, replica.model = replica.model, "older"
    async with contextlib.AsyncExitStack() as stack:
        (conversation,) = await opened(two, stack, spec(tokens=LONG))
        replica.model = served
        assert conversation.reader.host == "a" and (await two.hand_over()).status_code == 200
        async with asyncio.timeout(5):
            while (await two.a.state())["staying"] != {"refused there": 1}:
                await asyncio.sleep(0.01)
    assert not [call for call in two.b.service.wires.calls if call[1] == "submit"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mell that is away is asked often, and one without replicas gives requests back at once."""
    monkeypatch.setattr(successor, "RETRY_S", 0.05)
    monkeypatch.setattr(taking, "LOOK_S", 0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
async def test_a_mell_that_is_away_gets_no_request_until_it_answers_a_question(two: Two) -> None:
    async with contextlib.AsyncExitStack() as stack:
        (conversation,) = await opened(two, stack, request := spec(tokens=3 * LONG))
        await two.handed_over()
        two.b.api.backend.require("a-new-admin-key")
        two.b.cut_links()
        await eventually(lambda: conversation.reader.host in ("a", "b"))
        (second,) = await opened(two, stack, other := spec("other", tokens=3 * LONG))
        assert second.reader.host == "a"
        hop = second.reader.cursor.hop
        await asyncio.sleep(0.3)
        assert (second.reader.host, second.reader.cursor.hop) == ("a", hop), "it is not disturbed"
        two.b.api.backend.require(KEY)
        await eventually(lambda: second.reader.host == two.b.url)
        assert await output(conversation, 30) == whole(request) and await output(second, 30) == whole(other)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
async def test_requests_come_back_from_a_mell_that_has_lost_its_replicas() -> None:
    async with two_mells(patience_s=60.0) as two, contextlib.AsyncExitStack() as stack:
        (conversation,) = await opened(two, stack, request := spec(tokens=LONG))
        await two.handed_over()
        handed = conversation.reader.cursor.next_index
        await eventually(lambda: conversation.reader.cursor.next_index > handed + 5)
        two.b.kill_replicas()
        assert await output(conversation, 10) == whole(request) and conversation.reader.host in "ab"


async def test_few_requests_at_once_wait_for_their_first_token_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "AT_ONCE", 4)
    async with two_mells(step_s=1000.0) as two, contextlib.AsyncExitStack() as stack:
        await opened(two, stack, *(spec(f"r{n}", tokens=3 * LONG) for n in range(10)))
        assert (await two.hand_over()).status_code == 200
        await eventually(lambda: two.b.api.backend.taken.count == 4)
        await asyncio.sleep(0.5)
        assert two.b.api.backend.taken.count == 4


def sockets(mell: Mell) -> int:
    """The connections of other Mells."""
    return sum(isinstance(each, WebSocketsSansIOProtocol) for each in mell.server._server.server_state.connections)


@pytest.mark.slow
async def test_a_replaced_link_stays_as_long_as_its_requests(two: Two) -> None:
    async with contextlib.AsyncExitStack() as stack:
        (first,) = await opened(two, stack, request := spec(tokens=LONG))
        await two.handed_over()
        other = two.a.api.backend.hand_over._other
        assert other is not None
        other.renew(other.target)
        (second,) = await opened(two, stack, later := spec("later", tokens=3 * LONG))
        assert sockets(two.b) == 2
        assert await output(first, 30) == whole(request)
        await eventually(lambda: sockets(two.b) == 1)
        assert await output(second, 30) == whole(later)


async def test_nothing_asks_behind_the_end(two: Two) -> None:
    async with contextlib.AsyncExitStack() as stack:
        await opened(two, stack, spec(tokens=3 * LONG))
        await two.handed_over()
        await two.a.api.backend.hand_over.close()
        await eventually(lambda: sockets(two.b) == 0)
        coroutines = [task.get_coro() for task in asyncio.all_tasks()]
        assert not [each for each in coroutines if getattr(each, "__qualname__", "") == "OtherMell._ask"]


# --- bad orders ---------------------------------------------------------------------------------------


async def refused(two: Two, why: str, to: str | None = None, key: str | None = KEY) -> None:
    """An order is refused with the reason, and a stream goes on here."""
    async with contextlib.AsyncExitStack() as stack:
        (conversation,) = await opened(two, stack, request := spec(tokens=60))
        response = await two.hand_over(to, key)
        assert response.status_code == 422 and why in response.json()["error"]["message"], response.text
        assert await output(conversation, 30) == whole(request) and conversation.reader.host == "a"
    assert (await two.a.state())["to"] is None


@pytest.mark.parametrize("key", [None, "another-key"])
async def test_the_admin_key_of_the_target_is_needed(two: Two, key: str | None) -> None:
    await refused(two, "the admin key is not that Mell's", key=key)


async def test_the_own_admin_key_is_needed(two: Two) -> None:
    two.a.key = "another-admin-key"
    assert (await two.hand_over()).status_code == 401
    two.a.api.backend.require(None)
    response = await two.hand_over()
    assert response.status_code == 403 and "set ingress.admin_key first" in response.json()["error"]["message"]


async def test_nobody_at_the_url(two: Two) -> None:
    await refused(two, "does not answer", "http://127.0.0.1:9")


async def test_no_url(two: Two) -> None:
    await refused(two, "is no Mell", "ftp://mell")


async def test_itself(two: Two) -> None:
    await refused(two, "is this Mell itself", two.a.url, OWN_KEY)


async def test_another_model(two: Two) -> None:
    for replica in two.b.service.replicas.values():
        replica.model = "another"
    await refused(two, "does not serve exactly the same model")


async def test_no_replica_there(two: Two) -> None:
    two.b.kill_replicas()
    await refused(two, "has answered: try again")


async def test_a_server_that_is_no_mell(two: Two) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        await refused(two, "is no Mell", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


async def test_in_a_circle(two: Two) -> None:
    await two.handed_over()
    response = await two.b.api.post(HAND_OVER, json={"to": two.a.url, "admin_key": OWN_KEY}, headers=two.b.bearer)
    assert response.status_code == 422
    assert f"hands its requests over to {two.b.url}, and takes none" in response.json()["error"]["message"]


async def test_two_orders_at_once_make_no_circle(two: Two) -> None:
    async with contextlib.AsyncExitStack() as stack:
        (conversation,) = await opened(two, stack, request := spec(tokens=LONG))
        back = two.b.api.post(HAND_OVER, json={"to": two.a.url, "admin_key": OWN_KEY}, headers=two.b.bearer)
        await asyncio.gather(two.hand_over(), back)
        assert await output(conversation, 30) == whole(request)
        assert (await two.a.api.complete(max_tokens=9)).status_code == 200


@contextlib.asynccontextmanager
async def linked(mell: Mell, version: str | None = str(PROTOCOL)) -> AsyncIterator[ClientConnection]:
    """A connection of a caller with a version of hand-overs."""
    headers = mell.bearer | ({} if version is None else {PROTOCOL_HEADER: version})
    async with connect(f"ws{mell.url.removeprefix('http')}{HAND_OVER_REQUESTS}", additional_headers=headers) as link:
        yield link


async def denied(mell: Mell, version: str | None = str(PROTOCOL)) -> tuple[int, str]:
    """The status and the message with which a connection is refused."""
    with pytest.raises(InvalidStatus) as refusal:
        async with linked(mell, version):
            pass
    response = refusal.value.response
    return response.status_code, json.loads(bytes(response.body or b""))["error"]["message"]


@pytest.mark.parametrize("version", [None, "0", "1", "3", "x"])
async def test_a_caller_of_another_version_is_refused(two: Two, version: str | None) -> None:
    status, message = await denied(two.b, version)
    assert status == 422 and message == f"this Mell has version {PROTOCOL} of hand-overs, and the caller {version}"


async def test_a_caller_with_another_key_is_refused(two: Two) -> None:
    two.b.key = "another-admin-key"
    status, _ = await denied(two.b)
    assert status == 401


@pytest.mark.parametrize("content", [b"", b"{}", b"\x81\xa1x\x01", b"\xc1", "text"])
async def test_a_message_that_is_no_request_ends_the_connection(two: Two, content: bytes | str) -> None:
    async with linked(two.b) as link:
        await link.send(content)
        with pytest.raises(ConnectionClosed) as closed:
            await asyncio.wait_for(link.recv(), 10)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1007


async def test_a_request_that_is_too_long_there_stays_and_disturbs_no_other(two: Two) -> None:
    backend = two.b.api.backend
    backend.settings = backend.settings.model_copy(update={"max_body_bytes": 5_000, "max_media_bytes": 5_000})
    long = replace(spec("long", tokens=LONG), body=(spec("long", tokens=LONG).body[0], bytes(20_000)))
    async with contextlib.AsyncExitStack() as stack:
        conversations = await opened(two, stack, request := spec(tokens=LONG), long)
        assert (await two.hand_over()).status_code == 200
        async with asyncio.timeout(5):
            while (await two.a.state())["staying"] != {"refused there": 1}:
                await asyncio.sleep(0.01)
        await eventually(lambda: conversations[0].reader.host == two.b.url)
        assert await output(conversations[0], 30) == whole(request)


async def test_a_websocket_elsewhere_is_not_opened(two: Two) -> None:
    with pytest.raises(InvalidStatus):
        async with connect(f"ws{two.b.url.removeprefix('http')}{HAND_OVER}"):
            pass
