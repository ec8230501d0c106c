"""Coalescing of calls: items that arrive while a call is under way travel together in the next one.

A single item is sent at once; under load the calls grow larger instead of more numerous.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Coalescer(Generic[Item, Result]):
    """Wraps a call with many items, which returns one result or exception per item, in the items' order."""

    def __init__(self, call: Callable[[tuple[Item, ...]], Awaitable[Sequence[Result | Exception]]]) -> None:
        self._call = call
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._under_way = False
        self._worker: asyncio.Task[None] | None = None

    async def __call__(self, item: Item) -> Result:
        """The item's result. Raises the item's exception, or that of the whole call."""
        if not self._under_way:
            return await self._alone(item)
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        return await future

    async def _alone(self, item: Item) -> Result:
        """Make a call of one item, before the event loop goes on to others."""
        self._under_way = True
        try:
            (result,) = await self._call((item,))
        finally:
            if self._waiting:
                self._worker = asyncio.create_task(self._work())
            else:
                self._under_way = False
        if isinstance(result, Exception):
            raise result
        return result

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                results = await self._call(tuple(item for item, _ in batch))
            except Exception as error:
                results = [error] * len(batch)
            for (_, future), result in zip(batch, results, strict=True):
                _settle(future, result)
        self._under_way = False


def _settle(future: "asyncio.Future[Result]", result: Result | Exception) -> None:
    if future.done():
        return  # the caller was cancelled
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
