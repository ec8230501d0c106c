"""Gathering and merging, for every order of ends and failures."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from migration.concurrency import gather, merge


class Source:
    """Yields the items passed to `give`; an exception is raised, and None ends the source."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[int | Exception | None] = asyncio.Queue()
        self.closed = False

    def give(self, *items: int | Exception | None) -> None:
        for item in items:
            self.queue.put_nowait(item)

    async def read(self) -> AsyncGenerator[int, None]:
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed = True


async def test_items_are_merged_as_they_arrive() -> None:
    a, b = Source(), Source()
    items = merge([a.read(), b.read()])
    b.give(1)
    assert await anext(items) == 1
    a.give(2)
    assert await anext(items) == 2
    b.give(3, None)
    assert await anext(items) == 3
    a.give(4, None)
    assert [item async for item in items] == [4]
    assert a.closed and b.closed


async def test_each_source_keeps_its_order() -> None:
    sources = [Source() for _ in range(5)]
    for number, source in enumerate(sources):
        source.give(*(100 * number + n for n in range(10)), None)
    items = [item async for item in merge([source.read() for source in sources])]
    assert len(items) == 50
    for number in range(5):
        assert [n for n in items if n // 100 == number] == [100 * number + n for n in range(10)]


async def test_the_first_failure_closes_all_sources() -> None:
    a, b = Source(), Source()
    items = merge([a.read(), b.read()])
    a.give(1, ValueError("broken"))
    assert await anext(items) == 1
    with pytest.raises(ValueError, match="broken"):
        await anext(items)
    assert a.closed and b.closed


@pytest.mark.parametrize("begun", [False, True])
async def test_closing_a_merge_closes_its_sources(begun: bool) -> None:
    a, b = Source(), Source()
    items = merge([a.read(), b.read()])
    a.give(1)
    await anext(items)
    if begun:
        waiting = asyncio.ensure_future(anext(items))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
    else:
        await items.aclose()
    assert a.closed and b.closed and len(asyncio.all_tasks()) == 1


async def test_results_are_in_order() -> None:
    first = asyncio.Event()

    async def late() -> int:
        await first.wait()
        return 1

    async def early() -> int:
        first.set()
        return 2

    assert await gather([late(), early()]) == [1, 2]


async def test_a_failure_ends_the_others_before_it_is_raised() -> None:
    ended = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await gather([forever(), fail()])
    assert ended == [True] and len(asyncio.all_tasks()) == 1
