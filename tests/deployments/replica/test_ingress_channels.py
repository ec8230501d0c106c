"""The channel between a replica and an ingress: both ends over a real connection, and a stream of calls without Ray."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from ray._common.tls_utils import generate_self_signed_tls_certs

from deployments.api.calls import Submission
from deployments.api.protocols import CHANNEL_METHODS, ChannelApi
from deployments.channels import listening
from deployments.channels.calling import CallerEnd, channel_batches
from deployments.channels.listening import ChannelListener
from deployments.channels.wire import Batch, ChannelOffer, Failure, FrameDecoder, encode_batch, encode_call
from deployments.replica import ingress_channels
from deployments.replica.ingress_channels import IngressChannel, Lacks, Submit, offered, submit_all
from deployments.replica.outbox import Outboxes
from migration.protocol.continuing import plain_spec
from migration.protocol.core_messages import Adapter
from migration.protocol.errors import PeerLost, Refused, Stopping
from migration.protocol.request import Delta, Doubt, IngressId, Lost, Moved, Moving, StreamEvent, Trait
from policies.causes import Cause
from policies.model import ReplicaId, RequestId

HERE, R, REPLICA = IngressId("here"), RequestId("r"), ReplicaId("replica")
EVENTS: list[StreamEvent] = [
    Delta(R, 3, 7, (1, 2), None, ((7, b"\x00\xff"),)),
    Delta(R, 3, 9, (), "stop"),
    Moving(R, 3, 4, "b"),
    Moved(R, 3, 4, 9, "b"),
    Doubt(R, 3, 4),
    Lost(R, 3, "no grammar", invalid=True),
]


def event(index: int) -> Delta:
    return Delta(R, 0, index, (index,))


@dataclass
class Ends:
    """A replica's end, and the ingress's.

    The replica's half of a stream of calls is a task (`served`), which the ingress does not reach: Ray need not cancel
    it. `fault` breaks the streams of calls at the ingress.
    """

    outboxes: Outboxes
    listener: ChannelListener
    requests: "Requests"
    channels: dict[ReplicaId, CallerEnd] = field(default_factory=dict)
    fault: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    served: "list[asyncio.Task[None]]" = field(default_factory=list)
    last: ChannelOffer | None = None

    def new(self, ingress: IngressId = HERE) -> IngressChannel:
        """A channel that nobody has an offer of."""
        return IngressChannel(ingress, self.outboxes, self.requests)

    async def _serve(self, ingress: IngressId, made: "asyncio.Future[ChannelOffer]") -> None:
        """As `EngineReplica.channel`."""
        channel = self.new(ingress)
        async with offered(self.listener, channel) as offer:
            made.set_result(offer)
            await channel.over()

    async def calls(self, ingress: IngressId = HERE) -> AsyncGenerator[ChannelOffer]:
        made = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._serve(ingress, made))
        self.served.append(task)
        self.last = await made
        yield self.last
        await asyncio.wait({task, self.fault}, return_when=asyncio.FIRST_COMPLETED)
        if self.fault.done():
            self.fault.result()

    @property
    def under_way(self) -> int:
        """Streams of calls that the replica serves."""
        return sum(not task.done() for task in self.served)

    def batches(self, silence_s: float = 5.0, ingress: IngressId = HERE) -> AsyncGenerator[Batch]:
        return channel_batches(REPLICA, self.calls(ingress), CHANNEL_METHODS, silence_s, self.channels)

    async def connected(self, ingress: IngressId = HERE) -> AsyncGenerator[Batch]:
        """The batches after the first, empty one."""
        batches = self.batches(ingress=ingress)
        assert await anext(batches) == ()
        return batches

    async def submit(self, *requests: Submission) -> Sequence[str | Failure]:
        """What the ingress does."""
        return await self.channels[REPLICA].call(ChannelApi.submit, requests)


def submit(request: Submission) -> Refused | str:
    """Runs some requests, refuses others, and breaks."""
    match request.spec.id:
        case "full":
            return Refused("no room", Cause.NO_ROOM)
        case "stops":
            return Stopping("the replica is stopping")
        case "broken":
            raise RuntimeError("a defect")
        case _:
            return f"model of {request.spec.id}.{request.hop} after {request.outputs}"


async def lacks(adapter: Adapter) -> Refused | None:
    """Has one adapter in an hour, and no others."""
    if adapter.lora_name == "late":
        await asyncio.sleep(3600)
    return Refused("no files", Cause.ADAPTER)


@dataclass
class Requests:
    """Implements `ChannelApi`: notes the calls about requests."""

    submits: Submit = submit
    lacks: Lacks = lacks
    calls: list[tuple[object, ...]] = field(default_factory=list)

    async def submit(self, requests: tuple[Submission, ...]) -> tuple[str | Failure, ...]:
        return await submit_all(requests, self.submits, self.lacks)

    async def attach(self, request: RequestId, hop: int, index: int) -> bool:
        self.calls.append(("attach", request, hop, index))
        return index > 0

    async def keep(self, request: RequestId, hop: int, next_hop: int) -> None:
        self.calls.append(("keep", request, hop, next_hop))

    async def release(self, request: RequestId, hop: int | None) -> None:
        self.calls.append(("release", request, hop))


@contextlib.asynccontextmanager
async def listening_ends() -> AsyncIterator[Ends]:
    outboxes = Outboxes(asyncio.get_running_loop().time)
    made = Ends(outboxes, await ChannelListener.start("127.0.0.1"), Requests())
    yield made
    made.listener.close()


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    async with listening_ends() as made:
        yield made


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.001)


async def test_events_of_every_kind_arrive_as_they_were_sent(ends: Ends) -> None:
    batches = await ends.connected()
    for each in EVENTS:
        ends.outboxes.put(HERE, each)
    assert await anext(batches) == tuple(EVENTS)
    await batches.aclose()


async def test_a_step_is_a_batch(ends: Ends) -> None:
    batches = await ends.connected()
    for index in range(3):
        ends.outboxes.put(HERE, event(index))
        assert await anext(batches) == (event(index),)
    await batches.aclose()


async def test_a_channel_has_the_events_of_its_ingress(ends: Ends) -> None:
    here, there = await ends.connected(), await ends.connected(IngressId("other"))
    ends.outboxes.put(IngressId("other"), event(1))
    ends.outboxes.put(HERE, event(0))
    assert (await anext(here), await anext(there)) == ((event(0),), (event(1),))
    await here.aclose()
    await there.aclose()


async def test_large_batches_arrive_whole(ends: Ends) -> None:
    batches, large = await ends.connected(), Delta(R, 0, 0, (1,), None, ((0, bytes(5_000_000)),))
    ends.outboxes.put(HERE, large)
    assert await anext(batches) == (large,)
    await batches.aclose()


async def test_a_closed_outbox_ends_the_events_after_those_so_far(ends: Ends) -> None:
    batches = await ends.connected()
    ends.outboxes.put(HERE, event(0))
    ends.outboxes.close()
    assert [batch async for batch in batches] == [(event(0),)]
    await eventually(lambda: not ends.under_way)


async def test_the_stream_of_calls_ends_when_the_ingress_leaves(ends: Ends) -> None:
    batches = await ends.connected()
    assert ends.under_way == 1
    await batches.aclose()
    await eventually(lambda: not ends.under_way and ends.outboxes.silent(-1.0) == (HERE,))


async def test_the_connection_ends_with_the_stream_of_calls(ends: Ends) -> None:
    batches = await ends.connected()
    ends.served[0].cancel()
    with pytest.raises(PeerLost):
        await anext(batches)
    assert ends.outboxes.silent(-1.0) == (HERE,)


async def test_a_new_reader_ends_the_one_before(ends: Ends) -> None:
    first = await ends.connected()
    second = await ends.connected()
    assert [batch async for batch in first] == []
    ends.outboxes.put(HERE, event(0))
    assert await anext(second) == (event(0),)
    await second.aclose()


# --- requests -----------------------------------------------------------------------------------------


def submission(id: str, hop: int = 0, outputs: tuple[int, ...] = ()) -> Submission:
    request = plain_spec(id, (1, 2), 9, "label", HERE, seed=3, temperature=1.0)
    return Submission(replace(request, body=(*request.body, b"a tensor")), hop, outputs, "model" if outputs else None)


async def test_a_request_arrives_as_it_was_sent(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Submission] = []

    def take(request: Submission) -> str:
        taken.append(request)
        return "m"

    async def has(adapter: Adapter) -> None:
        assert not taken

    ends.requests = Requests(take, has)
    adapted = submission("c")
    adapted = replace(adapted, spec=replace(adapted.spec, adapter=Adapter("x", 7, "/x", is_3d_lora_weight=True)))
    batches, sent = await ends.connected(), (submission("a"), submission("b", 3, (7, 8)), adapted)
    assert await ends.submit(*sent) == ("m", "m", "m")
    assert tuple(taken) == sent and taken[0].spec.traits == {Trait.SEEDED}
    await batches.aclose()


async def test_every_request_has_an_answer_of_its_own(ends: Ends) -> None:
    batches = await ends.connected()
    calls = (ends.submit(*(submission(id) for id in ids)) for ids in (("a", "full"), ("stops", "broken", "b")))
    (a, full), (stops, broken, b) = await asyncio.gather(*calls)
    assert (a, b) == ("model of a.0 after ()", "model of b.0 after ()")
    refused = [each.refusal() for each in (full, stops, broken) if isinstance(each, Failure)]
    refusals = [(type(each), each.cause) for each in refused]
    assert refusals == [(Refused, Cause.NO_ROOM), (Stopping, Cause.STOPPING), (Refused, Cause.UNEXPECTED)]
    assert str(refused[0]) == "no room"
    await batches.aclose()


async def test_requests_without_an_adapter_wait_for_none(ends: Ends) -> None:
    batches = await ends.connected()

    def adapted(name: str) -> Submission:
        request = submission(name)
        return replace(request, spec=replace(request.spec, adapter=Adapter(name, 7, "/x")))

    waiting = asyncio.create_task(ends.submit(adapted("late")))
    await asyncio.sleep(0.01)
    assert await ends.submit(submission("a")) == ("model of a.0 after ()",)
    refused, own = await ends.submit(adapted("gone"), submission("b"))
    assert refused == Failure("Refused", "no files", Cause.ADAPTER)
    assert own == "model of b.0 after ()" and not waiting.done()
    await batches.aclose()
    with pytest.raises(PeerLost):
        await waiting


@pytest.mark.parametrize("end", ["the ingress leaves", "the connection breaks"])
async def test_a_request_that_waits_for_its_adapter_is_not_run_once_its_ingress_has_left(ends: Ends, end: str) -> None:
    asked, loaded, run = asyncio.Event(), asyncio.Event(), list[Submission]()

    async def has(adapter: Adapter) -> None:
        asked.set()
        await loaded.wait()

    def take(request: Submission) -> str:
        run.append(request)
        return "m"

    ends.requests = Requests(take, has)
    batches, adapted = await ends.connected(), submission("late")
    adapted = replace(adapted, spec=replace(adapted.spec, adapter=Adapter("late", 7, "/x")))
    waiting = asyncio.create_task(ends.submit(adapted))
    await asked.wait()
    if end == "the ingress leaves":
        await batches.aclose()
    else:
        ends.channels[REPLICA]._transport.abort()
    with pytest.raises(PeerLost):
        await waiting
    await eventually(lambda: not ends.under_way)
    loaded.set()
    await asyncio.sleep(0.01)
    assert not run


async def test_events_and_answers_share_a_connection(ends: Ends) -> None:
    batches = await ends.connected()
    for index in range(20):
        ends.outboxes.put(HERE, event(index))
        assert len(await ends.submit(submission("a"))) == 1
    events = [each for _ in range(20) for each in await anext(batches)]
    assert events == [event(index) for index in range(20)]
    await batches.aclose()


async def test_a_large_request_arrives_whole(ends: Ends) -> None:
    batches, large = await ends.connected(), submission("a")
    large = replace(large, spec=replace(large.spec, body=(bytes(5_000_000),)))
    assert await ends.submit(large) == ("model of a.0 after ()",)
    await batches.aclose()


async def test_a_channel_takes_requests_while_its_events_are_read(ends: Ends) -> None:
    batches = await ends.connected()
    channel = ends.channels[REPLICA]
    await batches.aclose()
    assert ends.channels == {}
    with pytest.raises(PeerLost, match="cannot be reached"):
        await channel.call(ChannelApi.submit, (submission("a"),))


async def test_a_newer_channel_stays_when_an_older_one_ends(ends: Ends) -> None:
    first = await ends.connected()
    second = await ends.connected()
    channel = ends.channels[REPLICA]
    await first.aclose()
    assert ends.channels == {REPLICA: channel}
    await second.aclose()


@pytest.mark.parametrize("end", ["by the replica", "by the ingress"])
async def test_a_connection_that_ends_leaves_no_request_without_an_answer(
    ends: Ends, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "encode_answer", lambda number, result: b"")
    batches = await ends.connected()
    asking = asyncio.create_task(ends.submit(submission("a")))
    await asyncio.sleep(0.01)
    if end == "by the replica":
        ends.served[0].cancel()
    else:
        await batches.aclose()
    with pytest.raises(PeerLost, match="did not answer"):
        await asking


async def test_a_reader_attaches_keeps_and_releases_on_its_channel(ends: Ends) -> None:
    batches, channel = await ends.connected(), ends.channels[REPLICA]
    assert [await channel.call(ChannelApi.attach, R, 3, index) for index in (7, 0)] == [True, False]
    await channel.call(ChannelApi.keep, R, 3, 4)
    await channel.call(ChannelApi.release, R, 4)
    await channel.call(ChannelApi.release, R, None)
    made = [("attach", R, 3, 7), ("attach", R, 3, 0), ("keep", R, 3, 4), ("release", R, 4), ("release", R, None)]
    assert ends.requests.calls == made
    await batches.aclose()


@pytest.mark.parametrize("call", [b"\xc1", encode_call(0, "close", ())[4:], encode_call(0, "attach", (1,))[4:]])
async def test_what_is_no_call_ends_the_connection(ends: Ends, call: bytes, caplog: pytest.LogCaptureFixture) -> None:
    batches = await ends.connected()
    ends.channels[REPLICA]._transport.write(len(call).to_bytes(4) + call)
    with pytest.raises(PeerLost):
        await anext(batches)
    assert "its caller sent no call" in caplog.text


# --- ends out of order --------------------------------------------------------------------------------


async def test_a_connection_that_breaks_is_a_death(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_channels, "END", b"")
    batches = await ends.connected()
    ends.outboxes.put(HERE, event(0))
    ends.outboxes.close()
    assert await anext(batches) == (event(0),)
    with pytest.raises(PeerLost, match="its connection has ended"):
        await anext(batches)


async def test_a_stream_of_calls_that_breaks_is_a_death(ends: Ends) -> None:
    batches = await ends.connected()
    ends.fault.set_exception(PeerLost("the actor died"))
    with pytest.raises(PeerLost, match="the actor died"):
        await anext(batches)
    await eventually(lambda: not ends.under_way)


async def test_silence_is_a_death(ends: Ends) -> None:
    batches = ends.batches(silence_s=0.05)
    assert await anext(batches) == ()
    with pytest.raises(PeerLost, match=r"silent for 0.05 s"):
        await anext(batches)


async def test_heartbeats_are_no_silence(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.replica.outbox.HEARTBEAT_S", 0.05)
    batches = ends.batches(silence_s=1.0)
    async with asyncio.timeout(30):
        assert [await anext(batches) for _ in range(25)] == [()] * 25
    await batches.aclose()


async def test_an_ingress_that_reads_says_so(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.replica.outbox.HEARTBEAT_S", 0.02)
    monkeypatch.setattr("deployments.channels.calling.ACKNOWLEDGE_S", 0.05)
    heard: list[IngressId] = []
    monkeypatch.setattr(ends.outboxes, "acknowledged", heard.append)
    batches = await ends.connected()
    await eventually(lambda: not heard)
    for _ in range(10):
        await anext(batches)
    await eventually(lambda: bool(heard))
    assert 1 <= len(heard) <= 10 and set(heard) == {HERE}
    assert await ends.submit(submission("a")) == ("model of a.0 after ()",), "calls come between acknowledgments"
    await batches.aclose()


async def test_a_connected_ingress_that_is_given_up_loses_its_connection(ends: Ends) -> None:
    offers = ends.calls()
    offer = await anext(offers)
    reader, writer = await asyncio.open_connection(offer.host, offer.port)
    reader._transport.pause_reading()  # type: ignore[attr-defined]  # as in a process that stands still
    writer.write(offer.ticket)
    await eventually(lambda: ends.under_way == 1 and not ends.outboxes.silent(5.0))
    for index in range(50):
        ends.outboxes.put(HERE, Delta(R, 0, index, (index,), None, ((index, bytes(1_000_000)),)))
    await asyncio.sleep(0.1)
    ends.outboxes.forget(HERE)
    await eventually(lambda: not ends.under_way)
    reader._transport.resume_reading()  # type: ignore[attr-defined]
    received = 0
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(1 << 20):
            received += len(part)
    assert received < 40_000_000, "the rest of what was written is dropped"
    writer.close()
    await offers.aclose()


async def test_a_replica_that_does_not_offer_a_channel_is_silent() -> None:
    async def none() -> AsyncGenerator[ChannelOffer]:
        await asyncio.Event().wait()
        yield ChannelOffer("", 0, b"")

    with pytest.raises(PeerLost, match="silent"):
        await anext(channel_batches(REPLICA, none(), CHANNEL_METHODS, 0.01, {}))


async def test_a_stream_of_calls_without_an_offer_has_no_events() -> None:
    async def empty() -> AsyncGenerator[ChannelOffer]:
        offers: list[ChannelOffer] = []
        for offer in offers:
            yield offer

    assert [batch async for batch in channel_batches(REPLICA, empty(), CHANNEL_METHODS, 1.0, {})] == []


async def test_a_replica_that_does_not_listen_is_unreachable(ends: Ends) -> None:
    ends.listener.close()
    with pytest.raises(PeerLost, match="cannot be reached"):
        await anext(ends.batches())


async def test_an_offer_that_nobody_takes_ends(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "ADMISSION_S", 0.01)
    async with asyncio.timeout(5):
        assert len([offer async for offer in ends.calls()]) == 1


async def test_what_is_no_batch_breaks_the_channel(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_channels, "encode_batch", lambda batch: b"\0\0\0\1\xc1")
    with pytest.raises(ValueError, match="malformed"):
        await anext(ends.batches())


async def test_a_machine_that_acknowledges_nothing_ends_the_connection(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited: list[asyncio.StreamWriter] = []
    limit = listening._limit_silence

    def observed(writer: asyncio.StreamWriter) -> None:
        limit(writer)
        limited.append(writer)

    monkeypatch.setattr(listening, "_limit_silence", observed)
    batches = await ends.connected()
    connection = limited[0].get_extra_info("socket")
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
    await batches.aclose()


# --- who may connect ----------------------------------------------------------------------------------


async def refused(offer: ChannelOffer, ticket: bytes) -> bool:
    reader, writer = await asyncio.open_connection(offer.host, offer.port)
    writer.write(ticket)
    try:
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(5):
                return await reader.read() == b""
        return True
    finally:
        writer.close()


async def test_a_ticket_admits_one_connection(ends: Ends) -> None:
    batches = await ends.connected()
    assert ends.last is not None and await refused(ends.last, ends.last.ticket)
    ends.outboxes.put(HERE, event(0))
    assert await anext(batches) == (event(0),)
    await batches.aclose()


@pytest.mark.parametrize("ticket", [bytes(16), b"GET / HTTP/1.1\r\n\r\n"])
async def test_strangers_are_refused(ends: Ends, ticket: bytes) -> None:
    async with offered(ends.listener, ends.new()) as offer:
        assert await refused(offer, ticket)


async def test_a_ticket_ends_with_its_stream_of_calls(ends: Ends) -> None:
    async with offered(ends.listener, ends.new()) as offer:
        pass
    assert await refused(offer, offer.ticket)


async def test_a_connection_without_a_ticket_is_closed(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "ADMISSION_S", 0.01)
    async with offered(ends.listener, ends.new()) as offer:
        assert await refused(offer, b"half")


# --- encryption ---------------------------------------------------------------------------------------


@pytest.fixture
def certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate that is its own authority."""
    certificate, key = generate_self_signed_tls_certs()
    for name, text in (("SERVER_CERT", certificate), ("SERVER_KEY", key), ("CA_CERT", certificate)):
        (tmp_path / name).write_text(text)
        monkeypatch.setenv(f"RAY_TLS_{name}", str(tmp_path / name))
    monkeypatch.setenv("RAY_USE_TLS", "1")


@pytest.mark.usefixtures("certificates")
async def test_a_channel_is_encrypted_if_rays_calls_are(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening_ends() as ends:
        batches = await ends.connected()
        ends.outboxes.put(HERE, event(0))
        assert await anext(batches) == (event(0),)
        await batches.aclose()
        await eventually(lambda: not ends.under_way)
        monkeypatch.setenv("RAY_USE_TLS", "0")
        with pytest.raises(PeerLost):
            await anext(ends.batches())


# --- frames -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_frames_may_arrive_in_pieces(size: int) -> None:
    sent: list[Batch] = [(), tuple(EVENTS), (event(0),), ()]
    stream = b"".join(map(encode_batch, sent)) + bytes(4) + b"behind the end"
    decoder = FrameDecoder()
    found = [batch for at in range(0, len(stream), size) for batch in decoder.feed(stream[at : at + size])]
    assert found == sent and decoder.ended
