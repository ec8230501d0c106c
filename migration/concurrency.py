"""Structured concurrency: the first failure cancels the rest, and nothing is left running."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")


async def gather(works: Sequence[Coroutine[Any, Any, Item]]) -> list[Item]:
    """The results of all coroutines, in order. Raises the first failure, once the others have ended."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def _end(tasks: Sequence["asyncio.Future[Any]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
