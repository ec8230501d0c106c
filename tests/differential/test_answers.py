"""Answers in one form: streams joined however they were cut, identifiers and times replaced."""

import json
from typing import Any

import pytest

from tests.differential.answers import Json, ServerAnswer, joined, normalised


def chunk(text: str, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"id": "cmpl-1", "choices": [{"index": index, "text": text, "finish_reason": None, **more}]}


def test_chunks_become_one_document() -> None:
    whole = joined([chunk("a"), chunk("b", finish_reason="stop"), {"id": "cmpl-1", "choices": [], "usage": {"n": 2}}])
    assert whole["choices"] == [{"index": 0, "text": "ab", "finish_reason": "stop"}]
    assert whole["usage"] == {"n": 2}


def test_cuts_and_the_order_of_choices_do_not_matter() -> None:
    one = joined([chunk("a"), chunk("x", 1), chunk("bc"), chunk("y", 1)])
    other = joined([chunk("xy", 1), chunk("ab"), chunk("c")])
    assert one == other
    assert one != joined([chunk("xy", 1), chunk("ab"), chunk("d")])


def test_logprobs_and_token_ids_continue() -> None:
    chunks = [
        chunk("a", token_ids=[1], logprobs={"tokens": ["a"]}),
        chunk("b", token_ids=[2], logprobs={"tokens": ["b"]}),
    ]
    (choice,) = joined(chunks)["choices"]
    assert (choice["token_ids"], choice["logprobs"]) == ([1, 2], {"tokens": ["a", "b"]})


def test_parts_of_a_call_are_joined_within_a_chunk_and_across() -> None:
    def called(*parts: dict[str, Any]) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": part} for part in parts]}}]}

    together = joined([called({"name": "move", "arguments": ""}, {"arguments": '{"a"'}), called({"arguments": ":1}"})])
    apart = joined(
        [called({"name": "move", "arguments": ""}), called({"arguments": '{"a":1'}), called({"arguments": "}"})]
    )
    assert together == apart
    assert apart["choices"][0]["delta"]["tool_calls"][0]["function"] == {"name": "move", "arguments": '{"a":1}'}


def test_a_completion_that_breaks_off_keeps_its_error() -> None:
    whole, error = joined([chunk("a"), {"error": {"code": 500}}])
    assert whole["choices"][0]["text"] == "a" and error == {"error": {"code": 500}}


def delta(text: str, index: int = 0) -> dict[str, Any]:
    return {"type": "response.output_text.delta", "output_index": index, "delta": text, "sequence_number": 5}


def test_typed_events_keep_their_order_but_not_their_cuts() -> None:
    begin, end = {"type": "response.created", "sequence_number": 0}, {"type": "response.completed"}
    events = joined([begin, delta("a"), delta("b"), delta("c", 1), end])
    assert [event.get("delta") for event in events] == [None, "ab", "c", None]
    assert events == joined([begin, delta("ab"), delta("c", 1), end])
    assert events != joined([begin, delta("c", 1), delta("ab"), end])
    assert not any("sequence_number" in event for event in events)


def test_deltas_of_blocks_are_joined_by_kind() -> None:
    def block(kind: str, **more: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": 0, "delta": {"type": kind, **more}}

    events = [block("thinking_delta", thinking="so"), block("text_delta", text="mu"), block("text_delta", text="ch")]
    assert [event["delta"] for event in joined(events)] == [
        {"type": "thinking_delta", "thinking": "so"},
        {"type": "text_delta", "text": "much"},
    ]


def test_identifiers_are_numbered_and_stay_equal() -> None:
    document = {"id": "resp_abc", "output": [{"id": "msg_x"}, {"item_id": "msg_x", "call_id": "9f"}], "model": "m"}
    assert normalised(document) == {
        "id": "resp#0",
        "output": [{"id": "msg#1"}, {"item_id": "msg#1", "call_id": "#2"}],
        "model": "m",
    }
    assert normalised({"id": "resp_abc", "item_id": "msg_x"}) != normalised({"id": "resp_abc", "item_id": "resp_abc"})


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ({"created": 1}, {"created": 2}, True),
        ({"created": 1}, {"created": None}, False),
        ({"system_fingerprint": "a"}, {"system_fingerprint": "b"}, True),
        ({"system_fingerprint": "a"}, {"system_fingerprint": None}, False),
        ({"cached_tokens": 0}, {"cached_tokens": 32}, True),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"created_cache_tokens": 8}}, {"prompt_tokens": 9}, True),
        ({"input_tokens": 1, "cache_read_input_tokens": 8}, {"input_tokens": 9}, True),
        ({"input_tokens": 1, "cache_read_input_tokens": 8}, {"input_tokens": 1}, False),
        ({"text": "a"}, {"text": "b"}, False),
        ({"tokens": [1]}, {"tokens": [2]}, False),
    ],
    ids=str,
)
def test_only_times_fingerprints_and_the_cache_are_left_out(one: Any, other: Any, equal: bool) -> None:
    assert (normalised(one) == normalised(other)) is equal


def test_a_stream_of_server_sent_events() -> None:
    lines = [f"data: {json.dumps(chunk('a'))}", "", f"data: {json.dumps(chunk('b'))}", "", "data: [DONE]", ""]
    answer = ServerAnswer.stream(200, "text/event-stream", lines)
    assert answer.ended and answer.document["choices"][0]["text"] == "ab"
    assert not ServerAnswer.stream(200, "text/event-stream", lines[:-2]).ended


def test_names_of_events_belong_to_them() -> None:
    answer = ServerAnswer.stream(
        200, "", ["event: message_stop", 'data: {"type": "message_stop"}', "", 'data: {"a": 1}']
    )
    assert answer.document == [{"event": "message_stop", "type": "message_stop"}, {"a": 1}]


def test_what_is_no_event_is_refused() -> None:
    with pytest.raises(ValueError, match="not an event"):
        ServerAnswer.stream(200, "", ["oops"])


def test_an_answer_that_is_not_json_is_its_text() -> None:
    assert ServerAnswer.whole(502, "text/plain", "no").document == "no"


@pytest.mark.parametrize(
    ("document", "error"),
    [
        ({"error": {"code": 400}}, {"code": 400}),
        ([{"choices": []}, {"error": {"code": 500}}], {"code": 500}),
        ({"id": "resp_1", "error": None}, None),
        ("no", None),
        ([], None),
    ],
    ids=str,
)
def test_the_error_of_an_answer(document: Any, error: Any) -> None:
    assert ServerAnswer(400, "", document).error == error


def test_the_usage_of_every_endpoint() -> None:
    chat = ServerAnswer(200, "", {"usage": {"prompt_tokens": 3, "completion_tokens": 4}})
    message = ServerAnswer(
        200, "", [{"message": {"usage": {"input_tokens": 3, "output_tokens": 0}}}, {"usage": {"output_tokens": 4}}]
    )
    for answer in (chat, message):
        assert (answer.prompt_tokens, answer.output_tokens) == (3, 4)
    assert ServerAnswer(200, "", {}).prompt_tokens is None


def test_a_mark_within_streamed_reasoning_makes_no_difference() -> None:
    def streamed(*texts: str) -> Json:
        return joined([{"type": "content_block_delta", "index": 0, "delta": {"thinking": text}} for text in texts])

    assert streamed("a", "<think> b") == streamed("a", " b") == streamed("a b") != streamed("a c")
