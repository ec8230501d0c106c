"""Invalid bodies: each gets a 4xx in OpenAI's shape that names the field, and has no effect."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from app.ingress.asgi import read_body
from app.ingress.openai.model import Model
from tests.app.ingress.fakes import MAX_CONTEXT, MESSAGES, PROMPT, Api, make_api

JSON = {"Content-Type": "application/json"}


def refusal(response: httpx.Response, status: int = 400) -> Any:
    """The error of a refusal in OpenAI's shape."""
    assert response.status_code == status, response.text[:300]
    (key, error), *others = response.json().items()
    assert (key, others) == ("error", []) and set(error) == {"message", "type", "param", "code"}
    assert error["message"] and len(error["message"]) < 5000
    return error


def untouched(api: Api) -> bool:
    """True if no request was begun."""
    service = api.backend.service
    submitted = any(method == "submit" for _, method in service.wires.calls)
    return not submitted and not service.streams.count and all(r.idle for r in service.replicas.values())


async def post(api: Api, content: bytes, path: str = "/v1/completions") -> httpx.Response:
    return await api.post(path, content=content, headers=JSON)


# --- fields -------------------------------------------------------------------------------------------

HUGE = 10**400
NAN, INFINITY = float("nan"), float("inf")

BOTH: dict[str, list[Any]] = {
    "model": [5, [], {}, True],
    "max_tokens": [0, -1, HUGE, -HUGE, MAX_CONTEXT, 1.5, 1.0, "5", True, [], {}],
    "min_tokens": [-1, HUGE, 1.5, "1", None, True, MAX_CONTEXT],
    "temperature": [-0.1, 2.1, HUGE, NAN, INFINITY, -INFINITY, "1", True, [], {}],
    "top_p": [0, -0.1, 1.1, NAN, INFINITY, -INFINITY, "1", True, []],
    "top_k": [-2, 1.5, "1", True, []],
    "min_p": [-0.1, 1.1, NAN, INFINITY, "1", True, []],
    "seed": [1 << 63, -(1 << 63) - 1, HUGE, 1.5, "1", True, []],
    "presence_penalty": [-2.1, 2.1, NAN, INFINITY, "0", True, []],
    "frequency_penalty": [-2.1, 2.1, NAN, -INFINITY, "0", True, []],
    "repetition_penalty": [0, -1, NAN, INFINITY, HUGE, "1", True, []],
    "logit_bias": [
        *([], 5, "5", {"x": 1}, {"5": "1"}, {"5": 101}, {"5": -101}, {"5": NAN}, {"5": None}, {"": 1}, {"1.5": 1}),
        *({"512": 1}, {"-1": 1}, {str(HUGE): 1}, {str(n): 1 for n in range(1025)}),
    ],
    "stop": ["", [""], ["a", ""], ["a"] * 17, 5, True, [5], [None], [["a"]], {}],
    "stop_token_ids": [5, "5", [512], [-1], [HUGE], [5, "5"], [1.5], [None], [True], [5] * 129, {}],
    "ignore_eos": [1, "true", None, []],
    "stream": [1, "true", []],
    "stream_options": [{}, {"include_usage": True}, 5, True, []],
    "user": [5, [], {}],
    "priority": ["high", 1.5, None, 2**63],
    "n": [17, 0, -1, HUGE, 1.5, "1", True, []],
}
COMPLETION: dict[str, list[Any]] = {
    "prompt": [
        *(5, 1.5, True, {}, "", [], [""], ["a", ""], ["a", 5], [5, "a"], [[]], [[1], []], [[1], "a"], [[1.5]]),
        *([1.5], [1.0], [True], [None], [-1], [1, -1], [[1], [-1]], [["a"]], [[[1]]], ["a"] * 129, [[5]] * 129),
        *([512], [HUGE], [-HUGE], [1] * (MAX_CONTEXT + 1), [1] * MAX_CONTEXT, "word " * MAX_CONTEXT),
    ],
    "best_of": [2, 0, "1", True],
    "echo": ["false", 1],
    "logprobs": [6, -1, HUGE, 1.5, "1", True],
    "suffix": ["", "x"],
}
CHAT: dict[str, list[Any]] = {
    "max_completion_tokens": [0, -1, HUGE, MAX_CONTEXT, 1.5, "5", True],
    "tools": [[], {}, 5, "f"],
    "tool_choice": ["auto", "required", "f", {}, 5, {"type": "function", "function": {"name": "f"}}],
    "parallel_tool_calls": [0, "false", []],
    "functions": [[], [{"name": "f"}]],
    "function_call": ["auto", {"name": "f"}],
    "response_format": [
        "text",
        5,
        {"type": "json_schema"},
        {"type": "text", "json_schema": {"name": "x", "schema": {}}},
    ],
    "logprobs": [1, "false"],
    "top_logprobs": [1, 21, -1, HUGE, 1.5, "1", True],
}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": PROMPT}, CHATS: {"messages": MESSAGES}}
WRONG = {COMPLETIONS: BOTH | COMPLETION, CHATS: BOTH | CHAT}
CASES = [(path, name, value) for path, fields in WRONG.items() for name, values in fields.items() for value in values]


