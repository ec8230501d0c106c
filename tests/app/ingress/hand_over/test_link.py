"""Both ends of a connection between two Mells: large messages, ends in the middle, and a caller that does not read."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.websockets import WebSocketDisconnect
from websockets.datastructures import Headers

from app.ingress.hand_over import link as calling
from app.ingress.hand_over import taking
from app.ingress.hand_over.link import HandOverLink
from app.ingress.hand_over.taking import TakenRequests, TakingLink
from app.ingress.hand_over.wire import LONGEST_HEADER, HandedRequest, LeftRequest, decode_message, encode_message
from deployments.channels.wire import CallAnswer, FrameDecoder, encode_answer
from migration.protocol.errors import PeerLost, Stopping
from tests.app.ingress.fakes import eventually


def handed(number: int, size: int = 0) -> HandedRequest:
    """A request whose body has `size` bytes."""
    return HandedRequest(number, f"r{number}", "", (bytes(size),), "", 0.0, 1, (), "m")


# --- the caller's end -------------------------------------------------------------------------------------


class Wire:
    """The caller's connection. `sent` are the parts of the messages; `frames` are read, until `end`."""

    def __init__(self) -> None:
        self.response = SimpleNamespace(headers=Headers({LONGEST_HEADER: "1000000000"}))
        self.sent: list[list[bytes]] = []
        self.sending = asyncio.Event()
        self.sending.set()
        self.frames: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def send(self, message: bytes | Iterable[bytes]) -> None:
        self.sent.append([message] if isinstance(message, bytes) else list(message))
        await self.sending.wait()

    async def close(self) -> None:
        self.end()

    def end(self) -> None:
        self.frames.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (frame := await self.frames.get()) is not None:
            yield frame


@pytest.fixture
async def wire() -> Wire:
    return Wire()


def linked(wire: Any) -> HandOverLink:
    return HandOverLink("b", wire, lambda event: None)


async def test_a_long_request_goes_in_parts_between_which_pings_are_answered(wire: Wire) -> None:
    link, request = linked(wire), handed(0, 3 << 20)
    wire.frames.put_nowait(encode_answer(0, "m"))
    assert await link.submit(request) == "m"
    (parts,) = wire.sent
    assert max(map(len, parts)) <= 256 << 10 and decode_message(b"".join(parts)) == request
    await link.close()


async def test_the_wait_for_an_answer_begins_when_the_request_is_sent(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling, "_ANSWER_S", 0.1)
    link = linked(wire)
    wire.sending.clear()
    submitting = asyncio.create_task(link.submit(handed(0)))
    await asyncio.sleep(0.3)
    assert not submitting.done()
    wire.sending.set()
    wire.frames.put_nowait(encode_answer(0, "m"))
    assert await submitting == "m"
    with pytest.raises(PeerLost, match="did not answer within"):
        await link.submit(handed(1))
    await link.close()


async def test_an_answer_from_a_connection_that_has_ended_since_is_none(wire: Wire) -> None:
    link = linked(wire)
    wire.sending.clear()
    submitting = asyncio.create_task(link.submit(handed(0)))
    await eventually(lambda: bool(wire.sent))
    wire.frames.put_nowait(encode_answer(0, "m"))
    wire.end()
    await link.ended
    wire.sending.set()
    with pytest.raises(PeerLost, match="ended the connection"):
        await submitting


@pytest.mark.parametrize("proxy", ["nonsense://x:1", "socks5h://x:1"])
async def test_a_proxy_that_cannot_be_used_is_no_connection(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(PeerLost):
        await HandOverLink.open("http://mell.invalid:8000", None, lambda event: None)


# --- the other end ----------------------------------------------------------------------------------------


class Caller:
    """The other Mell's connection. It reads nothing while `reading` is clear."""

    def __init__(self, *messages: HandedRequest | LeftRequest) -> None:
        self.messages = list(map(encode_message, messages))
        self.left = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        self.read = b""
        self.code: int | None = None

    async def receive_bytes(self) -> bytes:
        if self.messages:
            return self.messages.pop(0)
        await self.left.wait()
        raise WebSocketDisconnect

    async def send_bytes(self, message: bytes) -> None:
        await self.reading.wait()
        self.read += message

    async def close(self, code: int) -> None:
        await self.reading.wait()
        self.code = code

    @property
    def answers(self) -> dict[int, CallAnswer]:
        items = itertools.chain(*FrameDecoder().feed(self.read))
        return {item.number: item for item in items if isinstance(item, CallAnswer)}


class Taken(TakenRequests):
    """Requests that run for ever, and are accepted at once if `accepts`."""

    def __init__(self, accepts: bool = True) -> None:
        self.count = 0
        self.streams: Any = SimpleNamespace(serving=True)
        self.accepts = accepts

    async def run(self, handed: HandedRequest, relay: taking.Relay, accepted: Callable[[], None]) -> None:
        self.count += 1
        try:
            if self.accepts:
                accepted()
            await relay.over.wait()
        finally:
            self.count -= 1


def serving(taken: Taken, caller: Any) -> asyncio.Task[None]:
    return asyncio.create_task(TakingLink(taken, caller, lambda: None).serve())


async def test_a_caller_that_does_not_read_loses_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking, "SILENCE_S", 0.05)
    monkeypatch.setattr(taking, "PING_S", 0.05)
    taken, caller = Taken(), Caller(handed(0))
    caller.reading.clear()
    await asyncio.wait_for(serving(taken, caller), 5)
    await eventually(lambda: taken.count == 0)


async def test_requests_without_a_replica_go_back_accepted_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking, "LOOK_S", 0.01)
    for accepts in (True, False):
        taken, caller = Taken(accepts), Caller(handed(0))
        link = serving(taken, caller)
        await eventually(lambda taken=taken: taken.count == 1)  # type: ignore[misc]
        taken.streams.serving = False
        await eventually(lambda taken=taken: taken.count == 0)  # type: ignore[misc]
        await eventually(lambda caller=caller: bool(caller.answers))  # type: ignore[misc]
        failure = caller.answers[0].failure
        assert (failure is None) if accepts else isinstance(failure and failure.error(), Stopping)
        caller.left.set()
        await link


async def test_a_request_that_is_left_at_once_leaves_nothing() -> None:
    taken, caller = Taken(), Caller(handed(0), LeftRequest(0))
    link = TakingLink(taken, caller, lambda: None)  # type: ignore[arg-type]
    serving = asyncio.create_task(link.serve())
    await eventually(lambda: not caller.messages)
    await eventually(lambda: not link._running)
    assert taken.count == 0
    caller.left.set()
    await serving
    assert caller.code == 1000
