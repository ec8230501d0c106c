"""The replica's ends of the channels to ingresses: a listener, and a connection for each outbox that is read.

Requests of an ingress arrive on the same connection as its events leave.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import msgspec

from deployments.api.calls import Submission
from deployments.api.channel import (
    END,
    TICKET_BYTES,
    ChannelOffer,
    SubmitCall,
    encode_answer,
    encode_frame,
    read_call,
    tls_context,
)
from deployments.replica.outbox import Outboxes
from migration.protocol.core_messages import Adapter
from migration.protocol.errors import Refused
from migration.protocol.request import IngressId
from policies.causes import Cause

log = logging.getLogger("ray.serve")

ADMISSION_S = 10.0
"""Time limit of a connection after its offer, and of its ticket after the connection."""

Submit = Callable[[Submission], Refused | str]
"""Runs a request. Returns the refusal, or the model that runs it."""

Lacks = Callable[[Adapter], Awaitable[Refused | None]]
"""Has an adapter loaded before a request with it is run. Returns the refusal if the engine does not have it."""

_UNACKNOWLEDGED_S = 10.0
"""The longest time for which an ingress's machine may leave a heartbeat unacknowledged."""


@dataclass(eq=False, slots=True)
class Channel:
    """One ingress's stream of calls (until `closing`), and its connection (from `connected` until `ended`)."""

    ingress: IngressId
    offer: ChannelOffer
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    async def over(self) -> None:
        """Wait for the end of the connection. None comes if the ingress has died meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ADMISSION_S):
                await self.connected.wait()
        if self.connected.is_set():
            await self.ended.wait()


class ChannelListener:
    """Admits connections by tickets, sends each the events of its ingress, and takes its requests."""

    def __init__(self, server: asyncio.Server, channels: dict[bytes, Channel]) -> None:
        """`channels` are those without a connection, by their tickets."""
        self._server = server
        self._address: tuple[str, int] = server.sockets[0].getsockname()[:2]
        self._channels = channels

    @classmethod
    async def start(cls, outboxes: Outboxes, host: str, submit: Submit, lacks: Lacks) -> Self:
        """Listen at any port of `host`."""
        channels: dict[bytes, Channel] = {}
        serve = partial(_serve, outboxes, channels, RequestTaker(submit, lacks))
        return cls(await asyncio.start_server(serve, host, ssl=tls_context(ssl.Purpose.CLIENT_AUTH)), channels)

    @contextlib.asynccontextmanager
    async def offering(self, ingress: IngressId) -> AsyncIterator[Channel]:
        """A channel for an ingress. It ends with the context."""
        channel = Channel(ingress, ChannelOffer(*self._address, secrets.token_bytes(TICKET_BYTES)))
        self._channels[channel.offer.ticket] = channel
        try:
            yield channel
        finally:
            self._channels.pop(channel.offer.ticket, None)
            channel.closing.set()

    def close(self) -> None:
        """Listen no more."""
        self._server.close()


async def _serve(
    outboxes: Outboxes,
    channels: dict[bytes, Channel],
    taker: "RequestTaker",
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Serve one connection to its end."""
    try:
        channel = await _admit(channels, reader)
        if channel is not None:
            _limit_silence(writer)
            await _exchange(outboxes, channel, taker, reader, writer)
    finally:
        writer.close()


async def _admit(channels: dict[bytes, Channel], reader: asyncio.StreamReader) -> Channel | None:
    """The channel of the ticket that arrives; None for anything else."""
    try:
        async with asyncio.timeout(ADMISSION_S):
            ticket = await reader.readexactly(TICKET_BYTES)
    except (OSError, EOFError):  # a time-out is an OSError
        ticket = b""
    channel = channels.pop(ticket, None)
    if channel is None:
        log.warning("a connection without a valid ticket was closed")
    else:
        channel.connected.set()
    return channel


def _limit_silence(writer: asyncio.StreamWriter) -> None:
    """Have the kernel end the connection if the ingress's machine is gone, which nobody would notice otherwise."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_UNACKNOWLEDGED_S * 1e3))


async def _exchange(
    outboxes: Outboxes,
    channel: Channel,
    taker: "RequestTaker",
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Send events and take requests until one of both ends."""
    tasks: list[asyncio.Task[object]] = [
        asyncio.create_task(_send(outboxes, channel.ingress, writer)),
        asyncio.create_task(taker.take(reader, writer)),
        asyncio.create_task(channel.closing.wait()),
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        channel.ended.set()


async def _send(outboxes: Outboxes, ingress: IngressId, writer: asyncio.StreamWriter) -> None:
    """Send the events of an ingress, as fast as it reads them."""
    with contextlib.suppress(ConnectionError):
        async with contextlib.aclosing(outboxes.read(ingress)) as batches:
            async for batch in batches:
                writer.write(encode_frame(batch))
                await writer.drain()
        writer.write(END)


@dataclass(frozen=True, slots=True)
class RequestTaker:
    """Runs the requests of ingresses. Those with an adapter wait for it; others, and other calls, do not."""

    submit: Submit
    lacks: Lacks

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the calls of an ingress, to its end."""
        waiting: set[asyncio.Task[None]] = set()
        try:
            with contextlib.suppress(ConnectionError, EOFError):
                while True:
                    call = await read_call(reader)
                    if any(request.spec.adapter is not None for request in call.requests):
                        task = asyncio.create_task(self._answer_adapted(call, writer))
                        waiting.add(task)
                        task.add_done_callback(waiting.discard)
                    else:
                        writer.write(encode_answer(call, [self._result(request) for request in call.requests]))
        except msgspec.DecodeError:
            log.exception("the connection to an ingress is closed: it sent no call")
        finally:
            for task in waiting:
                task.cancel()

    async def _answer_adapted(self, call: SubmitCall, writer: asyncio.StreamWriter) -> None:
        writer.write(encode_answer(call, await self.results(call.requests)))

    async def results(self, requests: Sequence[Submission]) -> list[Refused | str]:
        """Run requests once their adapters are loaded. Returns for each the refusal, or the model that runs it."""
        adapters = {request.spec.adapter for request in requests if request.spec.adapter is not None}
        lacking = dict(zip(adapters, await asyncio.gather(*map(self.lacks, adapters)), strict=True))
        refusals = [None if r.spec.adapter is None else lacking[r.spec.adapter] for r in requests]
        return [refusal or self._result(r) for refusal, r in zip(refusals, requests, strict=True)]

    def _result(self, request: Submission) -> Refused | str:
        try:
            return self.submit(request)
        except Exception:
            log.exception("request %s could not be submitted", request.spec.id)
            return Refused("internal error", Cause.UNEXPECTED)
