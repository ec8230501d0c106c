"""The server as chaos and soak see it, and one stream of it taken down."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from app.client.api import ApiClient
from app.client.errors import ClientError, ErrorAnswer
from app.client.sse import Event
from benchmarks.chaos.heard import Heard
from benchmarks.chaos.offers import Offer
from benchmarks.servers import MODEL

CONTROL_S = 20.0
"""An order may be repeated inside for 12 s while the scheduler is being replaced."""


class Server(Protocol):
    """One server. Every call raises ClientError."""

    def stream(self, body: Mapping[str, Any], label: str) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """One streamed completion; the iterator raises ClientError unless the stream ends with `[DONE]`."""

    async def state(self) -> dict[str, Any]:
        """The document at `/mell/state`."""

    async def migrations(self) -> list[dict[str, Any]]:
        """The records at `/mell/migrations`, newest first."""

    async def move(self, request: str, path: str, target: str | None = None) -> str:
        """Order a migration; its id."""

    async def drain(self, replica: str) -> dict[str, Any]:
        """Order that a replica be emptied and stopped."""


def connect(url: str) -> ApiClient:
    """A client whose streams may be silent for as long as they like: judging that is not the client's part."""
    return ApiClient(url, timeout_s=CONTROL_S)


async def listen(server: Server, offer: Offer, heard: Heard) -> None:
    """Fill `heard` from a streamed answer, until it ends in whatever way."""
    loop = asyncio.get_running_loop()
    heard.sent_s = loop.time()
    try:
        async with server.stream(offer.body(MODEL), offer.label) as events:
            async for event in events:
                heard.take(event)
        heard.done = True
    except ErrorAnswer as error:
        heard.fail(error.document["error"])
        heard.done = True
    except (ClientError, ValueError, KeyError) as error:
        heard.broken = f"{type(error).__name__}: {error}"
    finally:
        heard.ended_s = loop.time()
