"""How fast demand has risen lately: what has to be free before a replica that is opened now is of any use."""

from collections import deque

WINDOW_S = 600.0
"""How long a rise is remembered. Longer holds replicas open for bursts of the past, shorter forgets the last one."""


class Demand:
    """The tokens that all requests hold, over time; times in seconds of any monotonic clock."""

    def __init__(self) -> None:
        self._totals: deque[tuple[float, int]] = deque()
        self._rises: deque[tuple[float, int]] = deque()

    def observe(self, now: float, tokens: int, within_s: float) -> None:
        """Demand is `tokens` now; note how much more that is than at any time in the last `within_s` seconds."""
        self._totals.append((now, tokens))
        while self._totals[0][0] < now - within_s:
            self._totals.popleft()
        rise = tokens - min(total for _, total in self._totals)
        # Smaller rises before a larger one will never be the largest again.
        while self._rises and self._rises[-1][1] <= rise:
            self._rises.pop()
        self._rises.append((now, rise))
        while self._rises[0][0] < now - WINDOW_S:
            self._rises.popleft()

    @property
    def rise(self) -> int:
        """The largest rise within so many seconds that has been seen lately, in tokens."""
        return self._rises[0][1] if self._rises else 0
