"""A channel: a replica's events for one ingress, and the ingress's requests, over a TCP connection of their own.

Other calls between the two go through Ray, whose cost per item is too high for the tokens of every engine step, and
whose time per call is too long for the first token.

1. The ingress opens the stream `EngineApi.channel`. Its one item is a `ChannelOffer`: the address of the replica, and a
   ticket that admits one connection.
2. The ingress connects, and sends the ticket.
3. Both send frames: a length, and as many bytes of MessagePack. Those of the replica are batches of events, and
   answers. The first batch is empty, and so are heartbeats. Length 0 is the end of the events. Those of the ingress are
   calls (`SubmitCall`), each of which has an answer.
4. The connection ends with the stream of calls, and the stream with the connection. Serve does not stop a replica
   before its streams have ended, so an open channel keeps a replica until its requests have left.

A connection that ends without the last frame belongs to a replica that died. If Ray's calls are encrypted
(`RAY_USE_TLS`), so is the connection, by the same certificates.
"""

import asyncio
import contextlib
import itertools
import os
import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import msgspec

from deployments.api.calls import Batch, Submission
from migration.protocol.errors import PeerLost, Refused, Stopping
from migration.protocol.request import StreamEvent
from policies.causes import Cause
from policies.model import ReplicaId

TICKET_BYTES = 16
LENGTH_BYTES = 4
END = bytes(LENGTH_BYTES)
"""The last frame."""

_CONNECT_S = 5.0
"""Time limit of a connection to a replica that has answered a call."""


class SubmitCall(msgspec.Struct, array_like=True):
    """Requests to run; `number` is that of their answer."""

    number: int
    requests: tuple[Submission, ...]


class RefusedSubmission(msgspec.Struct, array_like=True):
    """A `Refused`, or a `Stopping`, on its way."""

    text: str
    cause: Cause
    stopping: bool

    @classmethod
    def of(cls, refused: Refused) -> Self:
        """An exception as it travels."""
        return cls(str(refused), refused.cause, isinstance(refused, Stopping))

    def error(self) -> Refused:
        """The exception."""
        return Stopping(self.text, self.cause) if self.stopping else Refused(self.text, self.cause)


class SubmitAnswer(msgspec.Struct, array_like=True, tag=True):
    """For each request of the call `number`, the model that runs it, or the refusal. It has a frame of its own."""

    number: int
    results: tuple[str | RefusedSubmission, ...]


Frame = tuple[StreamEvent | SubmitAnswer, ...]
"""A frame of a replica: a batch, or one answer."""

_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(Frame)
_calls = msgspec.msgpack.Decoder(SubmitCall)


@dataclass(frozen=True, slots=True)
class ChannelOffer:
    """The address of a replica's listener, and the ticket for one connection."""

    host: str
    port: int
    ticket: bytes


