"""Forecasts of a pool's demand, each with its spread, from the demand of the last minutes.

A replica that is opened now serves after `within_s` seconds. Requests that find no room then are in time if they need
to wait no longer than `span_s`, so the demand that counts for opening is the lowest of the `span_s` seconds from then
on. For closing, the highest of the next seconds counts.

High demand tends to fall, since requests end, and low demand to rise: a line over the present demand predicts the later
one. What the line missed in the past is the spread of the forecast. Its largest miss does not count, with the others
within the time of a start and a wait, which are of the same rise: a burst that has come once, like the rise of a
service that has just begun, is no evidence of another one, and replicas kept for it would stand idle for `WINDOW_S`
seconds. Of a short past at most a half is left out, lest a young service has no spread and so no reserve. So steady
traffic keeps little in reserve, and bursts that return keep in reserve what they lately needed.
"""

from collections import deque
from collections.abc import Callable, Iterable
from math import ceil
from statistics import fmean

WINDOW_S = 1200.0
"""The time for which demand counts, in seconds. A longer one remembers bursts that are over, a shorter one forgets them
between two."""
LEFT_OUT = 0.25
"""The share of the past that is left out before the largest miss, and after it, at most."""
GRID = 32
"""The number of samples until the end of the span."""


class Forecast:
    """The demand of one pool in tokens; times are in seconds of any monotonic clock.

    Of the `span_s` seconds that begin `within_s` seconds from now, the `extreme` demand counts: `min` or `max`.
    """

    def __init__(self, extreme: Callable[[Iterable[int]], int] = min) -> None:
        self._extreme = extreme
        self._recent: deque[tuple[float, int]] = deque()
        """(time, demand) whose later demand is not observed yet."""
        self._past: deque[tuple[float, int, int]] = deque()
        """(time, demand, later demand)."""
        self._present = 0
        self._ahead_s = 0.0
        """The time until the end of the span."""

    def observe(self, now: float, tokens: int, within_s: float, span_s: float = 0.0) -> None:
        """Add the demand at `now`. `within_s` and `span_s` should change little from one call to the next."""
        self._present, self._ahead_s = tokens, within_s + span_s
        if not self._recent or now - self._recent[-1][0] >= self._ahead_s / GRID:
            self._recent.append((now, tokens))
        later = self._extreme([tokens, *(was for at, was in self._recent if at >= now - span_s)])
        while self._recent[0][0] < now - self._ahead_s:
            self._past.append((*self._recent.popleft(), later))
        while self._past and self._past[0][0] < now - WINDOW_S - self._ahead_s:
            self._past.popleft()

    def change(self, share: float) -> int:
        """The change of the present demand that is exceeded with a probability of 1 - `share` only, in tokens.

        Below zero if demand is expected to fall. Before demand has been observed for long enough, the largest rise so
        far.
        """
        if not self._past:
            return max((self._present - was for _, was in self._recent), default=0)
        mean, later_mean = (fmean(pair[column] for pair in self._past) for column in (1, 2))
        across = sum((was - mean) ** 2 for _, was, _ in self._past)
        along = sum((was - mean) * (later - later_mean) for _, was, later in self._past)
        slope = min(1.0, max(0.0, along / across)) if across else 1.0
        missed = [(later - later_mean - slope * (was - mean), at) for at, was, later in self._past]
        _, largest_s = max(missed)
        apart_s = min(self._ahead_s, LEFT_OUT * (self._past[-1][0] - self._past[0][0]))
        again = sorted(tokens for tokens, at in missed if abs(at - largest_s) > apart_s)
        if not again:
            return 0
        highest = later_mean + slope * (self._present - mean) + again[ceil(share * len(again)) - 1]
        return round(highest) - self._present
