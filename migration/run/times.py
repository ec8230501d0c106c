"""The times of one migration's events, taken at the source."""

from collections.abc import Iterator
from contextlib import contextmanager

from migration.protocol.ports import Clock

QUIET_S = 0.03
"""The time after a hand-over for which calls wait that its request does not need: its target computes the first token,
in a few tens of milliseconds at most, perhaps on the processors that these calls would use.
"""


class Times:
    """Each call notes the present; of several calls the first counts. Durations are None until they are over."""

    def __init__(self, clock: Clock, wall_clock: Clock) -> None:
        self._clock = clock
        self._began = clock()
        self.started_at = wall_clock()
        self._frozen: float | None = None
        self._handed: float | None = None
        self._released: float | None = None
        self._ended: float | None = None
        self._since_adopted: float | None = None
        self.waited_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The body waits for the source's own prefill; all of these waits are `waited_s`."""
        began = self._clock()
        try:
            yield
        finally:
            self.waited_s += self._clock() - began

    def freeze(self) -> None:
        """The source publishes nothing more."""
        self._frozen = self._clock() if self._frozen is None else self._frozen

    def hand_over(self) -> None:
        """The target is asked to adopt the request."""
        self._handed = self._clock() if self._handed is None else self._handed

    def release(self) -> None:
        """The request is the target's, or the source publishes again."""
        self._released = self._clock() if self._released is None else self._released

    def end(self) -> None:
        """The migration is over."""
        self._ended = self._clock() if self._ended is None else self._ended

    def resumed(self, since_adopted_s: float) -> None:
        """The target's first token came `since_adopted_s` seconds after it had adopted the request."""
        self._since_adopted = since_adopted_s

    @property
    def duration_s(self) -> float:
        """From the beginning to the end, or until now."""
        return (self._clock() if self._ended is None else self._ended) - self._began

    @property
    def pause_s(self) -> float | None:
        """From the freeze to the release."""
        return None if self._frozen is None or self._released is None else self._released - self._frozen

    @property
    def resume_s(self) -> float | None:
        """From the freeze to the target's first token, but for the way of the hand-over."""
        if self._frozen is None or self._handed is None or self._since_adopted is None:
            return None
        return self._handed - self._frozen + self._since_adopted
