"""The requests that decode on one engine in lockstep.

Every step adds a token to each request, so the batch counts steps, in fractions, and a request only stores the count at
which it began. No work is done per token: as long as no request joins or leaves, steps follow a `Leg`.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

from simulator.costs.steps import Leg, StepTimes
from simulator.world.live import Live, Stage

NEVER = math.inf
NEARLY = 1e-5
"""Tolerance for steps and tokens, which are sums of fractions, while times are rounded."""


class _End(NamedTuple):
    """The step count at which a request generates its last token; `joined` breaks ties."""

    steps: float
    order: int
    joined: int
    live: Live


class Gaps:
    """A sequence of step times, of which only those are kept that are longer than all later ones.

    The kept times fall from the oldest to the newest, so the oldest one since a mark is the longest since that mark.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._seconds: list[float] = []
        self._count = 0

    def add(self, seconds: float) -> None:
        """Append the time of the next step."""
        while self._seconds and self._seconds[-1] <= seconds:
            self._seconds.pop()
            self._numbers.pop()
        self._count += 1
        self._numbers.append(self._count)
        self._seconds.append(seconds)

    def mark(self) -> int:
        """The current position in the sequence."""
        return self._count

    def longest(self, mark: int) -> float:
        """The longest step time since the mark, 0 if there was none."""
        index = bisect_right(self._numbers, mark)
        return self._seconds[index] if index < len(self._seconds) else 0.0


class Batch:
    """Requests in lockstep. The caller has to call `pace` after requests have joined or left.

    `step_s` is the time of a step without prefills at the last call of `pace`; steps take `slowdown` times as long as
    alone on the device. `counted` is the step count at the last
    call of `count`. `on_steps` is called with the mean time of steps that are done and the number of their tokens, and
    for a token after a pause with the time since the token before.
    """

    def __init__(self, times: StepTimes, on_steps: Callable[[float, float], None] | None = None) -> None:
        self.size = 0
        self.counted = 0.0
        self.slowdown = 1.0
        self.step_s = times.decode(1, 0.0).step_s
        self._times = times
        self._on_steps = on_steps
        self._leg = Leg(1.0, 0.0)
        self._since = 0.0
        self._joined = 0
        self._steps = 0.0
        self._base = 0.0
        self._ends: list[_End] = []
        self._gaps = Gaps()

    def steps(self, now: float) -> float:
        """The step count, relative to an arbitrary beginning."""
        return self._steps + (self._leg.steps(now - self._since) if self.size and now > self._since else 0.0)

    def left(self, now: float) -> float:
        """The part of the step under way that is left, 0 between two steps and without requests."""
        steps = self.steps(now) + NEARLY
        return math.ceil(steps) - steps + NEARLY if self.size and steps % 1 > 2 * NEARLY else 0.0

    def rest_s(self, now: float) -> float:
        """Seconds until the end of the step under way, 0 between two steps and without requests."""
        return self._leg.seconds(self.left(now))

    def count(self, now: float) -> None:
        """Store the step count as `counted`, plus the tolerance, so that rounding errors hide no whole token."""
        self.counted = self.steps(now) + NEARLY

    def context(self, now: float) -> float:
        """The tokens of all requests in the batch."""
        return self._base + self.size * self.steps(now)

    def after(self, steps: float) -> float:
        """The time at which `steps` more steps are done after the last `sync`; no steps for negative numbers."""
        return self._since + self._leg.seconds(max(0.0, steps))

    def next_end(self) -> float:
        """The time at which the first request generates its last token; `NEVER` for an empty batch."""
        return self.after(self._ends[0].steps - self._steps) if self.size else NEVER

    def sync(self, now: float) -> None:
        """Bring the step count up to date."""
        steps = self.steps(now)
        if self._times.interferes and abs(steps - round(steps)) < NEARLY:
            steps = float(round(steps))  # steps are whole: rounding errors must not add up
        if steps > self._steps:
            done = steps - self._steps
            self._gaps.add(self._leg.step_s + self._leg.growth_s * done)
            if self._on_steps is not None:
                self._on_steps(self._leg.step_s + self._leg.growth_s * done / 2, done * self.size)
        self._steps, self._since = steps, max(now, self._since)

    def pace(self, leg: Leg | None = None) -> None:
        """From the last `sync` on, steps follow `leg`; without one, the costs of decoding this batch."""
        if leg is not None:
            self._leg = leg
        elif self.size:
            alone = self._times.decode(self.size, self._base + self.size * self._steps)
            self._leg = Leg(alone.step_s * self.slowdown, alone.growth_s * self.slowdown)
            self.step_s = self._leg.step_s

    def join(self, live: Live, now: float) -> None:
        """Add a request that begins to decode. `sync` must have been called."""
        live.stage, live.batch = Stage.DECODE, self
        live.base = live.held - self._steps
        live.ends = self._steps + live.left
        live.mark = self._gaps.mark()
        self._joined += 1
        heapq.heappush(self._ends, _End(live.ends, live.order, self._joined, live))
        self._base += live.base
        self.size += 1
        pause_s = live.begin_decoding(now, self._times.decode(self.size, self._base + self.size * self._steps).step_s)
        if pause_s and self._on_steps is not None:
            self._on_steps(pause_s, 1)

    def leave(self, live: Live, now: float) -> None:
        """Remove a request that stops decoding. `sync` must have been called."""
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
        """A request that has generated its last token by the last `sync`; None if there is none."""
        return self._ends[0].live if self.size and self._ends[0].steps <= self._steps + NEARLY else None

    def _clear(self) -> None:
        """Reset the count, to which no request refers any more: that ends the accumulation of rounding errors."""
        self._steps = self._base = 0.0
        self._ends.clear()
        self._gaps = Gaps()

    def _holds(self, end: _End) -> bool:
        """True if the end is that of a request that still decodes here."""
        return end.live.batch is self and end.live.ends == end.steps