def name(value: Any) -> str:
    return value if isinstance(value, str) and len(value) < 30 else str(value)[:30]


@pytest.mark.parametrize(("path", "field", "value"), CASES, ids=name)
async def test_a_wrong_field_is_named(api: Api, path: str, field: str, value: Any) -> None:
    error = refusal(await post(api, json.dumps({**BODIES[path], field: value}).encode(), path))
    assert error["type"] == "invalid_request_error" and untouched(api)
    assert error["param"] == ("max_tokens" if value == "word " * MAX_CONTEXT or field == "max_tokens" else field) or (
        field == "prompt" and error["code"] == "context_length_exceeded"
    )
    assert error["param"] in error["message"]


def user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


def picture(**extra: Any) -> Any:
    return {"type": "image_url", "image_url": {"url": "https://x/y.png"}, **extra}


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
WRONG_MESSAGES: dict[str, tuple[Any, str]] = {
    "null": (None, "messages"),
    "none": ([], "messages"),
    "a text": ("hello", "messages"),
    "an object": ({"role": "user", "content": "x"}, "messages"),
    "a list of texts": (["hello"], "messages[0]"),
    "no role": ([{"content": "x"}], "messages[0].role"),
    "an unknown role": ([{"role": "robot", "content": "x"}], "messages[0].role"),
    "no content": ([{"role": "user"}], "messages[0].content"),
    "null for content": (user(None), "messages[0].content"),
    "a number for content": (user(5), "messages[0].content"),
    "an object for content": (user({"type": "text", "text": "x"}), "messages[0].content"),
    "no parts": (user([]), "messages[0].content"),
    "a part that is a text": (user(["x"]), "messages[0].content"),
    "a picture": (user([{"type": "text", "text": "x"}, picture()]), "messages[0].content"),
    "a picture with a text": (user([picture(text="x")]), "messages[0].content"),
    "sound": (user([{"type": "input_audio", "input_audio": {}}]), "messages[0].content"),
    "a part without text": (user([{"type": "text"}]), "messages[0].content"),
    "a part with a number": (user([{"type": "text", "text": 5}]), "messages[0].content"),
    "a part with more": (user([{"type": "text", "text": "x", "y": 1}]), "messages[0].content"),
    "the second": ([*user("x"), *user(5)], "messages[1].content"),
    "a user's call": ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
    "calls that are an object": ([{"role": "assistant", "tool_calls": CALL}], "messages[0].tool_calls"),
    "an assistant without a word": ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content"),
    "a call of nothing": ([{"role": "assistant", "tool_calls": [{"id": "a"}]}], "messages[0].tool_calls[0].function"),
    "a call without an id": (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
        "messages[0].tool_calls[0].id",
    ),
    "arguments that are no text": (
        [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
    "a function's call": ([{"role": "assistant", "content": "x", "function_call": {}}], "messages[0].function_call"),
    "an unknown member": ([{"role": "user", "content": "x", "mood": "good"}], "messages[0].mood"),
    "a name that is a number": ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
    "too much": (user("word " * MAX_CONTEXT), "messages"),
}


@pytest.mark.parametrize(("messages", "param"), WRONG_MESSAGES.values(), ids=WRONG_MESSAGES)
async def test_a_wrong_message_is_named_with_its_path(api: Api, messages: Any, param: str) -> None:
    error = refusal(await api.chat(messages=messages))
    assert error["param"] == param and param in error["message"] and untouched(api)


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ("f", "tools[0]"),
        ({"type": "function"}, "tools[0].function"),
        ({"type": "retrieval", "function": {"name": "f"}}, "tools[0].type"),
        ({"type": "function", "function": {}}, "tools[0].function.name"),
        ({"type": "function", "function": {"name": ""}}, "tools[0].function.name"),
        ({"type": "function", "function": {"name": "f", "parameters": []}}, "tools[0].function.parameters"),
        ({"type": "function", "function": {"name": "f", "mood": "good"}}, "tools[0].function.mood"),
    ],
    ids=str,
)
async def test_a_wrong_tool_is_named_with_its_path(api: Api, tool: Any, param: str) -> None:
    error = refusal(await api.chat(tools=[tool], tool_choice="required"))
    assert error["param"] == param and param in error["message"] and untouched(api)
    assert refusal(await api.post("/tokenize", json={"messages": MESSAGES, "tools": [tool]})) == error


