"""Orders of events that once leaked a slot, lost a move, or swallowed a cancellation."""

import asyncio
from typing import Any

import pytest

from migration.protocol.errors import TransferFailed
from policies.model import RequestId
from tests.deployments.replica.test_moves import Copying, loading
from tests.migration.world import make_pair, spec

pytestmark = pytest.mark.virtual_time
R = RequestId("r")


@pytest.mark.parametrize("turns", range(12))
async def test_a_push_that_fails_as_the_next_begins_leaks_no_slot(turns: int) -> None:
    pair, request = make_pair(), spec(prompt=60, tokens=600)
    await pair.until(pair.submit(request), 3)
    gather, calls = pair.a.engine.gather, 0

    async def late(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        for _ in range(turns if calls == 2 else 0):
            await asyncio.sleep(0)
        return await gather(*arguments)

    async def failing(*_: Any) -> None:
        raise TransferFailed("a test said so")

    pair.a.engine.gather = late  # type: ignore[assignment]
    pair.b.engine.put = failing  # type: ignore[assignment]
    pair.move(request.id)
    await pair.settled()
    assert pair.a.slots.in_use == 0


async def test_cancelled_loads_are_cancelled() -> None:
    pair = make_pair(transport=Copying(), lease_s=5.0)
    loads = await loading(pair)
    for load in loads:
        load.cancel()
    await asyncio.wait(loads)
    assert all(load.cancelled() for load in loads) and pair.b.slots.in_use == 0
