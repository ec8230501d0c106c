"""The events of a replica for each ingress: one channel per pair, one batch per engine step.

A step of the engine yields a token for every running request. Sending each by itself would cost a message per token.
Instead, all events published before the next send travel as one batch.

The kernels of both ends keep megabytes for an ingress that stands still, so a send that is done shows nothing. The
ingress acknowledges what it has read (`acknowledged`). One that does not, or that leaves too much unsent, is given up.
"""

import asyncio
from collections.abc import AsyncGenerator

from deployments.channels.wire import ACKNOWLEDGE_S, Batch
from migration.protocol.ports import Clock
from migration.protocol.request import Delta, IngressId, StreamEvent

HEARTBEAT_S = 1.0
"""The longest time between two items of a living replica, in seconds."""

_LATE_S = HEARTBEAT_S + ACKNOWLEDGE_S
"""The longest time between two acknowledgments of an ingress that reads everything, in seconds."""

MOST_EVENTS = 100_000
MOST_BYTES = 1 << 30
"""The bounds on the events of an ingress that wait to be sent, and on what they hold beside tokens, in bytes."""


class Outbox:
    """Events for one ingress, kept until the ingress reads them, or is given up."""

    def __init__(self, now: float) -> None:
        self._events: list[StreamEvent] = []
        self._extra_bytes = 0
        self._wake = asyncio.Event()
        self._reader = 0
        self._closed = False
        self._renewed_s = now
        """The newest sign of a reader (clock seconds)."""
        self._read = False
        """True while it has a reader."""
        self.given_up = asyncio.Event()
        """Set once nothing more is sent."""

    def put(self, event: StreamEvent) -> None:
        """Publish an event."""
        if self.given_up.is_set():
            return
        self._events.append(event)
        if isinstance(event, Delta) and event.extras:
            self._extra_bytes += sum(len(rest) for _, rest in event.extras)
        if len(self._events) > MOST_EVENTS or self._extra_bytes > MOST_BYTES:
            self.give_up()
        self._wake.set()

    def close(self) -> None:
        """End the stream after the events so far."""
        self._closed = True
        self._wake.set()

    def give_up(self) -> None:
        """End the stream now, and drop the events."""
        self._events.clear()
        self.given_up.set()
        self.close()

    def renew(self, now: float) -> None:
        """The ingress has read what was sent, or wants to."""
        self._renewed_s = now

    def is_silent(self, limit: float) -> bool:
        """True if its ingress is given up, or has not read since the time `limit`."""
        return self.given_up.is_set() or self._renewed_s + (_LATE_S if self._read else 0.0) < limit

    async def read(self, clock: Clock) -> AsyncGenerator[Batch]:
        """All events so far, then those that follow, batch by batch. A new reader ends the previous one's stream.

        An empty first batch means that the reader is connected; a later empty batch is a heartbeat.
        """
        self._reader += 1
        reader, self._read = self._reader, True
        self.renew(clock())
        self._wake.set()
        try:
            yield ()
            while reader == self._reader:
                if self._events:
                    batch, self._events = tuple(self._events), []
                    self._extra_bytes = 0
                    yield batch
                elif self._closed:
                    return
                else:
                    await self._woken()
                    if reader == self._reader and not (self._events or self._closed):
                        yield ()
        finally:
            if reader == self._reader:
                self._read = False
                self.renew(clock())

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

    def acknowledged(self, ingress: IngressId) -> None:
        """An ingress has read what was sent."""
        self._box(ingress).renew(self._clock())

    def given_up(self, ingress: IngressId) -> asyncio.Event:
        """Set once nothing more is sent to an ingress."""
        return self._box(ingress).given_up

    def silent(self, longer_than_s: float) -> tuple[IngressId, ...]:
        """The ingresses that have not read for more than `longer_than_s` seconds, or have left too much unsent."""
        limit = self._clock() - longer_than_s
        return tuple(name for name, box in self._boxes.items() if box.is_silent(limit))

    def forget(self, ingress: IngressId) -> None:
        """Drop an ingress and its unread events."""
        if box := self._boxes.pop(ingress, None):
            box.give_up()

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
