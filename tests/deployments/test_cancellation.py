"""Who is cancelled, and who only hears of it."""

import asyncio

import pytest

from deployments.cancellation import CalleeCancelled, callee_cancelled
from deployments.engine.counted import Counted
from deployments.routing import _peer_errors
from migration.errors import PeerLost
from policies.model import ReplicaId


async def test_a_callee_that_is_cancelled_does_not_cancel_its_caller() -> None:
    with pytest.raises(CalleeCancelled), callee_cancelled():
        raise asyncio.CancelledError
    with pytest.raises(PeerLost), _peer_errors(ReplicaId("a")):
        raise asyncio.CancelledError


async def test_who_is_cancelled_stays_cancelled() -> None:
    async def call() -> None:
        with _peer_errors(ReplicaId("a")):
            await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_timeout_within_stays_a_timeout() -> None:
    with pytest.raises(TimeoutError), callee_cancelled():
        async with asyncio.timeout(0):
            await asyncio.Event().wait()


async def test_a_timeout_around_stays_a_timeout() -> None:
    async def call() -> None:
        with callee_cancelled():
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(call(), 0.001)


class Question:
    """Asked for a number; answers when told to."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def __call__(self) -> int:
        return await self.answer


async def test_a_number_outlives_who_gave_up_waiting_for_it() -> None:
    question = Question()
    counted = Counted(question)
    assert await counted.value() == 0
    counted.refresh()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await counted.value()
    question.answer.set_result(7)
    assert await counted.value() == 7


async def test_a_number_that_cannot_be_had_stays_what_it_was() -> None:
    question = Question()
    counted = Counted(question)
    counted.refresh()
    question.answer.set_exception(ConnectionError("the engine died"))
    assert await counted.value() == 0
