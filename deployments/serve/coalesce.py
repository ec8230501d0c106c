"""Coalescing of calls: items that arrive while a call is under way travel together in the next one.

A single item is sent at once; under load the calls grow larger instead of more numerous.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

from migration.concurrency import Tasks

Item = TypeVar("Item")
Result = TypeVar("Result")


class Coalescer(Generic[Item, Result]):
    """Wraps a call with many items, which returns one result or exception per item, in the items' order.

    Items travel with others of the same `lane` only, and wait for no call of another lane.
    """

    def __init__(
        self,
        call: Callable[[tuple[Item, ...]], Awaitable[Sequence[Result | Exception]]],
        lane: Callable[[Item], Hashable] = lambda item: None,
    ) -> None:
        self._call = call
        self._lane = lane
        self._waiting: dict[Hashable, list[tuple[Item, asyncio.Future[Result]]]] = {}
        """The items behind each call under way, by lane."""
        self._workers = Tasks()

    async def __call__(self, item: Item) -> Result:
        """The item's result. Raises the exception of the item, or of the whole call, CancelledError included."""
        lane = self._lane(item)
        if lane not in self._waiting:
            return await self._alone(lane, item)
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting[lane].append((item, future))
        return await future

    async def _alone(self, lane: Hashable, item: Item) -> Result:
        """Make a call of one item, before the event loop goes on to others."""
        self._waiting[lane] = []
        try:
            (result,) = await self._call((item,))
        finally:
            if self._waiting[lane]:
                self._workers.start(self._work(lane))
            else:
                del self._waiting[lane]
        if isinstance(result, Exception):
            raise result
        return result

    async def _work(self, lane: Hashable) -> None:
        while batch := self._waiting[lane]:
            self._waiting[lane] = []
            results: Sequence[Result | Exception]
            try:
                results = await self._call(tuple(item for item, _ in batch))
                if len(results) != len(batch):
                    raise RuntimeError(f"{len(results)} results for {len(batch)} items")
            except Exception as error:
                results = [error] * len(batch)
            except BaseException:
                for _, future in batch + self._waiting.pop(lane):
                    future.cancel()
                raise
            for (_, future), result in zip(batch, results, strict=True):
                _settle(future, result)
        del self._waiting[lane]


def _settle(future: "asyncio.Future[Result]", result: Result | Exception) -> None:
    if future.done():
        return  # the caller was cancelled
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