@pytest.mark.parametrize("messages", [[], "hello", [{"role": "user"}], user([picture()])], ids=str)
async def test_invalid_chats_cannot_be_tokenized(api: Api, messages: Any) -> None:
    chat, tokens = [refusal(await api.post(path, json={"messages": messages})) for path in (CHATS, "/tokenize")]
    assert chat == tokens and chat["param"].startswith("messages")


async def test_two_limits_of_one_answer_are_refused(api: Api) -> None:
    error = refusal(await api.chat(max_tokens=5, max_completion_tokens=5))
    assert error["param"] == "max_completion_tokens" and "max_tokens" in error["message"]


@pytest.mark.parametrize(("bound", "shown"), [({"max_tokens": 5}, "5"), ({}, "16")], ids=["given", "default"])
async def test_a_limit_beyond_the_context_is_refused_at_once(api: Api, bound: Any, shown: str) -> None:
    error = refusal(await api.complete(min_tokens=17, **bound))
    assert error["param"] == "min_tokens" and shown in error["message"] and "17" in error["message"]


WRONG_TOKENS: dict[str, tuple[str, Any, str]] = {
    "nothing": ("/tokenize", {}, "prompt"),
    "both": ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
    "token ids": ("/tokenize", {"prompt": [5]}, "prompt"),
    "a word for yes": ("/tokenize", {"prompt": "x", "add_special_tokens": "yes"}, "add_special_tokens"),
    "an open end": ("/tokenize", {"messages": MESSAGES, "continue_final_message": True}, "continue_final_message"),
    "tools": ("/tokenize", {"messages": MESSAGES, "tools": []}, "tools"),
    "an unknown member": ("/tokenize", {"prompt": "x", "y": 1}, "y"),
    "no tokens": ("/detokenize", {}, "tokens"),
    "a text": ("/detokenize", {"tokens": "x"}, "tokens"),
    "an id that is none": ("/detokenize", {"tokens": [1, 512]}, "tokens"),
    "a negative id": ("/detokenize", {"tokens": [-1]}, "tokens"),
    "a huge id": ("/detokenize", {"tokens": [HUGE]}, "tokens"),
    "a yes": ("/detokenize", {"tokens": [True]}, "tokens"),
}