def tls_context(purpose: ssl.Purpose) -> ssl.SSLContext | None:
    """The context for one end of a connection, with Ray's certificates; None if Ray's calls are not encrypted.

    Both ends have certificates. That of the replica need not name its address: the ticket shows that it is the replica.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    context = ssl.create_default_context(purpose, cafile=os.environ["RAY_TLS_CA_CERT"])
    context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def encode_frame(content: Frame | SubmitCall) -> bytes:
    """A frame, as it travels."""
    body = _encoder.encode(content)
    return len(body).to_bytes(LENGTH_BYTES) + body


async def read_call(reader: asyncio.StreamReader) -> SubmitCall:
    """The next frame of an ingress. Raises EOFError at the end, and msgspec.DecodeError for anything but a call."""
    size = int.from_bytes(await reader.readexactly(LENGTH_BYTES))
    return _calls.decode(await reader.readexactly(size))


def encode_answer(call: SubmitCall, results: Sequence[Refused | str]) -> bytes:
    """The frame with the answer to a call."""
    travelling = tuple(r if isinstance(r, str) else RefusedSubmission.of(r) for r in results)
    return encode_frame((SubmitAnswer(call.number, travelling),))


class FrameDecoder:
    """Splits a stream of bytes into a replica's frames. `ended` is true from the last frame on."""

    def __init__(self) -> None:
        self.ended = False
        self._partial = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now. Raises msgspec.DecodeError for anything else than frames."""
        self._partial += data
        frames: list[Frame] = []
        begin = 0
        while len(self._partial) >= begin + LENGTH_BYTES and not self.ended:
            body = begin + LENGTH_BYTES
            size = int.from_bytes(self._partial[begin:body])
            if len(self._partial) < body + size:
                break
            begin = body + size
            if size:
                frames.append(_frames.decode(self._partial[body:begin]))
            self.ended = not size
        del self._partial[:begin]
        return frames


class ChannelReader(asyncio.Protocol):
    """The ingress's end of a connection. A connection without a frame for `silence_s` seconds counts as lost."""

    def __init__(self, replica: ReplicaId, offer: ChannelOffer, silence_s: float) -> None:
        self._replica = replica
        self._ticket = offer.ticket
        self._silence_s = silence_s
        self._decoder = FrameDecoder()
        self._batches: deque[Batch] = deque()
        self._submitted: dict[int, asyncio.Future[Sequence[Refused | str]]] = {}
        self._numbers = itertools.count()
        self._loss: Exception | None = None
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._watch = self._loop.call_later(silence_s, self._look)

    # --- called by the event loop ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._ticket)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._last = self._loop.time()
        try:
            for frame in self._decoder.feed(data):
                if frame and type(frame[0]) is SubmitAnswer:
                    self._answered(frame[0])
                else:
                    self._batches.append(cast(Batch, frame))
        except msgspec.DecodeError as error:
            self.lose(error)
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.lose(PeerLost(f"replica {self._replica} died: its connection has ended"))

    def _look(self) -> None:
        """Lose a connection that is silent for too long."""
        due = self._last + self._silence_s
        if self._loop.time() >= due:
            self.lose(PeerLost(f"replica {self._replica} was silent for {self._silence_s:g} s"))
        else:
            self._watch = self._loop.call_at(due, self._look)

    def _answered(self, answer: SubmitAnswer) -> None:
        future = self._submitted.pop(answer.number, None)
        if future is not None and not future.done():
            future.set_result([r if isinstance(r, str) else r.error() for r in answer.results])

    # --- for the reader -------------------------------------------------------------------------------

    def lose(self, loss: Exception) -> None:
        """End the batches by an exception, unless they have ended. Those that have arrived can still be read."""
        if self._loss is None:
            self._loss = loss
            self._news.set()
        self._give_up()

    def close(self) -> None:
        """End the connection."""
        self._watch.cancel()
        self._transport.abort()
        self._give_up()

    def _give_up(self) -> None:
        """End all calls without an answer: the replica may have taken their requests."""
        waiting, self._submitted = self._submitted, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(PeerLost(f"replica {self._replica} did not answer: its connection has ended"))

    async def submit(self, requests: tuple[Submission, ...]) -> Sequence[Refused | str]:
        """See `ServingApi.submit`. Raises PeerLost."""
        if self._loss is not None or self._transport.is_closing():
            raise PeerLost(f"replica {self._replica} cannot be reached: its connection has ended")
        number = next(self._numbers)
        answer: asyncio.Future[Sequence[Refused | str]] = self._loop.create_future()
        self._submitted[number] = answer
        try:
            self._transport.write(encode_frame(SubmitCall(number, requests)))
            return await answer
        finally:
            self._submitted.pop(number, None)

    async def batches(self) -> AsyncIterator[Batch]:
        """The batches up to the end of the events. Raises PeerLost."""
        while True:
            while self._batches:
                yield self._batches.popleft()
            if self._decoder.ended:
                return
            if self._loss is not None:
                raise self._loss
            self._news.clear()
            await self._news.wait()


@contextlib.asynccontextmanager
async def connected(replica: ReplicaId, offer: ChannelOffer, silence_s: float) -> AsyncIterator[ChannelReader]:
    """A connection to a replica that has made an offer. Raises PeerLost if it cannot be reached."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, reader = await loop.create_connection(
                lambda: ChannelReader(replica, offer, silence_s),
                offer.host,
                offer.port,
                ssl=tls_context(ssl.Purpose.SERVER_AUTH),
            )
    except OSError as error:  # a time-out is one, too
        raise PeerLost(f"replica {replica} cannot be reached: {error!r}") from error
    try:
        yield reader
    finally:
        reader.close()


Channels = MutableMapping[ReplicaId, ChannelReader]
"""The open channels to replicas."""


async def channel_batches(
    replica: ReplicaId, offers: AsyncGenerator[ChannelOffer], silence_s: float, channels: Channels
) -> AsyncGenerator[Batch]:
    """The batches of a channel, which is one of `channels` meanwhile. Raises PeerLost.

    `offers` is the stream of calls that it ends with.
    """
    async with contextlib.aclosing(offers):
        try:
            async with asyncio.timeout(silence_s):
                offer = await anext(offers, None)
        except TimeoutError:
            raise PeerLost(f"replica {replica} was silent for {silence_s:g} s") from None
        if offer is None:
            return
        async with connected(replica, offer, silence_s) as reader:
            rest = asyncio.create_task(_exhaust(offers, reader))
            channels[replica] = reader
            try:
                async for batch in reader.batches():
                    yield batch
            finally:
                if channels.get(replica) is reader:
                    del channels[replica]
                rest.cancel()
                await asyncio.wait({rest})


async def _exhaust(offers: AsyncGenerator[Any], reader: ChannelReader) -> None:
    """Wait for the end of the stream of calls. Its failure is that of the channel."""
    try:
        async for _ in offers:
            pass
    except Exception as error:
        reader.lose(error)
