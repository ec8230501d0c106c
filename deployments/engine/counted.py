"""A cached number of another process, read again when it may have changed."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger("ray.serve")


class CachedCount:
    """The newest value of a count, shared by concurrent readers."""

    def __init__(self, read: Callable[[], Awaitable[int]]) -> None:
        self._read = read
        self._value = 0
        self._reading: asyncio.Task[None] | None = None

    def refresh(self) -> None:
        """Read the count again, since it may have changed."""
        self._reading = asyncio.create_task(self._update())

    async def value(self) -> int:
        """The count after the newest refresh; the previous value if that failed.

        A cancelled caller does not cancel the read for others: awaiting a task would cancel it together with its
        awaiter, and raise `CancelledError` in all later awaiters. `asyncio.wait` does not.
        """
        if self._reading is not None:
            await asyncio.wait({self._reading})
        return self._value

    async def _update(self) -> None:
        try:
            self._value = await self._read()
        except Exception as error:
            log.warning("the number of loaded KV blocks could not be read: %r", error)
