"""The connection of an ingress process to another Mell, for all requests that it hands over there."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Self

import httpx
import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from app.client.api import HAND_OVER_REQUESTS, is_loopback
from app.client.errors import message_in
from app.ingress.hand_over.rules import PROTOCOL, PROTOCOL_HEADER
from app.ingress.hand_over.wire import (
    LONGEST_HEADER,
    PING_S,
    SILENCE_S,
    HandedRequest,
    LeftRequest,
    encode_message,
)
from deployments.channels.wire import CallAnswer, FrameDecoder
from migration.concurrency import Tasks, take_failure
from migration.protocol.errors import PeerLost, Refused, Stopping
from migration.protocol.request import StreamEvent
from policies.causes import Cause

_CONNECT_S = 3.0

_ANSWER_S = 10.0
"""The longest wait for the answer to a request that has been sent, in seconds."""

_FRAGMENT = 256 << 10
"""The size of the parts of a message, in bytes. The answers to pings go between two parts."""


class HandOverLink:
    """An open connection. `ended` is done at its end, with the reason; events go to `take` until then."""

    def __init__(self, name: str, connection: ClientConnection, take: Callable[[StreamEvent], None]) -> None:
        self.ended: asyncio.Future[PeerLost] = asyncio.get_running_loop().create_future()
        self._name = name
        self._connection = connection
        self._take = take
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[str]] = {}
        response = connection.response
        self._longest = int(response.headers.get(LONGEST_HEADER, 0)) if response is not None else 0
        self._tasks = Tasks()
        self._tasks.start(self._read())

    @classmethod
    async def open(cls, url: str, key: str | None, take: Callable[[StreamEvent], None]) -> Self:
        """Connect to the Mell at `url`.

        Raises:
            Stopping: it refuses.
            PeerLost: it does not answer.
        """
        headers = {PROTOCOL_HEADER: str(PROTOCOL)} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            connection = await connect(
                f"ws{url.removeprefix('http')}{HAND_OVER_REQUESTS}",
                additional_headers=headers,
                ssl=httpx.create_ssl_context() if url.startswith("https") else None,
                proxy=None if is_loopback(url) else True,
                compression=None,
                max_size=None,
                open_timeout=_CONNECT_S,
                ping_interval=PING_S,
                ping_timeout=SILENCE_S,
            )
        except InvalidStatus as error:
            raise Stopping(_refusal(error)) from None
        except (
            OSError,
            WebSocketException,
            ImportError,
        ) as error:  # a time-out is an OSError, a proxy may need a package
            raise PeerLost(f"{url}: {error or type(error).__name__}") from None
        return cls(url, connection, take)

    def number(self) -> int:
        """A number for a request."""
        return next(self._numbers)

    async def submit(self, request: HandedRequest) -> str:
        """Have a request run there. Returns the model that runs it.

        Raises:
            Refused: it does not run the request.
            Stopping: it takes no requests.
            PeerLost: the connection has ended, or no answer has come.
        """
        message = encode_message(request)
        if len(message) > self._longest:
            text = f"the request has {len(message)} bytes, and {self._name} takes {self._longest}"
            raise Refused(text, Cause.TOO_LONG)
        if self.ended.done():
            raise self.ended.result()
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(take_failure)
        self._answers[request.number] = answer
        try:
            await self._send(message)
            async with asyncio.timeout(_ANSWER_S):
                model = await answer
        except TimeoutError:
            raise PeerLost(f"{self._name} did not answer within {_ANSWER_S:.3g} s") from None
        finally:
            self._answers.pop(request.number, None)
        if self.ended.done():
            raise self.ended.result()
        return model

    def leave(self, number: int) -> None:
        """End a request there."""
        if not self.ended.done():
            self._tasks.start(self._send(encode_message(LeftRequest(number))))

    async def close(self) -> None:
        """End the connection, and all requests there."""
        await self._connection.close()

    async def _send(self, message: bytes) -> None:
        parts = [message[at : at + _FRAGMENT] for at in range(0, len(message), _FRAGMENT)]
        with contextlib.suppress(ConnectionClosed):  # `_read` notices it, too
            await self._connection.send(parts if len(parts) > 1 else message)

    async def _read(self) -> None:
        """Pass answers and events on, to the end of the connection."""
        decoder, loss = FrameDecoder(), PeerLost(f"{self._name} ended the connection")
        try:
            async for message in self._connection:
                for frame in decoder.feed(message if isinstance(message, bytes) else message.encode()):
                    for item in frame:
                        if isinstance(item, CallAnswer):
                            self._answered(item)
                        else:
                            self._take(item)
        except (ConnectionClosed, msgspec.DecodeError) as error:
            loss = PeerLost(f"{self._name}: {error}")
        except Exception as error:
            loss = PeerLost(f"{self._name}: {type(error).__name__}")
            raise
        finally:
            self.ended.set_result(loss)
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(loss)
            self._tasks.start(self.close())

    def _answered(self, answer: CallAnswer) -> None:
        waiting = self._answers.get(answer.number)
        if waiting is None or waiting.done():
            return
        if answer.failure is None:
            waiting.set_result(msgspec.msgpack.decode(answer.result, type=str))
        else:
            waiting.set_exception(answer.failure.refusal())


def _refusal(error: InvalidStatus) -> str:
    """The refusal of an upgrade."""
    status, text = error.response.status_code, None
    with contextlib.suppress(ValueError):
        text = message_in(msgspec.json.decode(bytes(error.response.body or b"")))
    return f"HTTP {status}, {text or httpx.codes.get_reason_phrase(status)}"
