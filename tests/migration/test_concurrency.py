"""Gathering: the order of results, and the first failure. Repetition: no failure ends it."""

import asyncio
import gc

import pytest

from migration.concurrency import PAUSE_S, Tasks, gather, repeat, settle, take_failure
from tests.virtual_time import now


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


async def test_task_is_kept_until_its_end() -> None:
    tasks, ended = Tasks(), asyncio.Event()

    async def work() -> None:
        await ended.wait()

    task = tasks.start(work())
    await asyncio.sleep(0)
    gc.collect(1)  # all that is young: the heap of a process with vLLM takes seconds
    assert tasks == {task}
    ended.set()
    await task
    await asyncio.sleep(0)
    assert not tasks


@pytest.mark.parametrize("take", [True, False])
async def test_a_failure_that_is_taken_is_not_logged(take: bool) -> None:
    logged = []

    async def fail() -> None:
        raise ValueError("broken")

    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context["exception"]))
    task = asyncio.create_task(fail())
    if take:
        task.add_done_callback(take_failure)
    await asyncio.wait([task])
    await asyncio.sleep(0)
    del task
    gc.collect(1)
    assert len(logged) == (not take)


async def test_the_failure_of_a_cancelled_task_is_none() -> None:
    task = asyncio.create_task(asyncio.sleep(1))
    task.cancel()
    await asyncio.wait([task])
    take_failure(task)


@pytest.mark.virtual_time
async def test_periodic_work_goes_on_after_failures_which_are_logged_once_in_a_row(
    caplog: pytest.LogCaptureFixture,
) -> None:
    began, times = now(), []

    async def work() -> None:
        times.append(round(now() - began, 3))
        if len(times) in (2, 3, 5):
            raise ValueError(f"turn {len(times)}")

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(repeat(work, 0.2), 3.5)
    at = [0.2, 0.4, 0.4 + PAUSE_S, 0.4 + 2 * PAUSE_S, 0.6 + 2 * PAUSE_S]
    assert times == pytest.approx(at)
    logged = [(each.getMessage(), bool(each.exc_info)) for each in caplog.records if each.args]
    assert [traced for _, traced in logged] == [True, False, True]
    assert all(f"turn {number}" in text for (text, _), number in zip(logged, (2, 3, 5), strict=True))