@pytest.mark.parametrize(("path", "content", "param"), WRONG_TOKENS.values(), ids=WRONG_TOKENS)
async def test_texts_without_tokens_are_named(api: Api, path: str, content: Any, param: str) -> None:
    error = refusal(await api.post(path, json=content))
    assert error["param"] == param and param in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/tokenize", "/detokenize"])
async def test_every_endpoint_refuses_another_model(api: Api, path: str) -> None:
    bodies: dict[str, dict[str, Any]] = {**BODIES, "/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [5]}}
    error = refusal(await api.post(path, json={**bodies[path], "model": "other"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found") and untouched(api)


@pytest.mark.parametrize("value", [{"include_usage": 1}, {"include_usage": "yes"}, {"other": True}, 5, []], ids=str)
async def test_wrong_stream_options_are_named(api: Api, value: Any) -> None:
    error = refusal(await api.complete(stream=True, stream_options=value))
    assert error["param"].startswith("stream_options") and untouched(api)


async def test_an_unknown_field_is_named(api: Api) -> None:
    error = refusal(await api.complete(max_token=5))
    assert (error["param"], error["code"]) == ("max_token", "unknown_parameter") and "max_token" in error["message"]


async def test_an_unknown_member_of_stream_options_is_named_with_its_path(api: Api) -> None:
    error = refusal(await api.complete(stream=True, stream_options={"usage": True}))
    assert error["param"] == "stream_options.usage"


@pytest.mark.parametrize("other", ["other", "", "tiny ", "\u0000"])
async def test_an_unknown_model_is_not_found(api: Api, other: str) -> None:
    error = refusal(await api.complete(model=other), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found") and untouched(api)


async def test_a_missing_prompt_is_refused(api: Api) -> None:
    assert refusal(await post(api, b"{}"))["param"] == "prompt"


async def test_the_error_for_a_long_prompt_names_the_context(api: Api) -> None:
    error = refusal(await api.complete(prompt=[5] * 1020, max_tokens=5))
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert all(number in error["message"] for number in ("1024", "1020", "5"))


@pytest.mark.parametrize(
    "prompt", ["", ["one", ""], [[1, 2], []], ["one", 5], [True]], ids=["empty", "texts", "lists", "both", "bools"]
)
async def test_the_error_for_an_invalid_prompt_lists_its_types(api: Api, prompt: Any) -> None:
    error = refusal(await api.complete(prompt=prompt))
    assert "list of token ids" in error["message"]


# --- bodies -------------------------------------------------------------------------------------------

NO_JSON = {
    "nothing": b"",
    "a brace": b"{",
    "words": b"hello",
    "half a string": b'{"prompt": "x',
    "two objects": b'{"prompt": "x"}{"prompt": "x"}',
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "x"}',
    "a lone surrogate in the prompt": b'{"prompt": "\\ud800"}',
    "a lone surrogate in a stop string": b'{"prompt": "x", "stop": ["\\udc00"]}',
    "a lone surrogate in a name": b'{"prompt": "x", "\\ud800": 1}',
    "a lone surrogate in the model": b'{"prompt": "x", "model": "\\ud800"}',
    "a NUL byte": b'{"prompt": "\x00"}',
    "a hundred thousand brackets": b"[" * 100_000,
    "a hundred thousand brackets in the prompt": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a hundred thousand braces": b'{"a":' * 100_000,
    "a number of five thousand digits": b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("content", NO_JSON.values(), ids=NO_JSON)
async def test_invalid_json_is_refused(api: Api, content: bytes) -> None:
    error = refusal(await post(api, content))
    assert error["code"] == "invalid_json" and untouched(api)


@pytest.mark.parametrize("content", [b"[]", b'"x"', b"null", b"5", b"true", b'[{"prompt": "x"}]'])
async def test_json_other_than_objects_is_refused(api: Api, content: bytes) -> None:
    error = refusal(await post(api, content))
    assert error["code"] == "invalid_body" and "object" in error["message"] and untouched(api)


@pytest.mark.parametrize(
    "content",
    [b'{"prompt": "x", "prompt": "y"}', b'{"prompt": "a\\u0000b"}', b'{"prompt": "\\ud83d\\ude00", "stop": "\\u0000"}'],
    ids=["a name twice", "a NUL character", "a surrogate pair"],
)
async def test_unusual_valid_json_is_served(api: Api, content: bytes) -> None:
    assert (await post(api, content)).status_code == 200


async def chunks(total: int) -> AsyncIterator[bytes]:
    for _ in range(total // 100):
        yield b" " * 100


@pytest.mark.parametrize("content", [b" " * 3000, chunks(3000)], ids=["with content-length", "chunked"])
async def test_a_body_over_the_limit_is_refused(model: Model, content: Any) -> None:
    api = make_api(model, max_body_bytes=2000)
    error = refusal(await post(api, content), 413)
    assert error["code"] == "request_too_large" and "2000" in error["message"] and untouched(api)


async def test_a_body_of_exactly_the_limit_is_read(model: Model) -> None:
    api = make_api(model, max_body_bytes=2000)
    assert (await post(api, b'{"prompt": "x"}'.ljust(2000))).status_code == 200


@pytest.mark.parametrize("declared", ["-1", "5.5", "\u00b2", "", "x"])
async def test_any_content_length_is_handled(declared: str) -> None:
    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    headers = [(b"content-length", declared.encode("latin-1"))]
    assert await read_body(Request({"type": "http", "method": "POST", "headers": headers}, receive), 1000) == b"{}"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
async def test_another_content_type_is_refused(api: Api, kind: str) -> None:
    response = await api.post("/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": kind})
    assert "application/json" in refusal(response, 415)["message"] and untouched(api)


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON", ""])
async def test_json_content_types_are_read(api: Api, kind: str) -> None:
    response = await api.post("/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": kind})
    assert response.status_code == 200


# --- routes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", "/v1/completions"), ("PUT", "/v1/completions"), ("GET", "/v1/chat/completions")),
        *(("POST", "/v1/models"), ("POST", "/v1/models/tiny"), ("GET", "/tokenize"), ("DELETE", "/mell/migrations")),
    ],
)
async def test_a_405_lists_the_allowed_methods(api: Api, method: str, path: str) -> None:
    response = await api.send(method, path)
    refusal(response, 405)
    assert response.headers["allow"]


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/chat", "/v1/completions/x", "/%00", "/v1/embeddings"])
async def test_an_unknown_path_is_not_found(api: Api, path: str) -> None:
    assert refusal(await api.post(path, json={}), 404)["type"] == "not_found_error"


# --- anything -----------------------------------------------------------------------------------------

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([0, 1, -1, 2, 1.0, "tiny", "x", HUGE, "\ud800"])
)
anything = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner), max_leaves=8
)
messages = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls"]), anything | st.just("user"))
    | st.just({"role": "user", "content": "x"})
)
names = st.sampled_from([*WRONG[COMPLETIONS], *WRONG[CHATS], "messages", "zzz"])
fields = st.dictionaries(names, anything | st.lists(st.integers(-2, 600), max_size=5))
bounded = fields.map(lambda given: {"max_tokens": 1, **given})
chats = st.tuples(bounded, messages).map(lambda both: {**both[0], "messages": both[1]})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=anything | fields | bounded | chats)
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/tokenize"])
async def test_no_json_causes_a_server_error(api: Api, path: str, value: Any) -> None:
    if path == CHATS and isinstance(value, dict):
        value = {"max_tokens": 1, **value}
    response = await post(api, json.dumps(value).encode(), path)
    assert response.status_code < 500, response.text
    assert response.status_code < 400 or refusal(response, response.status_code)
    await api.backend.service.idle()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200) | anything.map(lambda value: json.dumps(value).encode()))
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/tokenize", "/detokenize", "/mell/migrations"])
async def test_no_bytes_cause_a_server_error(api: Api, path: str, content: bytes) -> None:
    response = await api.post(path, content=content, headers=JSON)
    assert response.status_code < 500, response.text
