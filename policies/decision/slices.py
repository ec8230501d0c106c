"""The slices of an epoch's decision: parts of its work, between which arrivals are placed."""

from collections.abc import Generator, Iterator, Sequence
from typing import TypeVar

SLICE = 2048
"""The number of new sizes between two pauses, half a millisecond to one of work. Other changes count as `WEIGHT`."""

WEIGHT = 8
"""The work of a change of a request or of a replica, in new sizes."""

T = TypeVar("T")


def in_slices(changes: Sequence[T]) -> Iterator[Sequence[T]]:
    """Parts of these changes, each for the work between two pauses."""
    size = max(1, SLICE // WEIGHT)
    return (changes[first : first + size] for first in range(0, len(changes), size))


def finish(slices: Generator[None, None, T]) -> T:
    """Run a generator to its end, without pauses, and return its result."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: T = end.value
            return result
