"""Garbage collections do not visit the objects that a process has made before it serves."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from deployments.processes.heap import THAW_S, YOUNG, YOUNG_IN_PERIODS, freeze_heap, keep_heap_frozen


@pytest.fixture(autouse=True)
def threshold() -> Iterator[None]:
    """That of other tests stays as it is."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_objects_of_an_engine_step_cause_no_collection() -> None:
    try:
        freeze_heap()
        before = gc.get_stats()[0]["collections"]
        step = [[number] for number in range(YOUNG // 2)]
        assert gc.get_stats()[0]["collections"] == before, len(step)
    finally:
        gc.unfreeze()


def test_garbage_in_cycles_is_kept_no_longer_than_by_default() -> None:
    young, *older = gc.get_threshold()
    by_default = young * (older[0] + 1) * (older[1] + 1)
    try:
        freeze_heap()
        young, *older = gc.get_threshold()
        assert young * (older[0] + 1) * (older[1] + 1) <= by_default
    finally:
        gc.unfreeze()


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


@pytest.mark.slow
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


@pytest.mark.virtual_time
async def test_objects_of_an_epoch_cause_no_collection_where_the_heap_is_kept_frozen() -> None:
    freezing = asyncio.create_task(keep_heap_frozen(1.0))
    try:
        await asyncio.sleep(1.5)
        before = gc.get_stats()[0]["collections"]
        epoch = [[number] for number in range(YOUNG_IN_PERIODS // 2)]
        assert gc.get_stats()[0]["collections"] == before, len(epoch)
        await asyncio.sleep(1.0)
        assert gc.get_stats()[2]["collections"] > 0 and gc.get_freeze_count() > len(epoch)
    finally:
        freezing.cancel()
        gc.unfreeze()
