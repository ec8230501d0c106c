"""Forecasts of a pool's demand, each with its spread, from the demand of the last minutes.

A replica that is opened now serves after `within_s` seconds. Requests that find no room then are in time if they need
to wait no longer than `span_s`, so the demand that counts for opening is the lowest of the `span_s` seconds from then
on. For closing, the highest of the next seconds counts.

High demand tends to fall, since requests end, and low demand to rise: a line over the present demand predicts the later
one. Where demand repeats, the line is over the difference from its repetitions (`policies/cluster/period.py`): what
comes every two minutes is expected before it shows, and not expected between.

What the line missed in the past is the spread of the forecast. Its largest miss does not count, with the others within
the time of a start and a wait, which are of the same rise: a burst that has come once, like the rise of a service that
has just begun, is no evidence of another one, and replicas kept for it would stand idle for `WINDOW_S` seconds. Of a
short past at most a half is left out, lest a young service has no spread and so no reserve. So steady traffic keeps
little in reserve, and bursts that return keep in reserve what they lately needed.
"""

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from math import ceil
from typing import Any

import numpy as np

from policies.cluster.period import Repetitions, find_period, line_over

WINDOW_S = 1200.0
"""The time for which demand counts, in seconds. A longer one remembers bursts that are over, a shorter one forgets them
between two."""
MEMORY_S = 3600.0
"""The time in which periods are found, in seconds: they are up to a third of it."""
SEARCH_S = 60.0
"""The seconds between two searches for a period."""
LEFT_OUT = 0.25
"""The share of the past that is left out before the largest miss, and after it, at most."""
ALIKE = 0.25
"""The share of the past whose misses count where demand repeats: that with the most similar forecasts. Bursts and the
times between them miss by different amounts."""
GRID = 32
"""The number of samples until the end of the span."""
STEP_S = 1.0
"""The seconds between two values where demand is compared with its repetitions."""
SHORTEST = 5
"""The least period, in times until the end of the span: between shorter ones, replicas would close for too short."""


class Forecast:
    """The demand of one pool in tokens; times are in seconds of any monotonic clock.

    Of the `span_s` seconds that begin `within_s` seconds from now, the `extreme` demand counts: `min` or `max`. Periods
    are sought `delay_s` seconds after the first demand, and from then on every SEARCH_S seconds.
    """

    def __init__(self, extreme: Callable[[Iterable[int]], int] = min, delay_s: float = 0.0) -> None:
        self._extreme = extreme
        self._delay_s = delay_s
        self._recent: deque[tuple[float, int]] = deque()
        """(time, demand) whose later demand is not observed yet."""
        self._at, self._was, self._later = array("d"), array("d"), array("d")
        """Times of the past, with the demand and the later demand of each."""
        self._now, self._present = 0.0, 0
        self._ahead_s = 0.0
        """The time until the end of the span."""
        self._period = 0
        """In steps; 0 without one."""
        self._search_s: float | None = None
        """The time of the next search."""

    @property
    def period_s(self) -> float | None:
        """The time after which demand repeats, in seconds; None if it does not, or not yet three times."""
        return self._period * STEP_S if self._period else None

    def observe(self, now: float, tokens: int, within_s: float, span_s: float = 0.0) -> None:
        """Add the demand at `now`. `within_s` and `span_s` should change little from one call to the next."""
        self._now, self._present, self._ahead_s = now, tokens, within_s + span_s
        if not self._recent or now - self._recent[-1][0] >= self._ahead_s / GRID:
            self._recent.append((now, tokens))
        later = self._extreme([tokens, *(was for at, was in self._recent if at >= now - span_s)])
        while self._recent[0][0] < now - self._ahead_s:
            at, was = self._recent.popleft()
            self._at.append(at)
            self._was.append(was)
            self._later.append(later)
        old = bisect_left(self._at, now - MEMORY_S)
        del self._at[:old], self._was[:old], self._later[:old]
        if self._search_s is None:
            self._search_s = now + self._delay_s
        if now >= self._search_s:
            self._search_s = now + SEARCH_S
            least = ceil(SHORTEST * self._ahead_s / STEP_S)
            _, was, later = self._in_steps()
            self._period = find_period(was, later, least, int(WINDOW_S / STEP_S))

    def _in_window(self) -> tuple[Any, Any, Any]:
        """The times of the window, with the demand and the later demand of each."""
        first = bisect_left(self._at, self._now - WINDOW_S - self._ahead_s)
        return np.array(self._at[first:]), np.array(self._was[first:]), np.array(self._later[first:])

    def _in_steps(self) -> tuple[Any, Any, Any]:
        """Every step of the past, with the demand and the later demand of the last time up to it."""
        at = np.array(self._at)
        if not len(at):
            return at, at, at
        steps = at[-1] - STEP_S * np.arange(int((at[-1] - at[0]) / STEP_S) + 1)[::-1]
        index = np.searchsorted(at, steps, side="right") - 1
        return steps, np.array(self._was)[index], np.array(self._later)[index]

    def change(self, share: float) -> int:
        """The change of the present demand that is exceeded with a probability of 1 - `share` only, in tokens.

        Below zero if demand is expected to fall. Before demand has been observed for long enough, the largest rise so
        far.
        """
        if not self._at:
            return max((self._present - was for _, was in self._recent), default=0)
        at, was, later = self._in_steps() if self._period else self._in_window()
        ahead, most = round((self._now - self._at[-1]) / STEP_S), int(WINDOW_S / STEP_S)
        before, after = (Repetitions.of(each, self._period, ahead, most) for each in (was, later))
        line = line_over(before.differences, after.differences)
        expected, middle = after.mean + line.at(before.differences), after.next + line.at(self._present - before.next)
        missed = after.mean + after.differences - expected
        at = at[-len(missed) :]
        if self._period:
            alike = np.sort(np.argsort(np.abs(expected - middle), kind="stable")[: ceil(ALIKE * len(expected))])
            at, missed = at[alike], missed[alike]
        largest_s = at[np.flatnonzero(missed == missed.max())[-1]]
        apart_s = min(self._ahead_s, LEFT_OUT * (at[-1] - at[0]))
        again = np.sort(missed[np.abs(at - largest_s) > apart_s])
        if not len(again):
            return 0
        return round(float(middle + again[ceil(share * len(again)) - 1])) - self._present
