"""The replica's ends of the channels to ingresses: a listener, and a connection for each outbox that is read.

Requests of an ingress arrive on the same connection as its events leave.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import msgspec

from deployments.api.calls import Submission
from deployments.api.channel import (
    END,
    TICKET_BYTES,
    ChannelOffer,
    encode_answer,
    encode_frame,
    read_call,
    tls_context,
)
from deployments.replica.outbox import Outboxes
from migration.protocol.errors import Refused
from migration.protocol.request import IngressId
from policies.causes import Cause

log = logging.getLogger("ray.serve")

ADMISSION_S = 10.0
"""Time limit of a connection after its offer, and of its ticket after the connection."""

Submit = Callable[[Submission], Refused | str]
"""Runs a request. Returns the refusal, or the model that runs it."""

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
    async def start(cls, outboxes: Outboxes, host: str, submit: Submit) -> Self:
        """Listen at any port of `host`."""
        channels: dict[bytes, Channel] = {}
        serve = partial(_serve, outboxes, channels, submit)
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
    submit: Submit,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Serve one connection to its end."""
    try:
        channel = await _admit(channels, reader)
        if channel is not None:
            _limit_silence(writer)
            await _exchange(outboxes, channel, submit, reader, writer)
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
    outboxes: Outboxes, channel: Channel, submit: Submit, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Send events and take requests until one of both ends."""
    tasks: list[asyncio.Task[object]] = [
        asyncio.create_task(_send(outboxes, channel.ingress, writer)),
        asyncio.create_task(_take_requests(submit, reader, writer)),
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


async def _take_requests(submit: Submit, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the calls of an ingress, to its end."""
    with contextlib.suppress(ConnectionError, EOFError):
        while True:
            try:
                call = await read_call(reader)
            except msgspec.DecodeError:
                log.exception("the connection to an ingress is closed: it sent no call")
                return
            writer.write(encode_answer(call, [_result(submit, request) for request in call.requests]))


def _result(submit: Submit, request: Submission) -> Refused | str:
    try:
        return submit(request)
    except Exception:
        log.exception("request %s could not be submitted", request.spec.id)
        return Refused("internal error", Cause.UNEXPECTED)
