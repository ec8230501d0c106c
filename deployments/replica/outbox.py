"""The events of a replica for each ingress: one channel per pair, one batch per engine step.

A step of the engine yields a token for every running request. Sending each by itself would cost a message per token.
Instead, all events published before the next send travel as one batch.
"""

import asyncio
from collections.abc import AsyncGenerator

from deployments.channels.wire import Batch
from migration.protocol.ports import Clock
from migration.protocol.request import IngressId, StreamEvent

HEARTBEAT_S = 1.0
"""The longest time between two items of a living replica, in seconds."""


class Outbox:
    """Events for one ingress, kept until the ingress reads them."""

    def __init__(self, now: float) -> None:
        self._events: list[StreamEvent] = []
        self._wake = asyncio.Event()
        self._reader = 0
        self._closed = False
        self.silent_since: float | None = now
        """The time since which the outbox has no reader (clock seconds); None while it has one."""

    def put(self, event: StreamEvent) -> None:
        """Publish an event."""
        self._events.append(event)
        self._wake.set()

    def close(self) -> None:
        """End the stream after the events so far."""
        self._closed = True
        self._wake.set()

    async def read(self, clock: Clock) -> AsyncGenerator[Batch]:
        """All events so far, then those that follow, batch by batch. A new reader ends the previous one's stream.

        An empty first batch means that the reader is connected; a later empty batch is a heartbeat.
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
                    await self._woken()
                    if reader == self._reader and not (self._events or self._closed):
                        yield ()
        finally:
            if reader == self._reader:
                self.silent_since = clock()

    async def _woken(self) -> None:
        """Wait for an event, another reader or the end, for `HEARTBEAT_S` at most."""
        self._wake.clear()
        heartbeat = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            heartbeat.cancel()


class Outboxes:
    """One outbox per ingress."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._boxes: dict[IngressId, Outbox] = {}
        self._closed = False

    def put(self, ingress: IngressId, event: StreamEvent) -> None:
        """Publish an event to an ingress, which need not read yet."""
        self._box(ingress).put(event)

    def read(self, ingress: IngressId) -> AsyncGenerator[Batch]:
        """See `Outbox.read`."""
        return self._box(ingress).read(self._clock)

    def silent(self, longer_than_s: float) -> tuple[IngressId, ...]:
        """The ingresses that have not read for more than `longer_than_s` seconds."""
        limit = self._clock() - longer_than_s
        return tuple(
            name for name, box in self._boxes.items() if box.silent_since is not None and box.silent_since < limit
        )

    def forget(self, ingress: IngressId) -> None:
        """Drop an ingress and its unread events."""
        if box := self._boxes.pop(ingress, None):
            box.close()

    def close(self) -> None:
        """End all streams after their events so far."""
        self._closed = True
        for box in self._boxes.values():
            box.close()

    def _box(self, ingress: IngressId) -> Outbox:
        if ingress not in self._boxes:
            self._boxes[ingress] = Outbox(self._clock())
            if self._closed:
                self._boxes[ingress].close()
        return self._boxes[ingress]
