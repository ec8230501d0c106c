"""Virtual time: what is due happens in order, and nothing else passes the time."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

Action = Callable[[], None]


class Turn(IntEnum):
    """Which of several actions at one time comes first: what the engines did, before what is decided about it."""

    ENGINE = 0
    LINK = 1
    START = 2
    EPOCH = 3
    ARRIVAL = 4


@dataclass(slots=True)
class Timer:
    """An action that is due at some time, unless it is cancelled."""

    action: Action | None

    def cancel(self) -> None:
        """It will not happen."""
        self.action = None


class Loop:
    """Actions by (time, turn, order of being asked for): the same actions always happen in the same order.

    `now` is in seconds from the start. Times are rounded to nanoseconds, so that what falls on the end of an epoch
    by calculation does so in floating point.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, Turn, int, Timer]] = []
        self._asked = 0

    def at(self, time: float, turn: Turn, action: Action) -> Timer:
        """Let `action` happen at `time`, or now if that is past."""
        timer = Timer(action)
        self._asked += 1
        heapq.heappush(self._heap, (max(round(time, 9), self.now), turn, self._asked, timer))
        return timer

    def run(self, until: float) -> None:
        """Let everything happen that is due by then."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, _, timer = heapq.heappop(self._heap)
            if timer.action is not None:
                timer.action()
