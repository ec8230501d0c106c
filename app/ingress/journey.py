"""The replicas that a request lives on, one after another, as its ingress learns of it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from policies.model import ReplicaId


class By(StrEnum):
    """What brought a request to a replica."""

    FIRST = "first"
    MIGRATION = "migration"
    RESUBMISSION = "resubmission"


class End(StrEnum):
    """How a stay ends before the answer does; else it is the answer's finish reason."""

    REFUSED = "refused"
    MOVED = "moved"
    LOST = "lost"
    CLOSED = "closed"


@dataclass(slots=True)
class Stay:
    """A request's time on one replica, from `began` to `ended`, in ns since 1970 by the ingress's clock.

    Output tokens [`index`, `index` + `tokens`) came from there, the first of them at `first`. `before` is the replica
    on which it lived before, None on the first. `pause_s` is the time from when the last token from anywhere before
    had come until `first`. `reason` says why the replica refused or lost it.
    """

    replica: ReplicaId
    hop: int
    by: By
    index: int
    began: int
    before: ReplicaId | None
    tokens: int = 0
    first: int | None = None
    pause_s: float | None = None
    ended: int = 0
    end: str = End.CLOSED
    reason: str | None = None


class Journey:
    """The stays of one choice; each is told when it ends. `now` is in ns since 1970.

    A replica that was handed over by the next one before this ingress had read of its own turn has no stay: its
    tokens count as the next one's.
    """

    def __init__(self, tell: Callable[[Stay], None]) -> None:
        self._tell = tell
        self._stay: Stay | None = None
        self._before: ReplicaId | None = None
        self._newest: int | None = None
        """When the newest token came."""

    def hosted(self, replica: ReplicaId, hop: int, by: By, index: int, now: int) -> None:
        """The request is that replica's from output token `index` on; a stay that has not ended, ends by a move."""
        self._leave(End.MOVED, now)
        self._stay = Stay(replica, hop, by, index, now, self._before)

    def took(self, next_index: int, now: int) -> None:
        """All output tokens before `next_index` have come."""
        stay = self._stay
        if stay is None or next_index <= stay.index + stay.tokens:
            return
        if stay.first is None:
            stay.first = now
            if self._newest is not None:
                stay.pause_s = max(0, now - self._newest) / 1e9
        stay.tokens = next_index - stay.index
        self._newest = now

    def lost(self, reason: str, submitted: bool, now: int) -> None:
        """The replica does not have the request; it never had, if nothing says that it was `submitted` there."""
        if self._stay is not None:
            self._stay.reason = reason
            self._leave(End.LOST if submitted or self._stay.tokens else End.REFUSED, now)

    def closed(self, finish: str | None, now: int) -> None:
        """Nothing more is read. An answer that has its finish reason ended when the newest token came."""
        if finish is None or self._newest is None:
            self._leave(finish or End.CLOSED, now)
        else:
            self._leave(finish, self._newest)

    def _leave(self, end: str, now: int) -> None:
        stay, self._stay = self._stay, None
        if stay is None:
            return
        stay.end, stay.ended = end, max(stay.began, now)
        if end != End.REFUSED:
            self._before = stay.replica
        self._tell(stay)
