"""The end of a channel that connects: it makes calls, and reads events if it is an ingress's.

A connection that ends before the events do, or while calls are under way, belongs to a process that died.
"""

import asyncio
import contextlib
import itertools
import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, MutableMapping
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import msgspec

from deployments.channels.wire import (
    ACKNOWLEDGE_S,
    ACKNOWLEDGED,
    Batch,
    CallAnswer,
    ChannelOffer,
    FrameDecoder,
    Methods,
    encode_call,
    tls_context,
)
from migration.protocol.errors import PeerLost
from policies.causes import Cause
from policies.model import ReplicaId

_CONNECT_S = 5.0
"""Time limit of a connection to a process that has answered a call."""

P = ParamSpec("P")
R = TypeVar("R")


class CallerEnd(asyncio.Protocol):
    """The caller's end of a connection to `callee`, lost after `silence_s` seconds (None: any time) without a frame."""

    def __init__(self, callee: str, offer: ChannelOffer, methods: Methods, silence_s: float | None) -> None:
        self._callee = callee
        self._ticket = offer.ticket
        self._methods = methods
        self._decoder = FrameDecoder()
        self._batches: deque[Batch] = deque()
        self._calls: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._numbers = itertools.count()
        self._loss: Exception | None = None
        self._closes = False
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._watch = None if silence_s is None else self._loop.call_later(silence_s, self._look, silence_s)

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
                if frame and type(frame[0]) is CallAnswer:
                    self._answered(frame[0])
                else:
                    self._batches.append(cast(Batch, frame))
        except msgspec.DecodeError as error:
            self.lose(error)
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.lose(PeerLost(f"{self._callee} died: its connection has ended"))

    def _look(self, silence_s: float) -> None:
        """Lose a connection that is silent for too long."""
        due = self._last + silence_s
        if self._loop.time() >= due:
            self.lose(PeerLost(f"{self._callee} was silent for {silence_s:g} s", Cause.NO_ANSWER))
        else:
            self._watch = self._loop.call_at(due, self._look, silence_s)

    def _answered(self, answer: CallAnswer) -> None:
        method, future = self._calls.pop(answer.number, (None, None))
        if method is None or future is None or future.done():
            return
        if answer.failure is not None:
            future.set_exception(answer.failure.error())
            return
        try:
            future.set_result(self._methods[method].result.decode(answer.result))
        except msgspec.DecodeError as error:
            future.set_exception(PeerLost(f"an answer of {self._callee} cannot be read: {error}", Cause.UNEXPECTED))

    # --- for the caller -------------------------------------------------------------------------------

    @property
    def lost(self) -> bool:
        """True if no more calls can be made."""
        return self._loss is not None or self._closes or self._transport.is_closing()

    def lose(self, loss: Exception) -> None:
        """End the batches by an exception, unless they have ended. Those that have arrived can still be read."""
        if self._loss is None:
            self._loss = loss
            self._news.set()
        self._give_up()

    def close(self) -> None:
        """End the connection."""
        if self._watch is not None:
            self._watch.cancel()
        self._transport.abort()
        self._give_up()

    def close_when_idle(self) -> None:
        """End the connection behind the last answer that is awaited."""
        self._closes = True
        if not self._calls:
            self.close()

    def _give_up(self) -> None:
        """End all calls without an answer: the callee may have executed them."""
        waiting, self._calls = self._calls, {}
        for _, future in waiting.values():
            if not future.done():
                future.set_exception(PeerLost(f"{self._callee} did not answer: its connection has ended"))

    async def call(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call the callee's method of that name. Arguments have no names on the wire.

        Raises PeerLost, and the method's MigrationErrors.
        """
        assert not kwargs
        if self.lost:
            raise PeerLost(f"{self._callee} cannot be reached: its connection has ended")
        number, name = next(self._numbers), method.__name__
        answer: asyncio.Future[R] = self._loop.create_future()
        self._calls[number] = (name, answer)
        try:
            self._transport.write(encode_call(number, name, args))
            return await answer
        finally:
            self._calls.pop(number, None)
            if self._closes and not self._calls:
                self.close()

    async def batches(self) -> AsyncIterator[Batch]:
        """The batches up to the end of the events, acknowledged as they are asked for. Raises PeerLost."""
        acknowledged_at = float("-inf")
        while True:
            while self._batches:
                yield self._batches.popleft()
                if (now := self._loop.time()) >= acknowledged_at + ACKNOWLEDGE_S and not self.lost:
                    acknowledged_at = now
                    self._transport.write(ACKNOWLEDGED)
            if self._decoder.ended:
                return
            if self._loss is not None:
                raise self._loss
            self._news.clear()
            await self._news.wait()


async def connect(callee: str, offer: ChannelOffer, methods: Methods, silence_s: float | None = None) -> CallerEnd:
    """A connection to a process that has made an offer. Raises PeerLost if it cannot be reached."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, end = await loop.create_connection(
                lambda: CallerEnd(callee, offer, methods, silence_s),
                offer.host,
                offer.port,
                ssl=tls_context(ssl.Purpose.SERVER_AUTH),
            )
    except OSError as error:  # a time-out is one, too
        raise PeerLost(f"{callee} cannot be reached: {error!r}") from error
    return end


Channels = MutableMapping[ReplicaId, CallerEnd]
"""The open channels to replicas."""


async def channel_batches(
    replica: ReplicaId, offers: AsyncGenerator[ChannelOffer], methods: Methods, silence_s: float, channels: Channels
) -> AsyncGenerator[Batch]:
    """The batches of a channel, which is one of `channels` meanwhile. Raises PeerLost.

    `offers` is a stream of Ray, whose one item is the offer, and which ends with the channel. Serve does not stop a
    replica before its streams have ended, so an open channel keeps a replica until its requests have left.
    """
    async with contextlib.aclosing(offers):
        try:
            async with asyncio.timeout(silence_s):
                offer = await anext(offers, None)
        except TimeoutError:
            raise PeerLost(f"replica {replica} was silent for {silence_s:g} s", Cause.NO_ANSWER) from None
        if offer is None:
            return
        end = await connect(f"replica {replica}", offer, methods, silence_s)
        rest = asyncio.create_task(_exhaust(offers, end))
        channels[replica] = end
        try:
            async for batch in end.batches():
                yield batch
        finally:
            if channels.get(replica) is end:
                del channels[replica]
            end.close()
            rest.cancel()
            await asyncio.wait({rest})


async def _exhaust(offers: AsyncGenerator[Any], end: CallerEnd) -> None:
    """Wait for the end of the stream of Ray. Its failure is that of the channel."""
    try:
        async for _ in offers:
            pass
    except Exception as error:
        end.lose(error)
