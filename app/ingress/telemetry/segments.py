"""The segments of an answer: the part that each replica generated, as seen by the ingress."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from migration.protocol.reading import SegmentOrigin
from policies.model import ReplicaId


class SegmentEnd(StrEnum):
    """How a segment ends before its answer does; the last segment ends with the answer's finish reason."""

    REFUSED = "refused"
    MOVED = "moved"
    LOST = "lost"
    CLOSED = "closed"


@dataclass(slots=True)
class AnswerSegment:
    """A request's time on one replica, from `began` to `ended`; times in ns since 1970 by the ingress's clock.

    The replica generated output tokens [`index`, `index` + `tokens`); the ingress got the first of them at `first`.
    `before` is the previous replica, None for the first segment. `pause_s` is the time from the previous replica's
    last token to `first`. `reason` is the cause of a refusal or loss.
    """

    replica: ReplicaId
    hop: int
    by: SegmentOrigin
    index: int
    began: int
    before: ReplicaId | None
    tokens: int = 0
    first: int | None = None
    pause_s: float | None = None
    ended: int = 0
    end: str = SegmentEnd.CLOSED
    reason: str | None = None


class SegmentTracker:
    """Tracks the segments of one choice; `report` gets each segment when it ends. `now` is in ns since 1970.

    A replica that hands the request over before the ingress has read any of its events has no segment: its tokens
    count for the next replica.
    """

    def __init__(self, report: Callable[[AnswerSegment], None]) -> None:
        self._report = report
        self._segment: AnswerSegment | None = None
        self._before: ReplicaId | None = None
        self._newest: int | None = None
        """Arrival time of the newest token."""

    def hosted(self, replica: ReplicaId, hop: int, by: SegmentOrigin, index: int, now: int) -> None:
        """`replica` owns the request from output token `index` on; an open segment ends as moved."""
        self._leave(SegmentEnd.MOVED, now)
        self._segment = AnswerSegment(replica, hop, by, index, now, self._before)

    def took(self, next_index: int, now: int) -> None:
        """All output tokens before `next_index` have arrived."""
        segment = self._segment
        if segment is None or next_index <= segment.index + segment.tokens:
            return
        if segment.first is None:
            segment.first = now
            if self._newest is not None:
                segment.pause_s = max(0, now - self._newest) / 1e9
        segment.tokens = next_index - segment.index
        self._newest = now

    def lost(self, reason: str, submitted: bool, now: int) -> None:
        """The replica lost the request, or refused it if it was neither `submitted` there nor generated a token."""
        if self._segment is not None:
            self._segment.reason = reason
            self._leave(SegmentEnd.LOST if submitted or self._segment.tokens else SegmentEnd.REFUSED, now)

    def closed(self, finish: str | None, now: int) -> None:
        """The answer is no longer read. A finished answer ended with its newest token."""
        if finish is None or self._newest is None:
            self._leave(finish or SegmentEnd.CLOSED, now)
        else:
            self._leave(finish, self._newest)

    def _leave(self, end: str, now: int) -> None:
        segment, self._segment = self._segment, None
        if segment is None:
            return
        segment.end, segment.ended = end, max(segment.began, now)
        if end != SegmentEnd.REFUSED:
            self._before = segment.replica
        self._report(segment)
