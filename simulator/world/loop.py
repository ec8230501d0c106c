"""Virtual time: an event loop that runs actions in order and advances time from one to the next."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

Action = Callable[[], None]


class Turn(IntEnum):
    """The order of actions at the same time: events of engines come before the decisions that react to them."""

    ENGINE = 0
    LINK = 1
    START = 2
    EPOCH = 3
    ARRIVAL = 4


@dataclass(slots=True)
class Timer:
    """A scheduled action, unless it is cancelled."""

    action: Action | None

    def cancel(self) -> None:
        """Cancel the action."""
        self.action = None


class Loop:
    """Actions by (time, turn, order of scheduling), so that the order is deterministic.

    `now` is in seconds from the start. Times are rounded to nanoseconds, so that floating-point errors do not shift
    actions across the end of an epoch.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, Turn, int, Timer]] = []
        self._scheduled = 0

    def at(self, time: float, turn: Turn, action: Action) -> Timer:
        """Schedule `action` for `time`, or for now if that has passed."""
        timer = Timer(action)
        self._scheduled += 1
        heapq.heappush(self._heap, (max(round(time, 9), self.now), turn, self._scheduled, timer))
        return timer

    def run(self, until: float) -> None:
        """Run all actions up to and including a time."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, _, timer = heapq.heappop(self._heap)
            if timer.action is not None:
                timer.action()
