"""A channel: a replica's events for one ingress, over a TCP connection of their own.

Calls between the two go through Ray, whose cost per item is too high for the tokens of every engine step.

1. The ingress opens the stream `EngineApi.channel`. Its one item is a `ChannelOffer`: the address of the replica, and a
   ticket that admits one connection.
2. The ingress connects, and sends the ticket.
3. The replica sends frames: the length of a batch, and the batch in MessagePack. The first batch is empty, and so are
   heartbeats. Length 0 is the end of the events.
4. The connection ends with the stream of calls, and the stream with the connection. Serve does not stop a replica
   before its streams have ended, so an open channel keeps a replica until its requests have left.

A connection that ends without the last frame belongs to a replica that died. If Ray's calls are encrypted
(`RAY_USE_TLS`), so is the connection, by the same certificates.
"""

import asyncio
import contextlib
import os
import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from deployments.api.calls import Batch
from migration.protocol.errors import PeerLost
from policies.model import ReplicaId

TICKET_BYTES = 16
LENGTH_BYTES = 4
END = bytes(LENGTH_BYTES)
"""The last frame."""

_CONNECT_S = 5.0
"""Time limit of a connection to a replica that has answered a call."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Batch)


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


def encode_frame(batch: Batch) -> bytes:
    """A batch, as it travels."""
    body = _encoder.encode(batch)
    return len(body).to_bytes(LENGTH_BYTES) + body


class FrameDecoder:
    """Splits a stream of bytes into batches. `ended` is true from the last frame on."""

    def __init__(self) -> None:
        self.ended = False
        self._partial = bytearray()

    def feed(self, data: bytes) -> list[Batch]:
        """The batches that are complete now. Raises msgspec.DecodeError for anything else than batches."""
        self._partial += data
        batches: list[Batch] = []
        begin = 0
        while len(self._partial) >= begin + LENGTH_BYTES and not self.ended:
            body = begin + LENGTH_BYTES
            size = int.from_bytes(self._partial[begin:body])
            if len(self._partial) < body + size:
                break
            begin = body + size
            if size:
                batches.append(_decoder.decode(self._partial[body:begin]))
            self.ended = not size
        del self._partial[:begin]
        return batches


class ChannelReader(asyncio.Protocol):
    """The ingress's end of a connection. A connection without a frame for `silence_s` seconds counts as lost."""

    def __init__(self, replica: ReplicaId, offer: ChannelOffer, silence_s: float) -> None:
        self._replica = replica
        self._ticket = offer.ticket
        self._silence_s = silence_s
        self._decoder = FrameDecoder()
        self._batches: deque[Batch] = deque()
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
            self._batches.extend(self._decoder.feed(data))
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

    # --- for the reader -------------------------------------------------------------------------------

    def lose(self, loss: Exception) -> None:
        """End the batches by an exception, unless they have ended. Those that have arrived can still be read."""
        if self._loss is None:
            self._loss = loss
            self._news.set()

    def close(self) -> None:
        """End the connection."""
        self._watch.cancel()
        self._transport.abort()

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


async def channel_batches(
    replica: ReplicaId, offers: AsyncGenerator[ChannelOffer], silence_s: float
) -> AsyncGenerator[Batch]:
    """The batches of a channel. `offers` is the stream of calls that it ends with. Raises PeerLost."""
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
            try:
                async for batch in reader.batches():
                    yield batch
            finally:
                rest.cancel()
                await asyncio.wait({rest})


async def _exhaust(offers: AsyncGenerator[Any], reader: ChannelReader) -> None:
    """Wait for the end of the stream of calls. Its failure is that of the channel."""
    try:
        async for _ in offers:
            pass
    except Exception as error:
        reader.lose(error)
