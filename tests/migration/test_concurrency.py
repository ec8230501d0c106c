"""Gathering: the order of results, and the first failure."""

import asyncio

import pytest

from migration.concurrency import gather, settle


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


async def test_settle_waits_for_all_and_has_their_results_and_exceptions() -> None:
    async def work(answer: str) -> str:
        if answer == "slow":
            await asyncio.Event().wait()
        if answer == "bad":
            raise ValueError(answer)
        return answer

    first, second, third = await settle([work("bad"), work("slow"), work("good")], 0.05)
    assert isinstance(first, ValueError) and isinstance(second, TimeoutError) and third == "good"
