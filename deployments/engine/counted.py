"""A number that another process keeps, asked for when it may have changed."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger("ray.serve")


class Counted:
    """The newest answer to a question that many wait for."""

    def __init__(self, ask: Callable[[], Awaitable[int]]) -> None:
        self._ask = ask
        self._value = 0
        self._asking: asyncio.Task[None] | None = None

    def refresh(self) -> None:
        """The number may have changed: ask for it."""
        self._asking = asyncio.create_task(self._update())

    async def value(self) -> int:
        """The number, once the question that was asked last has an answer; the old one if it had none.

        Who gives up waiting does not end the question for the others: a task that is awaited is cancelled with whoever
        awaits it, and raises `CancelledError` to all who come later. `asyncio.wait` leaves it alone.
        """
        if self._asking is not None:
            await asyncio.wait({self._asking})
        return self._value

    async def _update(self) -> None:
        try:
            self._value = await self._ask()
        except Exception as error:
            log.warning("a count could not be had: %r", error)
