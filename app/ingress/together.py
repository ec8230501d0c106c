"""Several waits as one: the first that fails ends all, and none is left behind."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")


async def together(works: Sequence[Coroutine[Any, Any, Item]]) -> list[Item]:
    """What all of them return, in their order. Raises what the first to fail raised, once the others have ended."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def merged(sources: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """The items of all of them as they come, each source's in its order; it is asked for the next one after its last.

    Raises what the first to fail raised. All are closed in the end.
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
