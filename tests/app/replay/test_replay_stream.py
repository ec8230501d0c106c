"""One answer, fed line by line at times of our choosing."""

import pytest

from app.replay.stream import Lines, Outcome, Record, Stream, message_of
from app.replay.trace import Arrival
from tests.app.replay.fake_endpoint import event

DONE = "data: [DONE]\n\n"
CHUNK = event(choices=[{"text": "x", "finish_reason": None}])
LAST = event(choices=[{"text": "", "finish_reason": "length"}])
USAGE = event(choices=[], usage={"completion_tokens": 2})


def answered(*events: str, wanted: int = 2) -> Record:
    """The record of an answer whose events came a second apart, the first one second after sending."""
    stream = Stream(Arrival(0, 0.0, 5, wanted), sent_s=0.0)
    stream.open()
    for now_s, text in enumerate(events, start=1):
        for line in Lines().feed(text.encode()):
            stream.feed(line, float(now_s))
    stream.end(float(len(events)))
    return stream.record(99.0)


def test_a_whole_answer_is_ok_and_has_its_times() -> None:
    record = answered(CHUNK, CHUNK, LAST, USAGE, DONE)
    assert (record.outcome, record.tokens, record.ended_s) == (Outcome.OK, 2, 5.0)
    assert (record.ttft_s, record.gaps_s) == (1.0, (1.0,))


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ((CHUNK, CHUNK, USAGE), "no [DONE]"),
        ((), "no [DONE]"),
        ((CHUNK, event(choices=[], usage={"completion_tokens": 1}), DONE), "too few tokens"),
        ((CHUNK, event(error={"message": "died"}), DONE), "error event"),
        ((CHUNK, "data: {half\n", DONE), "malformed event"),
        ((CHUNK, "data: 5\n", DONE), "malformed event"),
    ],
    ids=["no done", "nothing at all", "too few", "error event", "not JSON", "not an object"],
)
def test_an_answer_that_is_not_whole_is_broken(events: tuple[str, ...], kind: str) -> None:
    record = answered(*events)
    assert record.outcome is Outcome.BROKEN
    assert record.fault is not None
    assert record.fault.kind == kind


def test_without_usage_the_tokens_are_unknown_and_not_too_few() -> None:
    record = answered(CHUNK, DONE)
    assert (record.outcome, record.tokens) == (Outcome.OK, None)


def test_comments_and_other_fields_are_no_chunks() -> None:
    assert answered(": ping\n", "event: x\nid: 3\n", CHUNK, DONE).chunks_s == (3.0,)


def test_a_fault_before_the_answer_is_a_failure_and_after_it_a_break() -> None:
    stream = Stream(Arrival(0, 0.0, 5, 2), sent_s=0.0)
    stream.fail("ConnectError", "refused", 1.0)
    assert stream.record(9.0).outcome is Outcome.FAILED
    stream.open()
    assert stream.record(9.0).outcome is Outcome.BROKEN


def test_an_answer_still_coming_is_cancelled_at_the_time_it_is_asked_for() -> None:
    record = Stream(Arrival(0, 0.0, 5, 2), sent_s=1.0).record(9.0)
    assert (record.outcome, record.ended_s, record.ttft_s) == (Outcome.CANCELLED, 9.0, None)


def test_lines_wait_for_their_end_and_break_nowhere_else() -> None:
    lines = Lines()
    assert lines.feed(b"data: a") == []
    text = "\u0085\u2028\x0b".encode()
    assert lines.feed(text + b"\r\n\ndata") == [b"data: a" + text, b""]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "full", "code": 1}}', "full"),
        (b'{"error": "full"}', "full"),
        (b'{"detail": "full"}', "full"),
        (b"full", "full"),
        (b"[1]", "[1]"),
    ],
)
def test_error_bodies_of_several_shapes_have_a_message(body: bytes, message: str) -> None:
    assert message_of(body) == message
