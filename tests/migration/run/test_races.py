"""Orders of events that once leaked a slot, lost a move, or swallowed a cancellation."""

import asyncio
from typing import Any

import pytest

from migration.errors import TransferFailed
from migration.protocol.cursor import Cursor
from migration.protocol.request import Delta, Moved
from policies.model import RequestId
from tests.deployments.test_moves import Copying, loading
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
    pair.b.engine.load = failing  # type: ignore[assignment]
    pair.move(request.id)
    await pair.settled()
    assert pair.a.slots.in_use == 0


def test_second_move_that_is_read_before_the_first_is_followed() -> None:
    cursor = Cursor()
    cursor.moved(Moved(R, 1, 2, 0, "c"))
    cursor.feed(Delta(R, 2, 0, (7,)))
    cursor.moved(Moved(R, 0, 1, 0, "b"))
    assert (cursor.hop, cursor.target) == (2, "c")


def test_tokens_under_the_newest_hop_are_kept_for_it() -> None:
    cursor = Cursor()
    cursor.feed(Delta(R, 2, 0, (7,)))
    cursor.moved(Moved(R, 1, 2, 0, "c"))
    cursor.moved(Moved(R, 0, 1, 0, "b"))
    assert cursor.tokens == [7]


async def test_cancelled_receive_is_cancelled() -> None:
    pair = make_pair(transport=Copying(), lease_s=5.0)
    loads = await loading(pair)
    loads[1].cancel()
    await asyncio.wait(loads)
    assert loads[1].cancelled()
