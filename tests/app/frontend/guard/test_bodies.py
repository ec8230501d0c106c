"""Bodies that reach vLLM, those that are refused before it, and what they are charged."""

import json
from typing import Any

import msgspec
import pytest

from app.frontend.guard.bodies import (
    DEFAULT_CHARGE_TOKENS,
    MAX_DEPTH,
    MAX_LENGTH,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_VALUES,
    BodyLimits,
    check_body,
)
from app.frontend.guard.routes import OPEN_ROUTES
from app.ingress.errors import ApiError

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
BATCH, SCORING = "/v1/chat/completions/batch", "/generative_scoring"
LIMITS = BodyLimits(choices=8, prompt_tokens=100)


def passed(body: Any, path: str = COMPLETIONS) -> Any:
    """The body that reaches vLLM."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return json.loads(check_body(content, OPEN_ROUTES[path], LIMITS).content)


def refused(body: Any, path: str = COMPLETIONS) -> ApiError:
    """The refusal of a body."""
    with pytest.raises(ApiError) as error:
        passed(body, path)
    assert error.value.status == 400 and len(error.value.message) < 500
    return error.value


def charged(body: dict[str, Any], path: str = COMPLETIONS) -> int:
    return check_body(json.dumps(body).encode(), OPEN_ROUTES[path], LIMITS).max_tokens


def nested(levels: int) -> Any:
    """A value of that many levels."""
    return [nested(levels - 1)] if levels > 1 else []


# --- JSON -----------------------------------------------------------------------------------------------


def test_a_body_passes_as_it_is() -> None:
    body = {
        "prompt": "é\u0000\U0001f600",
        "n": 2,
        "unknown": {"b": [1.5, None, True, {"b": []}]},
        "seed": 2**63 - 1,
        "a": "9" * 30,
    }
    assert passed(body) == body


MALFORMED = {
    "nothing": b"",
    "NaN": b'{"prompt": NaN}',
    "infinity": b'{"a": -Infinity}',
    "a number above all": b'{"a": 1e999}',
    "five thousand digits": b'{"a": %s}' % (b"9" * 5000),
    "a control character": b'{"prompt": "\x00"}',
    "two values": b"{} {}",
    "ten thousand levels": b"[" * 10_000,
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
def test_a_body_that_is_no_json_is_refused(content: bytes) -> None:
    assert refused(content).code == "invalid_json"


READ = {
    "a byte order mark": b'\xef\xbb\xbf{"a": "x"}',
    "UTF-16": '{"a": "x"}'.encode("utf-16"),
    "UTF-32 without a mark": '{"a": "x"}'.encode("utf-32-le"),
}


@pytest.mark.parametrize("content", READ.values(), ids=READ)
def test_a_body_in_another_encoding_is_read(content: bytes) -> None:
    assert passed(content) == {"a": "x"}


@pytest.mark.parametrize("content", [b'{"user": "\\ud800"}', b'{"user": "\xed\xa0\x80"}'], ids=["escaped", "in UTF-8"])
def test_half_of_a_surrogate_pair_passes_as_it_is(content: bytes) -> None:
    assert passed(content) == {"user": "\ud800"}
    assert passed(content.replace(b"user", b"a\\ud83db")) == {"a\ud83db": "\ud800"}


def test_a_stop_string_with_half_of_a_surrogate_pair_is_refused() -> None:
    assert refused({"stop": ["x", "\ud83d"]}).param == refused({"stop": "a\udc00"}).param == "stop"
    assert passed({"stop": ["\U0001f600"]})


def test_long_numbers_are_found_in_every_encoding() -> None:
    assert refused('{"a": 123456789012345678901234567890}'.encode("utf-16")).param == "a"


CONVERTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "1 as true": ({"stream": 1}, {"stream": True}),
    "a text as true": ({"stream": "true"}, {"stream": True}),
    "0 as false": ({"stream": 0}, {"stream": False}),
    "a whole number with a point": ({"n": 2.0}, {"n": 2}),
    "a number in a text": ({"n": "3"}, {"n": 3}),
    "token ids with points": ({"prompt": [5.0, 6]}, {"prompt": [5, 6]}),
    "lists of token ids with points": ({"prompt": [[5.0], [6]]}, {"prompt": [[5], [6]]}),
}


@pytest.mark.parametrize(("given", "read"), CONVERTED.values(), ids=CONVERTED)
def test_values_are_converted_as_vllm_does(given: dict[str, Any], read: dict[str, Any]) -> None:
    assert passed(given) == read


@pytest.mark.parametrize("given", [{"stream": 2}, {"stream": "perhaps"}, {"n": 1.5}, {"n": "two"}, {"prompt": [5.5]}])
def test_values_of_no_such_kind_are_refused(given: dict[str, Any]) -> None:
    assert refused(given).param == next(iter(given))


def test_choices_are_counted_after_the_conversion() -> None:
    assert refused({"n": "9"}).param == refused({"n": 9.0}).param == "n"


@pytest.mark.parametrize("content", [b"[]", b"5", b'"x"', b"null"])
def test_a_body_that_is_no_object_is_refused(content: bytes) -> None:
    assert refused(content).code == "invalid_body"


def test_vllm_reads_the_member_that_was_checked() -> None:
    content = check_body(b'{"n": 5, "prompt": "x", "n": 1}', OPEN_ROUTES[COMPLETIONS], LIMITS).content
    assert content.count(b'"n"') == 1 and passed(b'{"n": 5000, "prompt": "x", "n": 1}')["n"] == 1
    assert refused(b'{"n": 1, "prompt": "x", "n": 5000}').param == "n"


def test_depth_is_bounded() -> None:
    assert passed({"a": nested(MAX_DEPTH - 1)})
    assert refused({"a": nested(MAX_DEPTH)}).code == "invalid_json"
    assert refused({"a": nested(500)}).code == "invalid_json"


MANY: dict[str, Any] = {
    "members": {f"x{n}": n for n in range(MAX_LENGTH + 1)},
    "empty objects": {"messages": [{}] * (MAX_LENGTH + 1)},
    "numbers": {"messages": [{"role": "user", "content": [5] * (MAX_LENGTH + 1)}]},
    "mixed prompts": {"prompt": ["x", 5] * (MAX_LENGTH // 2 + 1)},
    "short prompts": {"prompt": [[1]] * (MAX_LENGTH + 1)},
    "truths": {"allowed_token_ids": [True] * (MAX_LENGTH + 1)},
    "negative token ids": {"tokens": [-1] * (MAX_LENGTH + 1)},
    "values in all": {"tools": [{"function": {f"x{n}": n for n in range(200)}} for _ in range(MAX_VALUES // 200)]},
}


@pytest.mark.parametrize("body", MANY.values(), ids=MANY)
def test_the_number_of_values_is_bounded(body: Any) -> None:
    assert refused(body, CHAT).code == "invalid_body"


def test_many_token_ids_and_texts_with_commas_pass() -> None:
    assert passed({"tokens": [7] * (5 * MAX_VALUES)}, "/detokenize")
    assert passed({"prompt": "a, " * (2 * MAX_VALUES)})


def test_a_chat_of_many_messages_passes() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 2000
    assert passed({"messages": messages}, CHAT)["messages"] == messages


TYPES: list[tuple[str, Any]] = [
    ("messages", 5),
    ("messages", [5]),
    ("messages", {"role": "user"}),
    ("tools", [5]),
    ("tools", "f"),
    ("n", [1]),
    ("structured_outputs", []),
    ("stream_options", 5),
    ("vllm_xargs", []),
    ("request_id", 5),
]


@pytest.mark.parametrize(("name", "value"), TYPES, ids=str)
def test_a_member_of_a_wrong_type_is_named(name: str, value: Any) -> None:
    assert refused({"prompt": "x", name: value}).param == name


@pytest.mark.parametrize(
    "tool", [{}, {"function": {}}, {"function": 5}, {"function": {"name": 5}}, {"name": "f"}], ids=str
)
def test_a_named_function_needs_named_tools(tool: dict[str, Any]) -> None:
    choice = {"type": "function", "function": {"name": "f"}}
    assert refused({"messages": [], "tools": [tool], "tool_choice": choice}, CHAT).param == "tools"
    passed({"messages": [], "tools": [{"function": {"name": "f"}}], "tool_choice": choice}, CHAT)
    passed({"messages": [], "tools": [tool], "tool_choice": {"type": "any"}}, MESSAGES)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**30, [1, 10**30], {"a": [{"b": 10**30}]}], ids=str)
def test_a_number_of_more_than_64_bits_is_named(value: Any) -> None:
    assert refused({"prompt": "x", "top_k": value}).param == "top_k"


@pytest.mark.parametrize("name", ["messages", "tools", "n", "stream", "structured_outputs", "vllm_xargs", "request_id"])
def test_null_is_no_value(name: str) -> None:
    passed({"prompt": "x", name: None})


# --- members that are not the client's --------------------------------------------------------------------

PRIVATE: list[dict[str, Any]] = [
    {"kv_transfer_params": {"mell_load": {"segment": "/etc/passwd"}}},
    {"kv_transfer_params": {}},
    {"kv_transfer_params": "x"},
    {"ec_transfer_params": {"a": 1}},
    {"vllm_xargs": {"kv_transfer_params": "{}"}},
    {"vllm_xargs": {"ec_transfer_params": 1}},
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("members", PRIVATE, ids=str)
def test_members_for_connectors_are_refused(path: str, members: dict[str, Any]) -> None:
    error = refused({"prompt": "x", **members}, path)
    assert (error.param, error.code) in (
        ("kv_transfer_params", "unsupported_parameter"),
        ("ec_transfer_params", "unsupported_parameter"),
    )


def test_members_that_route_are_dropped() -> None:
    body = {"prompt": "x", "session_id": "s", "vllm_xargs": {"session_id": "s", "mine": 1}, "kv_transfer_params": None}
    assert passed(body) == {"prompt": "x", "vllm_xargs": {"mine": 1}}


def test_a_request_id_is_a_label() -> None:
    assert passed({"prompt": "x", "request_id": "mine\n" + "a" * 1000})["request_id"] == "mine" + "a" * 124
    assert passed({"prompt": "x", "request_id": "\x00"}) == {"prompt": "x"}


# --- bounds -----------------------------------------------------------------------------------------------

WITHIN: list[dict[str, Any]] = [
    {"prompt": ["x"] * 8},
    {"prompt": ["x"] * 4, "n": 2},
    {"prompt": [[1]] * 4, "n": 2},
    {"prompt": "x", "n": 8},
    {"prompt": list(range(100)), "n": 8},
    {"prompt": "x", "stop": ["a"] * MAX_STOPS},
    {"prompt": "x", "stop": "a" * MAX_STOP_CHARACTERS},
    {"prompt": "x", "logit_bias": {str(n): 1 for n in range(1024)}},
    {"prompt": "x", "allowed_token_ids": list(range(1024))},
    {"prompt": "x", "stop_token_ids": list(range(120))},
]
BEYOND: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": ["x"] * 9}),
    ("n", {"prompt": ["x"] * 5, "n": 2}),
    ("n", {"prompt": [[1]] * 5, "n": 2}),
    ("n", {"prompt": "x", "n": 9}),
    ("n", {"prompt": "x", "n": 2**62}),
    ("n", {"prompt": "x", "n": 9, "use_beam_search": True}),
    ("prompt", {"prompt_embeds": ["x"] * 9}),
    ("prompt", {"prompt": list(range(101))}),
    ("prompt", {"prompt": [[1], [1] * 101]}),
    ("prompt", {"prompt": [1, -1]}),
    ("prompt", {"prompt": [[1], [-1]]}),
    ("prompt", {"prompt": [1, "x"]}),
    ("prompt", {"prompt": [1.5]}),
    ("prompt", {"prompt": [True]}),
    ("prompt", {"prompt": [[1], "x"]}),
    ("prompt", {"prompt": [["x"]]}),
    ("stop", {"prompt": "x", "stop": ["a"] * (MAX_STOPS + 1)}),
    ("stop", {"prompt": "x", "stop": ["a" * (MAX_STOP_CHARACTERS + 1)]}),
    ("stop_sequences", {"prompt": "x", "stop_sequences": ["a"] * (MAX_STOPS + 1)}),
    ("logit_bias", {"prompt": "x", "logit_bias": {str(n): 1 for n in range(1025)}}),
    ("allowed_token_ids", {"prompt": "x", "allowed_token_ids": list(range(1025))}),
    ("stop_token_ids", {"prompt": "x", "stop_token_ids": list(range(121))}),
    ("cache_salt", {"prompt": "x", "cache_salt": "a" * 257}),
    ("structured_outputs", {"prompt": "x", "structured_outputs": {"json": {"pattern": "a{9999}"}}}),
]


ELSEWHERE: list[tuple[str, str, dict[str, Any]]] = [
    (BATCH, "messages", {"messages": [[{}]] * 9}),
    (BATCH, "messages", {"messages": [{}]}),
    (BATCH, "messages", {"messages": [[5]]}),
    (BATCH, "messages", {"messages": 5}),
    (CHAT, "messages", {"messages": [[{}]]}),
    (SCORING, "items", {"items": ["x"] * 9}),
    (SCORING, "items", {"items": [[1] * 101]}),
    (SCORING, "items", {"items": [[-1]]}),
    (SCORING, "label_token_ids", {"label_token_ids": list(range(1025))}),
    (RESPONSES, "background", {"background": True}),
    (RESPONSES, "previous_response_id", {"previous_response_id": "resp_1"}),
]


@pytest.mark.parametrize(("path", "member", "body"), ELSEWHERE, ids=lambda value: str(value)[:40])
def test_bounds_of_other_routes(path: str, member: str, body: dict[str, Any]) -> None:
    assert refused(body, path).param == member


def test_several_inputs_of_other_routes_pass() -> None:
    assert passed({"messages": [[{}]] * 8}, BATCH) and passed({"items": ["x"] * 8}, SCORING)
    assert passed({"background": False, "previous_response_id": None, "store": True}, RESPONSES)


def test_a_score_is_charged_one_token_for_each_item() -> None:
    content = json.dumps({"query": [1] * 10, "items": [[1] * 20] * 4}).encode()
    assert check_body(content, OPEN_ROUTES[SCORING], LIMITS).max_tokens == 4 * 20 + 4


@pytest.mark.parametrize("body", WITHIN, ids=lambda body: str(body)[:40])
def test_what_is_within_the_bounds_passes(body: dict[str, Any]) -> None:
    assert passed(body) == body


@pytest.mark.parametrize(("param", "body"), BEYOND, ids=lambda value: str(value)[:40])
def test_what_is_beyond_a_bound_is_named(param: str, body: dict[str, Any]) -> None:
    assert refused(body).param == param


def test_a_long_prompt_has_openais_code() -> None:
    assert refused({"prompt": [1] * 101}).code == "context_length_exceeded"


@pytest.mark.parametrize("name", ["input", "documents", "texts", "text_2"])
def test_the_inputs_of_pooling_are_bounded(name: str) -> None:
    assert passed({name: ["x"] * MAX_LENGTH}, "/v1/embeddings")
    assert refused({name: ["x"] * (MAX_LENGTH + 1)}, "/v1/embeddings").code == "invalid_body"
    assert passed({name: [5] * (MAX_LENGTH + 1)}, "/v1/embeddings"), "token ids are one input"


# --- charges ----------------------------------------------------------------------------------------------


def test_token_ids_are_charged_exactly() -> None:
    assert charged({"prompt": [1] * 50, "max_tokens": 5}) == 55
    assert charged({"prompt": [[1] * 50, [1] * 10], "n": 2, "max_tokens": 5}) == 60 + 4 * 5


def test_text_is_charged_by_its_length() -> None:
    text = {"prompt": "x" * 4000, "max_tokens": 5}
    assert charged(text) == len(msgspec.json.encode(text)) // 4 + 5


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        (COMPLETIONS, {"prompt": [1]}, 16),
        (CHAT, {"messages": []}, DEFAULT_CHARGE_TOKENS),
        (CHAT, {"messages": [], "max_tokens": 90, "max_completion_tokens": 80}, 80),
        (RESPONSES, {"input": "x", "max_output_tokens": 70}, 70),
        (CHAT, {"messages": [], "max_tokens": -5}, DEFAULT_CHARGE_TOKENS),
        ("/tokenize", {"prompt": "x", "max_tokens": 90}, 0),
        ("/v1/embeddings", {"input": "x"}, 0),
    ],
)
def test_the_answer_is_charged_its_longest(path: str, body: dict[str, Any], answer: int) -> None:
    prompt = 1 if path == COMPLETIONS else len(msgspec.json.encode(body)) // 4
    assert charged(body, path) == prompt + answer


# --- inputs of pooling models -----------------------------------------------------------------------------

EMBEDDINGS, SCORE = "/v1/embeddings", "/score"
INPUTS: dict[str, Any] = {
    "a text": "a",
    "texts": ["a", "b"],
    "token ids": [0, 5],
    "lists of token ids": [[1], [2, 3]],
    "messages": [{"role": "user", "content": "a"}],
    "lists of messages": [[{"role": "user", "content": "a"}]],
    "nothing": [],
    "another type, which is vLLM's to refuse": 5,
}


@pytest.mark.parametrize("given", INPUTS.values(), ids=INPUTS)
def test_inputs_pass(given: Any) -> None:
    assert passed({"input": given}, EMBEDDINGS) == {"input": given}


NO_INPUTS: dict[str, Any] = {
    "texts and token ids": ["a", 5],
    "numbers as texts": ["5", 5],
    "truths": [True, False],
    "fractions": [1.0, 2.0],
    "token ids and nothing": [5, None],
    "token ids and truths": [[5, True]],
    "fractions in lists": [[5, -2.0]],
    "texts in lists": [["-2", "-3"]],
    "messages and token ids": [[{"role": "user"}, 5]],
    "lists and token ids": [[5], 5],
    "token ids below zero": [5, -1],
    "token ids below zero in lists": [[5], [-1, 5]],
}


@pytest.mark.parametrize("given", NO_INPUTS.values(), ids=NO_INPUTS)
def test_inputs_from_which_vllm_would_make_token_ids_are_refused(given: Any) -> None:
    assert refused({"input": given}, EMBEDDINGS).param == "input"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (EMBEDDINGS, {"input": ["a"] * (MAX_LENGTH + 1)}),
        (SCORE, {"queries": "a", "documents": ["a"] * (MAX_LENGTH + 1)}),
    ],
    ids=["inputs", "documents"],
)
def test_the_number_of_inputs_is_bounded(path: str, body: dict[str, Any]) -> None:
    refused(body, path)
    assert passed({name: "a" if value == "a" else value[1:] for name, value in body.items()}, path)


def test_inputs_are_charged_by_their_tokens() -> None:
    assert charged({"input": [[1, 2, 3], [4, 5]]}, EMBEDDINGS) == 5
    assert charged({"input": [7] * 3000}, EMBEDDINGS) == 3000
    assert charged({"input": "a" * 400}, EMBEDDINGS) in range(100, 110)


# --- work in an engine's loop -----------------------------------------------------------------------------

CHEAP = {
    "none": {"max_pattern_size": 0, "min_pattern_size": 0, "min_count": 0},
    "twice": {"max_pattern_size": 140, "min_count": 2},
    "three times": {"max_pattern_size": 99, "min_pattern_size": None, "min_count": 3},
    "one long pattern": {"max_pattern_size": 9_000, "min_pattern_size": 9_000, "min_count": 2},
    "what is no number": {"max_pattern_size": "x"},
}
COSTLY = {
    "of every size": {"max_pattern_size": 142, "min_count": 2},
    "many times": {"max_pattern_size": 10, "min_pattern_size": 1, "min_count": 300},
    "of large sizes": {"max_pattern_size": 4_000, "min_pattern_size": 3_990, "min_count": 2},
    "with a point": {"max_pattern_size": 200.0, "min_count": 2.0},
    "in a text": {"max_pattern_size": "200", "min_count": "2"},
}


@pytest.mark.parametrize("detection", CHEAP.values(), ids=CHEAP)
def test_repetitions_are_detected_at_a_bounded_cost(detection: dict[str, Any]) -> None:
    assert passed({"repetition_detection": detection})


@pytest.mark.parametrize("detection", COSTLY.values(), ids=COSTLY)
def test_a_costly_detection_of_repetitions_is_refused(detection: dict[str, Any]) -> None:
    assert refused({"repetition_detection": detection}).param == "repetition_detection"


def test_a_detection_counts_once_per_choice() -> None:
    detection = {"max_pattern_size": 99, "min_count": 3}
    assert refused({"repetition_detection": detection, "n": 2}).param == "repetition_detection"
