"""Cancellation of a task itself, and of the callee that it waits for."""

import asyncio

import pytest

from deployments.serve.cancellation import CalleeCancelled, callee_cancelled
from deployments.serve.routing import _peer_errors
from migration.protocol.errors import PeerLost
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
