"""Decoding of a stream's bytes into events."""

import pytest

from app.client.errors import BadAnswer
from app.client.sse import Event, EventDecoder


def decoded(*pieces: bytes) -> tuple[list[Event], bool]:
    """The events of a stream that arrives in the given chunks; and True if `[DONE]` arrived."""
    decoder = EventDecoder()
    events = [event for data in pieces for event in decoder.feed(data)]
    return events, decoder.done


def test_an_event_ends_at_its_line_feed_in_any_chunking() -> None:
    stream = b'data: {"a": 1}\r\n\r\ndata: {"a": 2}\n\ndata: [DONE]\n\n'
    for cut in range(len(stream)):
        assert decoded(stream[:cut], stream[cut:]) == ([{"a": 1}, {"a": 2}], True)
    assert decoded(stream[:-3]) == ([{"a": 1}, {"a": 2}], False)


def test_comments_and_other_fields_are_no_events() -> None:
    assert decoded(b": ping\nevent: x\nid: 3\n\n") == ([], False)


def test_separators_that_json_does_not_escape_do_not_end_a_line() -> None:
    text = "\u0085\u2028"
    assert decoded(f'data: {{"a": "{text}"}}\n'.encode()) == ([{"a": text}], False)


@pytest.mark.parametrize("payload", [b"{half", b"5", b"[]", b"\xff"])
def test_an_event_other_than_an_object_is_malformed(payload: bytes) -> None:
    with pytest.raises(BadAnswer) as raised:
        decoded(b'data: {"a": 1}\n\ndata: ' + payload + b"\n")
    assert raised.value.kind == "malformed event"


def test_events_before_a_malformed_one_are_not_lost() -> None:
    events = EventDecoder().feed(b'data: {"a": 1}\ndata: 5\n')
    assert next(events) == {"a": 1}


def test_a_stream_ends_only_with_done() -> None:
    decoder = EventDecoder()
    with pytest.raises(BadAnswer, match=r"without \[DONE\]"):
        decoder.end()
    list(decoder.feed(b"data: [DONE]\n"))
    decoder.end()
