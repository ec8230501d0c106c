"""The requests that decode on one engine, all at the same pace.

Every step adds a token to each of them, so the batch counts steps, in fractions, and a request only remembers the count
at which it began. Nothing is computed token by token: as long as nothing joins or leaves, steps follow a `Leg`.
"""

import heapq
import math
from bisect import bisect_right
from typing import NamedTuple

from app.simulator.costs.steps import Leg, StepTimes
from app.simulator.world.live import Live, Stage

NEVER = math.inf
NEARLY = 1e-5
"""Steps and tokens are sums of fractions, and times are rounded: what differs by less is the same."""


class _End(NamedTuple):
    """When a request will have produced its last token; `joined` tells apart what is otherwise equal."""

    steps: float
    order: int
    joined: int
    live: Live


class Gaps:
    """Step times as they come, of which only those are kept that no later one has reached.

    So what is kept falls from the oldest to the newest, and the oldest since a mark is the longest since then.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._seconds: list[float] = []
        self._count = 0

    def add(self, seconds: float) -> None:
        """The next step took so long."""
        while self._seconds and self._seconds[-1] <= seconds:
            self._seconds.pop()
            self._numbers.pop()
        self._count += 1
        self._numbers.append(self._count)
        self._seconds.append(seconds)

    def mark(self) -> int:
        """A point in the sequence: now."""
        return self._count

    def longest(self, mark: int) -> float:
        """The longest step time since the mark, 0 if there was none."""
        index = bisect_right(self._numbers, mark)
        return self._seconds[index] if index < len(self._seconds) else 0.0


class Batch:
    """Requests in lockstep. `pace` has to be called whenever requests joined or left.

    `step_s` is how long a step took that only decodes, when that was last looked at.
    """

    def __init__(self, times: StepTimes) -> None:
        self.size = 0
        self.seen = 0.0
        self.step_s = times.decode(1, 0.0).step_s
        self._times = times
        self._leg = Leg(1.0, 0.0)
        self._since = 0.0
        self._joined = 0
        self._steps = 0.0
        self._base = 0.0
        self._ends: list[_End] = []
        self._gaps = Gaps()

    def steps(self, now: float) -> float:
        """Steps done, from wherever the count began."""
        return self._steps + (self._leg.steps(now - self._since) if self.size and now > self._since else 0.0)

    def rest_s(self, now: float) -> float:
        """Seconds until the step under way is over, 0 between two steps and without requests."""
        steps = self.steps(now) + NEARLY
        return self._leg.seconds(math.ceil(steps) - steps) if self.size and steps % 1 > 2 * NEARLY else 0.0

    def look(self, now: float) -> None:
        """Remember the count as `seen`, a little more so that whole tokens count as such."""
        self.seen = self.steps(now) + NEARLY

    def context(self, now: float) -> float:
        """Tokens of all its requests."""
        return self._base + self.size * self.steps(now)

    def after(self, steps: float) -> float:
        """When so many more steps are done than at the last `sync`; now if there are none to do."""
        return self._since + self._leg.seconds(max(0.0, steps))

    def next_end(self) -> float:
        """When the first of its requests has produced its last token, `NEVER` if it is empty."""
        return self.after(self._ends[0].steps - self._steps) if self.size else NEVER

    def sync(self, now: float) -> None:
        """Count the steps done until now."""
        steps = self.steps(now)
        if steps > self._steps:
            self._gaps.add(self._leg.step_s + self._leg.growth_s * (steps - self._steps))
        self._steps, self._since = steps, max(now, self._since)

    def pace(self, leg: Leg | None = None) -> None:
        """From the last `sync` on, steps go as `leg` says, or as fast as the batch allows."""
        if leg is not None:
            self._leg = leg
        elif self.size:
            self._leg = self._times.decode(self.size, self._base + self.size * self._steps)
            self.step_s = self._leg.step_s

    def join(self, live: Live, now: float) -> None:
        """A request begins to decode; `sync` has been called."""
        live.stage, live.batch = Stage.DECODE, self
        live.base = live.held - self._steps
        live.ends = self._steps + live.left
        live.mark = self._gaps.mark()
        self._joined += 1
        heapq.heappush(self._ends, _End(live.ends, live.order, self._joined, live))
        self._base += live.base
        self.size += 1
        live.produces(now, self._times.decode(self.size, self._base + self.size * self._steps).step_s)

    def leave(self, live: Live, now: float) -> None:
        """A request stops decoding; `sync` has been called."""
        live.stage, live.batch = Stage.NOWHERE, None
        live.held = live.base + self._steps
        live.longest_gap_s = max(live.longest_gap_s, self._gaps.longest(live.mark))
        live.stopped_s = now
        self._base -= live.base
        self.size -= 1
        if not self.size:
            self._clear()
        while self._ends and not self._holds(self._ends[0]):
            heapq.heappop(self._ends)

    def ended(self) -> Live | None:
        """A request that had produced its last token at the last `sync`, None if there is none."""
        return self._ends[0].live if self.size and self._ends[0].steps <= self._steps + NEARLY else None

    def _clear(self) -> None:
        """Nobody refers to the count: it begins anew, without the errors of a long sum."""
        self._steps = self._base = 0.0
        self._ends.clear()
        self._gaps = Gaps()

    def _holds(self, end: _End) -> bool:
        """Whether it is the end of a request that still decodes here."""
        return end.live.batch is self and end.live.ends == end.steps
