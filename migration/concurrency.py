"""Structured concurrency: nothing is left running, and what shall run for ever does."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")

log = logging.getLogger("ray.serve")

PAUSE_S = 1.0
"""The least time between a failure of periodic work and its next turn, in seconds."""


async def gather(works: Sequence[Coroutine[Any, Any, Item]]) -> list[Item]:
    """The results of all coroutines, in order. Raises the first failure, once the others have been ended by it."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def settle(works: Sequence[Coroutine[Any, Any, Item]], within_s: float) -> list[Item | BaseException]:
    """The results of all coroutines, in order, or their exceptions; TimeoutError after `within_s` seconds."""

    async def limited(work: Coroutine[Any, Any, Item]) -> Item:
        async with asyncio.timeout(within_s):
            return await work

    return await asyncio.gather(*map(limited, works), return_exceptions=True)


async def _end(tasks: Sequence["asyncio.Future[Any]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Tasks(set[asyncio.Task[None]]):
    """Tasks in the background. Each is in the set until its end: asyncio itself does not keep a task that runs."""

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run `work`."""
        task = asyncio.create_task(work)
        self.add(task)
        task.add_done_callback(self.discard)
        return task


def take_failure(task: "asyncio.Future[Any]") -> None:
    """Read the exception of an ended task that nobody may wait for, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


async def repeat(work: Callable[[], Awaitable[object]], period_s: float) -> None:
    """Do `work` for ever, `period_s` seconds after its last end.

    A failure ends one turn only. It is logged with its traceback, if the turn before did not fail: failures in a row
    are mostly one.
    """
    pause_s, failed = period_s, False
    while True:
        await asyncio.sleep(pause_s)
        try:
            await work()
        except Exception as error:
            name = getattr(work, "__qualname__", repr(work))
            log.error("%s failed, and is tried again: %r", name, error, exc_info=not failed)
            pause_s, failed = max(period_s, PAUSE_S), True
        else:
            pause_s, failed = period_s, False
