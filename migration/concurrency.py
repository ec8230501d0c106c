"""Structured concurrency: the first failure cancels the rest, and nothing is left running."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
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


async def merge(sources: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """The items of all sources as they arrive, in each source's order. All sources are closed in the end.

    A source generates its next item only after its previous one was taken. Raises the first failure.
    """
    pulls = {asyncio.ensure_future(anext(source)): source for source in sources}
    try:
        while pulls:
            await asyncio.wait(pulls, return_when=asyncio.FIRST_COMPLETED)
            for pull in [pull for pull in pulls if pull.done()]:
                source = pulls[pull]
                try:
                    yield pull.result()
                except StopAsyncIteration:
                    del pulls[pull]
                    continue
                del pulls[pull]
                pulls[asyncio.ensure_future(anext(source))] = source
    finally:
        await _end(list(pulls))
        for source in sources:
            await source.aclose()


async def _end(tasks: Sequence["asyncio.Future[Any]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
