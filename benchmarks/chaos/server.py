"""The server as a port, and the reading of one stream."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from app.client.api import ApiClient
from app.client.errors import ClientError, ErrorAnswer
from app.client.sse import Event
from benchmarks.chaos.answers import StreamedAnswer
from benchmarks.chaos.offers import Offer
from benchmarks.servers import MODEL

CONTROL_S = 20.0
"""Time limit of orders: the ingress repeats one for up to 12 s while the scheduler is being replaced."""


class Server(Protocol):
    """A Mell server. Every call may raise ClientError."""

    def stream(self, body: Mapping[str, Any], label: str) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """One streamed completion; the iterator raises ClientError unless the stream ends with `[DONE]`."""

    async def state(self) -> dict[str, Any]:
        """The document at `/mell/state`."""

    async def migrations(self) -> list[dict[str, Any]]:
        """The records at `/mell/migrations`, newest first."""

    async def move(self, request: str, path: str, target: str | None = None) -> str:
        """Order a migration; its id."""

    async def drain(self, replica: str) -> dict[str, Any]:
        """Order the evacuation and stop of a replica."""


def connect(url: str) -> ApiClient:
    """A client without a time limit on silent streams, which the run judges itself."""
    return ApiClient(url, timeout_s=CONTROL_S)


async def read_answer(server: Server, offer: Offer, answer: StreamedAnswer) -> None:
    """Read the answer to `offer` into `answer`, until it ends in any way."""
    loop = asyncio.get_running_loop()
    answer.sent_s = loop.time()
    try:
        async with server.stream(offer.body(MODEL), offer.label) as events:
            async for event in events:
                answer.take(event)
        answer.done = True
    except ErrorAnswer as error:
        answer.fail(error.document["error"])
        answer.done = True
    except (ClientError, ValueError, KeyError) as error:
        answer.broken = f"{type(error).__name__}: {error}"
    finally:
        answer.ended_s = loop.time()
