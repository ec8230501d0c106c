"""Segments of an answer, from the events of its request."""

import pytest

from app.ingress.telemetry.segments import AnswerSegment, SegmentEnd, SegmentTracker
from migration.protocol.reading import SegmentOrigin
from policies.model import ReplicaId

A, B = ReplicaId("a"), ReplicaId("b")
S = 1_000_000_000


@pytest.fixture
def segments() -> list[AnswerSegment]:
    return []


@pytest.fixture
def tracker(segments: list[AnswerSegment]) -> SegmentTracker:
    return SegmentTracker(segments.append)


def test_the_last_segment_of_a_finished_answer_ends_with_its_newest_token(
    tracker: SegmentTracker, segments: list[AnswerSegment]
) -> None:
    tracker.hosted(A, 0, SegmentOrigin.FIRST, 0, now=1 * S)
    tracker.took(1, now=3 * S)
    tracker.took(3, now=4 * S)
    assert segments == []
    tracker.closed("length", now=9 * S)
    assert segments == [AnswerSegment(A, 0, SegmentOrigin.FIRST, 0, 1 * S, None, 3, 3 * S, None, 4 * S, "length")]


def test_a_move_ends_one_segment_and_begins_another(tracker: SegmentTracker, segments: list[AnswerSegment]) -> None:
    tracker.hosted(A, 0, SegmentOrigin.FIRST, 0, now=1 * S)
    tracker.took(2, now=2 * S)
    tracker.hosted(B, 1, SegmentOrigin.MIGRATION, 2, now=3 * S)
    tracker.took(2, now=4 * S)
    tracker.took(5, now=6 * S)
    tracker.closed(None, now=7 * S)
    assert segments == [
        AnswerSegment(A, 0, SegmentOrigin.FIRST, 0, 1 * S, None, 2, 2 * S, None, 3 * S, SegmentEnd.MOVED),
        AnswerSegment(B, 1, SegmentOrigin.MIGRATION, 2, 3 * S, A, 3, 6 * S, 4.0, 7 * S, SegmentEnd.CLOSED),
    ]


def test_a_replica_that_refused_is_not_the_previous_replica(
    tracker: SegmentTracker, segments: list[AnswerSegment]
) -> None:
    tracker.hosted(A, 0, SegmentOrigin.FIRST, 0, now=1 * S)
    tracker.lost("full", submitted=False, now=2 * S)
    tracker.hosted(B, 0, SegmentOrigin.FIRST, 0, now=3 * S)
    tracker.closed(None, now=4 * S)
    assert [(segment.replica, segment.end, segment.reason, segment.before) for segment in segments] == [
        (A, SegmentEnd.REFUSED, "full", None),
        (B, SegmentEnd.CLOSED, None, None),
    ]


@pytest.mark.parametrize(("submitted", "tokens"), [(True, 0), (False, 1)])
def test_a_replica_that_owned_the_request_loses_it(
    tracker: SegmentTracker, segments: list[AnswerSegment], submitted: bool, tokens: int
) -> None:
    """A replica that sends tokens owns the request, even before its submission is confirmed."""
    tracker.hosted(A, 0, SegmentOrigin.FIRST, 0, now=1 * S)
    tracker.took(tokens, now=2 * S)
    tracker.lost("it died", submitted, now=3 * S)
    tracker.hosted(B, 1, SegmentOrigin.RESUBMISSION, tokens, now=4 * S)
    tracker.closed(None, now=5 * S)
    assert (segments[0].end, segments[0].reason, segments[0].ended, segments[1].before) == (
        SegmentEnd.LOST,
        "it died",
        3 * S,
        A,
    )


def test_events_between_segments_are_ignored(tracker: SegmentTracker, segments: list[AnswerSegment]) -> None:
    tracker.took(1, now=1 * S)
    tracker.lost("without an owner", submitted=True, now=2 * S)
    tracker.closed(None, now=3 * S)
    assert segments == []


def test_a_clock_set_back_makes_no_time_negative(tracker: SegmentTracker, segments: list[AnswerSegment]) -> None:
    tracker.hosted(A, 0, SegmentOrigin.FIRST, 0, now=5 * S)
    tracker.took(1, now=4 * S)
    tracker.hosted(B, 1, SegmentOrigin.MIGRATION, 1, now=3 * S)
    tracker.took(2, now=2 * S)
    tracker.closed("stop", now=1 * S)
    assert all(segment.began <= segment.ended for segment in segments)
    assert segments[1].pause_s == 0
