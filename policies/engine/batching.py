"""The scheduler of a batch: vLLM's in small.

There are no prefill and decode phases: a request has computed tokens, and tokens still to be computed. When all are
computed, the step yields its next token. Requests are admitted in the order of their turns, equal turns first come
first served, if there is room. If running requests lack room, the youngest one of the last turn is preempted, and
recomputed later.
"""

from bisect import insort_left, insort_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Generic, Protocol, TypeVar


class Batchable(Protocol):
    """A request, as far as a batch scheduler needs it."""

    turn: float
    """Its place in queues: lower ones come first."""

    @property
    def id(self) -> str: ...

    @property
    def todo(self) -> int:
        """The number of tokens still to be computed."""
        ...


S = TypeVar("S", bound=Batchable)
_turn = attrgetter("turn")


class BatchScheduler(Generic[S]):
    """The requests of one engine: `running` in the order of their admission, and `waiting` in that of their turns.

    The memory is the caller's. `max_running` bounds the number of running requests; None: no bound.
    """

    def __init__(self, max_running: int | None = None) -> None:
        self.running: dict[str, S] = {}
        self.waiting: deque[S] = deque()
        self.preemptions = 0
        self._max_running = max_running

    def enqueue(self, request: S) -> None:
        """Add an arriving request behind the waiting ones of its turn."""
        insort_right(self.waiting, request, key=_turn)

    def start(self, request: S) -> None:
        """Add a running request."""
        self.running[request.id] = request

    def admit(self, fits: Callable[[S], bool]) -> S | None:
        """The first waiting request, which runs from now on; None if there is none or it does not fit."""
        full = self._max_running is not None and len(self.running) >= self._max_running
        if full or not self.waiting or not fits(self.waiting[0]):
            return None
        request = self.waiting.popleft()
        self.start(request)
        return request

    def remove(self, request: S) -> bool:
        """Remove a request that runs or waits; True if it was running."""
        if self.running.get(request.id) is request:
            del self.running[request.id]
            return True
        if request in self.waiting:
            self.waiting.remove(request)
        return False

    def preempt(self, leave: Callable[[S], None]) -> S:
        """Have the youngest request of the last turn wait before all others of that turn.

        `leave` frees its memory, while it is in neither queue. Returns the request.
        """
        request = max(reversed(self.running.values()), key=_turn)
        del self.running[request.id]
        leave(request)
        insort_left(self.waiting, request, key=_turn)
        self.preemptions += 1
        return request


def divide(requests: Iterable[S], budget: int) -> Iterator[tuple[S, int]]:
    """The requests of a step, each with its number of tokens: as many as it needs, until `budget` tokens are given.

    A request is taken from `requests` only if some of the budget is left.
    """
    left = iter(requests)
    while budget > 0 and (request := next(left, None)) is not None:
        tokens = min(request.todo, budget)
        budget -= tokens
        yield request, tokens
