"""Structured concurrency: nothing is left running."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")


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
