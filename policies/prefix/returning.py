"""The order of returns, live and simulated: contexts go back to the replicas of their prefills, one at a time.

`policies.prefix.reuse` decides whether a context returns. A return is never needed: it waits for moves and other
copies, and is dropped if it waits too long.
"""

from collections import deque
from typing import Generic, TypeVar

PATIENCE_S = 10.0
"""The longest time that an ended context waits for its return, in seconds: its next turn may have begun by then."""
CHECK_S = 0.05
"""The time between two looks at what a waiting context waits for, in seconds."""
AT_MOST = 64
"""The number of contexts that wait, the newest ones."""

Context = TypeVar("Context")


class ReturnQueue(Generic[Context]):
    """The contexts of one replica that return. Times are in seconds of the caller's clock."""

    def __init__(self) -> None:
        self._ended: deque[tuple[Context, float]] = deque(maxlen=AT_MOST)

    def end(self, context: Context, now: float) -> None:
        """Add the context of a request that has ended."""
        self._ended.append((context, now))

    def next(self, now: float) -> Context | None:
        """The context that returns next: the oldest one. Drops those that have waited too long."""
        while self._ended and now - self._ended[0][1] > PATIENCE_S:
            self._ended.popleft()
        return self._ended[0][0] if self._ended else None

    def take(self) -> None:
        """Remove the next context, since its return begins."""
        self._ended.popleft()

    def clear(self) -> None:
        """Remove all contexts."""
        self._ended.clear()
