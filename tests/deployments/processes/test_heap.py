"""What a process has made before it serves is not looked at by garbage collections."""

import gc

from deployments.processes.heap import freeze_heap


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
