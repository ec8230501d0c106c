"""The loop that refreshes what an ingress knows: it outlives any failure, and logs one line per row of failures."""

import asyncio
import logging

import pytest

from app.service.deployment import repeat

pytestmark = pytest.mark.virtual_time


async def test_refreshing_goes_on_after_failures_and_the_first_of_a_row_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR, "ray.serve")
    fails = [True, True, False, True, False]
    left = fails.copy()

    async def refresh() -> None:
        if left and left.pop(0):
            raise KeyError("broken")

    task = asyncio.create_task(repeat(refresh, 1.0))
    await asyncio.sleep(len(fails) + 0.5)
    assert not left and not task.done()
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 2
    task.cancel()
