"""How long it takes from seeing that a request must move until it has: what decisions have to be ahead by."""

from collections import deque
from math import ceil

REMEMBERED = 200
"""How many moves are remembered. Links get busy and quiet again within minutes."""

SHARE = 0.9
"""The share of the remembered moves that did not take longer than what is reckoned with."""


class Lead:
    """Measures the lead from the moves that have been made: an epoch, and as long as nine in ten of them took."""

    def __init__(self, epoch_s: float) -> None:
        self._epoch_s = epoch_s
        self._took: deque[float] = deque(maxlen=REMEMBERED)

    def observe(self, took_s: float) -> None:
        """A move took so many seconds from its beginning to its end."""
        self._took.append(took_s)

    @property
    def seconds(self) -> float:
        """The lead in seconds; of one epoch as long as nothing has moved."""
        if not self._took:
            return self._epoch_s
        return self._epoch_s + sorted(self._took)[ceil(SHARE * len(self._took)) - 1]
