"""The activities of a session's shell, one at a time, and the one queue of events that they share with the world."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from migration.protocol.errors import MigrationError
from policies.causes import Cause

Event = TypeVar("Event")


@dataclass(frozen=True, slots=True)
class ActivityFailure:
    """The reason of an activity's end without success. One of `copying` blocks need not be one of the whole session."""

    cause: Cause
    text: str
    copying: bool = False

    @classmethod
    def of(cls, error: Exception, copying: bool = False) -> Self:
        """The failure by an error of a peer, an engine or a transport, or by a defect."""
        cause = error.cause if isinstance(error, MigrationError) else Cause.UNEXPECTED
        return cls(cause, str(error) or repr(error), copying)


class Activities(Generic[Event]):
    """Runs activities, and passes on their events, and those of the world, in the order in which they happen.

    The event of an activity that has been stopped counts no more.
    """

    def __init__(self) -> None:
        self._events: asyncio.Queue[tuple[int, Event, ActivityFailure | None]] = asyncio.Queue()
        self._number = 0
        self._running: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        """Activities that have been cancelled, and may still use slots."""

    def post(self, event: Event) -> None:
        """Something happened in the world."""
        self._events.put_nowait((0, event, None))

    def start(self, activity: Callable[[], Awaitable[tuple[Event, ActivityFailure | None]]]) -> None:
        """Run an activity in place of the former one. Its result is its event, and the reason if it failed."""
        self.stop()
        self._running = asyncio.create_task(self._run(self._number, activity))

    async def _run(self, number: int, activity: Callable[[], Awaitable[tuple[Event, ActivityFailure | None]]]) -> None:
        self._events.put_nowait((number, *await activity()))

    def stop(self) -> None:
        """End the activity that runs."""
        self._number += 1
        if self._running is not None and not self._running.done():
            self._running.cancel()
            self._ending.add(self._running)
            self._running.add_done_callback(self._ending.discard)
        self._running = None

    async def stopped(self) -> None:
        """Wait until no stopped activity uses anything any more."""
        if self._ending:
            await asyncio.wait(self._ending)

    async def next_event(self) -> tuple[Event, ActivityFailure | None]:
        """Wait for the next event that counts."""
        while True:
            number, event, failure = await self._events.get()
            if number in (0, self._number):
                return event, failure
