"""How long it takes from seeing that a request must move until it has: what decisions have to be ahead by."""

from collections import deque
from math import ceil

REMEMBERED = 200
"""How many moves are remembered. Links get busy and quiet again within minutes."""

SHARE = 0.9
"""The share of the remembered moves that did not take longer than what is reckoned with."""


class Lead:
    """Measures the lead from the moves that have been made: two epochs, and as long as nine in ten of them took.

    One epoch, since what is known is up to an epoch old; another, since the next chance to decide is an epoch away.
    """

    def __init__(self, epoch_s: float) -> None:
        self._epoch_s = epoch_s
        self._took: deque[float] = deque(maxlen=REMEMBERED)

    def observe(self, took_s: float) -> None:
        """A move took so many seconds from its beginning to its end."""
        self._took.append(took_s)

    @property
    def seconds(self) -> float:
        """The lead in seconds; as long as nothing has moved, moves are taken to be instantaneous."""
        if not self._took:
            return 2 * self._epoch_s
        return 2 * self._epoch_s + sorted(self._took)[ceil(SHARE * len(self._took)) - 1]
