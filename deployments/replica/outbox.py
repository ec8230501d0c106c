"""What a replica has to tell each ingress: one stream per pair, one item per engine step.

A step of the engine gives a token to every running request. Sending each on its own would cost a message per
token; here everything that is published before the stream is next polled travels as one item.
"""

import asyncio
from collections.abc import AsyncIterator

from deployments.api.calls import Batch
from migration.protocol.ports import Clock
from migration.protocol.request import IngressId, StreamEvent

HEARTBEAT_S = 1.0
"""The longest that a living replica leaves a reader without a word."""


class Outbox:
    """Events for one ingress, kept until it reads them."""

    def __init__(self, now: float) -> None:
        self._events: list[StreamEvent] = []
        self._wake = asyncio.Event()
        self._reader = 0
        self._closed = False
        self.silent_since: float | None = now
        """Since when nobody reads (clock seconds); None while somebody does."""

    def put(self, event: StreamEvent) -> None:
        """Publish an event."""
        self._events.append(event)
        self._wake.set()

    def close(self) -> None:
        """End the stream once everything is read."""
        self._closed = True
        self._wake.set()

    async def read(self, clock: Clock) -> AsyncIterator[Batch]:
        """All events so far, then those that follow, batch by batch. A new reader ends the one before.

        An empty first batch tells the reader that it is connected, an empty later one that the replica is alive.
        """
        self._reader += 1
        reader, self.silent_since = self._reader, None
        self._wake.set()
        try:
            yield ()
            while reader == self._reader:
                if self._events:
                    batch, self._events = tuple(self._events), []
                    yield batch
                elif self._closed:
                    return
                else:
                    self._wake.clear()
                    if not await self._woken():
                        yield ()
        finally:
            if reader == self._reader:
                self.silent_since = clock()

    async def _woken(self) -> bool:
        """Wait for something to tell; False if there is nothing for as long as a reader may be left without a word."""
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True


class Outboxes:
    """One outbox per ingress."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._boxes: dict[IngressId, Outbox] = {}
        self._closed = False

    def put(self, ingress: IngressId, event: StreamEvent) -> None:
        """Publish an event to an ingress, whether it reads already or not."""
        self._box(ingress).put(event)

    async def read(self, ingress: IngressId) -> AsyncIterator[Batch]:
        """See `Outbox.read`."""
        async for batch in self._box(ingress).read(self._clock):
            yield batch

    def silent(self, longer_than_s: float) -> tuple[IngressId, ...]:
        """The ingresses that have not read for that long."""
        limit = self._clock() - longer_than_s
        return tuple(
            name for name, box in self._boxes.items() if box.silent_since is not None and box.silent_since < limit
        )

    def forget(self, ingress: IngressId) -> None:
        """Drop an ingress and what it has not read."""
        if box := self._boxes.pop(ingress, None):
            box.close()

    def close(self) -> None:
        """End all streams once they are read."""
        self._closed = True
        for box in self._boxes.values():
            box.close()

    def _box(self, ingress: IngressId) -> Outbox:
        if ingress not in self._boxes:
            self._boxes[ingress] = Outbox(self._clock())
            if self._closed:
                self._boxes[ingress].close()
        return self._boxes[ingress]
