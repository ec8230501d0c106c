"""Measurement of one answer from timed events."""

import pytest

from app.client.sse import Event
from simulator.replay.stream import AnswerStream, Record, StreamOutcome
from simulator.replay.trace import TraceRequest

CHUNK = {"choices": [{"text": "x", "finish_reason": None}]}
LAST = {"choices": [{"text": "", "finish_reason": "length"}]}
USAGE = {"choices": [], "usage": {"completion_tokens": 2}}


def answered(*events: Event, wanted: int = 2) -> Record:
    """The record of an answer with one event per second, the first a second after sending."""
    stream = AnswerStream(TraceRequest(0, 0.0, 5, wanted), sent_s=0.0)
    stream.open()
    for now_s, event in enumerate(events, start=1):
        stream.feed(event, float(now_s))
    stream.end(float(len(events)))
    return stream.record(99.0)


def test_a_whole_answer_is_ok_and_has_its_times() -> None:
    record = answered(CHUNK, CHUNK, LAST, USAGE)
    assert (record.outcome, record.tokens, record.ended_s) == (StreamOutcome.OK, 2, 4.0)
    assert (record.ttft_s, record.gaps_s) == (1.0, (1.0,))


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ((CHUNK, {"choices": [], "usage": {"completion_tokens": 1}}), "too few tokens"),
        ((CHUNK, {"error": {"message": "died"}}), "error event"),
        ((CHUNK, {"error": 5}), "error event"),
    ],
    ids=["too few", "error event", "error without a message"],
)
def test_an_incomplete_answer_is_broken(events: tuple[Event, ...], kind: str) -> None:
    record = answered(*events)
    assert record.outcome is StreamOutcome.BROKEN
    assert record.fault is not None
    assert record.fault.kind == kind


def test_without_usage_the_tokens_are_unknown_and_not_too_few() -> None:
    record = answered(CHUNK)
    assert (record.outcome, record.tokens) == (StreamOutcome.OK, None)


def test_a_fault_before_the_answer_is_a_failure_and_after_it_a_break() -> None:
    stream = AnswerStream(TraceRequest(0, 0.0, 5, 2), sent_s=0.0)
    stream.fail("ConnectError", "refused", 1.0)
    assert stream.record(9.0).outcome is StreamOutcome.FAILED
    stream.open()
    assert stream.record(9.0).outcome is StreamOutcome.BROKEN


def test_a_running_answer_counts_as_cancelled() -> None:
    record = AnswerStream(TraceRequest(0, 0.0, 5, 2), sent_s=1.0).record(9.0)
    assert (record.outcome, record.ended_s, record.ttft_s) == (StreamOutcome.CANCELLED, 9.0, None)
