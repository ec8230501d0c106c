"""The end of a channel that listens: connections with a ticket are served by whoever made the offer."""

import asyncio
import contextlib
import logging
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Self

import msgspec

from deployments.channels.wire import (
    TICKET_BYTES,
    ChannelOffer,
    Methods,
    encode_answer,
    read_call,
    tls_context,
)
from migration.concurrency import Tasks
from migration.protocol.errors import MigrationError

log = logging.getLogger("ray.serve")

ADMISSION_S = 10.0
"""Time limit of a connection after its offer, and of its ticket after the connection."""

_UNACKNOWLEDGED_S = 10.0
"""The longest time for which the other machine may leave data unacknowledged."""

Session = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Serves one connection to its end."""


class ChannelListener:
    """Admits connections by tickets."""

    def __init__(self, server: asyncio.Server, sessions: dict[bytes, Session]) -> None:
        """`sessions` are those without a connection, by their tickets."""
        self._server = server
        self._address: tuple[str, int] = server.sockets[0].getsockname()[:2]
        self._sessions = sessions

    @classmethod
    async def start(cls, host: str) -> Self:
        """Listen at any port of `host`."""
        sessions: dict[bytes, Session] = {}
        serve = partial(_serve, sessions)
        return cls(await asyncio.start_server(serve, host, ssl=tls_context(ssl.Purpose.CLIENT_AUTH)), sessions)

    def offer(self, session: Session) -> ChannelOffer:
        """An offer of one connection, which `session` serves."""
        offer = ChannelOffer(*self._address, secrets.token_bytes(TICKET_BYTES))
        self._sessions[offer.ticket] = session
        return offer

    def offer_calls(self, target: object, methods: Methods) -> ChannelOffer:
        """An offer of a channel for calls of `target`, which go on if the channel ends. It ends if nobody connects."""
        offer = self.offer(partial(_answer_all, target, methods))
        asyncio.get_running_loop().call_later(ADMISSION_S, self.withdraw, offer)
        return offer

    def withdraw(self, offer: ChannelOffer) -> None:
        """Admit nobody by that offer any more."""
        self._sessions.pop(offer.ticket, None)

    def close(self) -> None:
        """Listen no more."""
        self._server.close()


async def _serve(sessions: dict[bytes, Session], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one connection to its end."""
    try:
        session = await _admit(sessions, reader)
        if session is not None:
            _limit_silence(writer)
            await session(reader, writer)
    finally:
        writer.close()


async def _admit(sessions: dict[bytes, Session], reader: asyncio.StreamReader) -> Session | None:
    """The session of the ticket that arrives; None for anything else."""
    try:
        async with asyncio.timeout(ADMISSION_S):
            ticket = await reader.readexactly(TICKET_BYTES)
    except (OSError, EOFError):  # a time-out is an OSError
        ticket = b""
    session = sessions.pop(ticket, None)
    if session is None:
        log.warning("a connection without a valid ticket was closed")
    return session


def _limit_silence(writer: asyncio.StreamWriter) -> None:
    """Have the kernel end the connection if the other machine is gone, which nobody would notice otherwise."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_UNACKNOWLEDGED_S * 1e3))


async def _answer_all(
    target: object, methods: Methods, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    if calls := await answer_calls(target, methods, reader, writer):
        await asyncio.wait(calls)


async def answer_calls(
    target: object,
    methods: Methods,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    acknowledged: Callable[[], None] = lambda: None,
) -> Tasks:
    """Execute calls by the methods of `target` to the end of the connection. They begin in their order.

    Returns those that are under way then. Cancelled, it cancels them.
    """
    calls = Tasks()
    try:
        with contextlib.suppress(ConnectionError, EOFError):
            while True:
                number, name, arguments = await read_call(reader, methods, acknowledged)
                calls.start(_answer(number, getattr(target, name)(*arguments), writer))
    except msgspec.DecodeError:
        log.exception("a connection is closed: its caller sent no call")
        writer.close()
    except asyncio.CancelledError:
        for task in calls:
            task.cancel()
        raise
    return calls


async def _answer(number: int, call: Awaitable[Any], writer: asyncio.StreamWriter) -> None:
    try:
        answer = encode_answer(number, await call)
    except MigrationError as error:
        answer = encode_answer(number, error)
    except Exception as error:
        log.exception("a call failed")
        answer = encode_answer(number, error)
    if not writer.is_closing():
        writer.write(answer)
