"""Garbage collections do not visit the objects that a process has made before it serves."""

import asyncio
import gc
import weakref

import pytest

from deployments.processes.heap import THAW_S, freeze_heap, keep_heap_frozen


def test_present_objects_are_frozen_and_later_ones_collected() -> None:
    there = [[]]  # type: ignore[var-annotated]
    try:
        freeze_heap()
        come = [[]]  # type: ignore[var-annotated]
        collected = {id(thing) for thing in gc.get_objects()}
    finally:
        gc.unfreeze()
    assert id(come) in collected
    assert id(there) not in collected


class Cycle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.virtual_time
async def test_a_heap_that_is_kept_frozen_is_collected_as_a_whole_now_and_then() -> None:
    cycle = Cycle()
    seen = weakref.ref(cycle)
    freezing = asyncio.create_task(keep_heap_frozen(THAW_S / 4))
    try:
        await asyncio.sleep(THAW_S / 4 + 1.0)
        del cycle
        await asyncio.sleep(THAW_S / 4)
        assert seen() is not None, "frozen"
        await asyncio.sleep(THAW_S)
        assert seen() is None
    finally:
        freezing.cancel()
        gc.unfreeze()
