"""Calls that come together travel together, and each gets its own result."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from deployments.serve.coalesce import Coalescer

pytestmark = pytest.mark.virtual_time


class Doubling:
    """Doubles numbers, many at a time; negative ones are errors. `gate` holds calls back."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, items: tuple[int, ...]) -> Sequence[int | Exception]:
        self.calls.append(items)
        await self.gate.wait()
        return [2 * item if item >= 0 else ValueError(f"{item} is negative") for item in items]


async def test_one_item_is_one_call() -> None:
    doubling = Doubling()
    assert await Coalescer(doubling)(4) == 8
    assert doubling.calls == [(4,)]


async def test_an_item_with_no_call_before_it_travels_before_the_event_loop_goes_on() -> None:
    doubling = Doubling()
    double: Coalescer[int, int] = Coalescer(doubling)
    asked = asyncio.create_task(double(1))
    asyncio.get_running_loop().call_soon(doubling.calls.append, ())
    assert await asked == 2
    assert doubling.calls == [(1,), ()]


async def test_the_items_behind_a_call_that_fails_travel() -> None:
    doubling = Doubling()
    doubling.gate.clear()
    asyncio.get_running_loop().call_later(0.01, doubling.gate.set)
    double: Coalescer[int, int] = Coalescer(doubling)
    answers = await asyncio.gather(*(double(item) for item in (-1, 2, -3)), double(4), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["-1 is negative", "4", "-3 is negative", "8"]
    assert doubling.calls == [(-1,), (2, -3, 4)]
    assert await double(5) == 10 and doubling.calls[-1] == (5,)


async def test_items_that_come_during_a_call_share_the_next() -> None:
    doubling = Doubling()
    doubling.gate.clear()
    double: Coalescer[int, int] = Coalescer(doubling)
    first = asyncio.create_task(double(1))
    await asyncio.sleep(0.01)
    rest = [asyncio.create_task(double(i)) for i in (2, 3, 4)]
    await asyncio.sleep(0.01)
    doubling.gate.set()
    assert await asyncio.gather(first, *rest) == [2, 4, 6, 8]
    assert doubling.calls == [(1,), (2, 3, 4)]


async def test_an_item_fails_alone() -> None:
    double: Coalescer[int, int] = Coalescer(Doubling())
    good, bad = await asyncio.gather(double(1), double(-1), return_exceptions=True)
    assert good == 2
    assert isinstance(bad, ValueError)


async def test_a_call_that_fails_fails_its_items_and_no_others() -> None:
    failures = iter([True, False])

    async def call(items: tuple[int, ...]) -> Sequence[int | Exception]:
        if next(failures):
            raise ConnectionError("gone")
        return list(items)

    echo: Coalescer[int, int] = Coalescer(call)
    with pytest.raises(ConnectionError):
        await echo(1)
    assert await echo(2) == 2


async def test_a_cancelled_caller_disturbs_no_other() -> None:
    doubling = Doubling()
    doubling.gate.clear()
    double: Coalescer[int, int] = Coalescer(doubling)
    gone, stays = asyncio.create_task(double(1)), asyncio.create_task(double(2))
    await asyncio.sleep(0.01)
    gone.cancel()
    doubling.gate.set()
    assert await stays == 4
    assert await double(3) == 6


async def test_a_cancelled_call_cancels_its_callers_and_no_later_ones() -> None:
    doubling = Doubling()
    doubling.gate.clear()
    double: Coalescer[int, int] = Coalescer(cancelled_at(3, doubling))
    asked = [asyncio.create_task(double(item)) for item in (1, 2, 3)]
    await asyncio.sleep(0.01)
    doubling.gate.set()
    answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 1)
    assert answers[0] == 2 and all(isinstance(answer, asyncio.CancelledError) for answer in answers[1:])
    assert await asyncio.wait_for(double(4), 1) == 8


def cancelled_at(stop: int, call: Doubling) -> Callable[[tuple[int, ...]], Awaitable[Sequence[int | Exception]]]:
    """As `call`, but what it waits for is cancelled if `stop` is among the items."""

    async def made(items: tuple[int, ...]) -> Sequence[int | Exception]:
        if stop in items:
            raise asyncio.CancelledError
        return await call(items)

    return made


async def test_items_of_one_lane_wait_for_no_call_of_another() -> None:
    doubling = Doubling()
    doubling.gate.clear()
    double: Coalescer[int, int] = Coalescer(doubling, lambda item: item % 2)
    odd = [asyncio.create_task(double(item)) for item in (1, 3, 5)]
    await asyncio.sleep(0.01)
    even = asyncio.create_task(double(2))
    await asyncio.sleep(0.01)
    doubling.gate.set()
    assert await asyncio.gather(even, *odd) == [4, 2, 6, 10]
    assert doubling.calls == [(1,), (2,), (3, 5)]


async def test_a_call_without_all_results_fails_its_items_and_no_later_ones() -> None:
    results = iter([[1], [], [3]])

    async def call(items: tuple[int, ...]) -> Sequence[int | Exception]:
        await asyncio.sleep(0.01)
        return next(results)

    short: Coalescer[int, int] = Coalescer(call)
    first, second = await asyncio.gather(short(1), short(2), return_exceptions=True)
    assert first == 1 and isinstance(second, RuntimeError)
    assert await short(3) == 3
