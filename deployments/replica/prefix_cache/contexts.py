"""The contexts that a replica remembers: their blocks may be in its prefix cache, and only tokens find them there."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from migration.protocol.ports import Clock
from migration.protocol.request import RequestSpec

BYTES_PER_TOKEN = 16
"""The memory for contexts, in bytes for each token of the engine's KV cache and of its tier of host memory.

A token takes up to five bytes in a request, and four as output. Each turn of a conversation repeats the ones before.
"""
_OVERHEAD = 1024
"""The memory of a context beside its tokens, in bytes."""


@dataclass(frozen=True, slots=True)
class PastContext:
    """The tokens of an ended request: those of its prompt in its body, and those of its output. It ended at `at`."""

    number: int
    spec: RequestSpec
    outputs: "array[int]"
    at: float

    @property
    def size(self) -> int:
        """Its memory in bytes."""
        return sum(map(len, self.spec.body)) + len(self.outputs) * self.outputs.itemsize + _OVERHEAD


class PastContexts:
    """The newest contexts, as far as they fit into `most_bytes`, which may change; 0: none."""

    def __init__(self, most_bytes: Callable[[], int], clock: Clock) -> None:
        self._most_bytes = most_bytes
        self._clock = clock
        self._contexts: OrderedDict[int, PastContext] = OrderedDict()
        self._number = 0
        self.bytes = 0
        """The memory that they take."""

    def add(self, spec: RequestSpec, outputs: Sequence[int]) -> None:
        """Remember a context, which has been used just now."""
        most_bytes = self._most_bytes()
        if not most_bytes:
            return
        self._number += 1
        context = self._contexts[self._number] = PastContext(self._number, spec, array("I", outputs), self._clock())
        self.bytes += context.size
        while self.bytes > most_bytes:
            _, forgotten = self._contexts.popitem(last=False)
            self.bytes -= forgotten.size

    def get(self, number: int) -> PastContext | None:
        """The context of that number, unless it is forgotten."""
        return self._contexts.get(number)

    def newest_first(self) -> Iterator[PastContext]:
        """All contexts. More may be added meanwhile: they are left out."""
        return reversed(list(self._contexts.values()))
