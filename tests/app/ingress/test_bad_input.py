"""Bodies that no client should send: each is a 4xx in OpenAI's shape that names the field, and leaves nothing."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from app.ingress.completions import Model
from app.ingress.http import read_body
from tests.app.ingress.fakes import MAX_CONTEXT, PROMPT, Api, make_api

JSON = {"Content-Type": "application/json"}


def refusal(response: httpx.Response, status: int = 400) -> Any:
    """The error of a response that is a proper refusal."""
    assert response.status_code == status, response.text[:300]
    (key, error), *others = response.json().items()
    assert (key, others) == ("error", []) and set(error) == {"message", "type", "param", "code"}
    assert error["message"] and len(error["message"]) < 5000
    return error


def untouched(api: Api) -> bool:
    """Whether nothing was begun."""
    service = api.backend.service
    submitted = any(method == "submit" for _, method in service.wires.calls)
    return not submitted and not service.streams.count and all(r.idle for r in service.replicas.values())


async def post(api: Api, content: bytes) -> httpx.Response:
    return await api.post("/v1/completions", content=content, headers=JSON)


# --- fields -------------------------------------------------------------------------------------------

HUGE = 10**400
NAN, INFINITY = float("nan"), float("inf")

WRONG: dict[str, list[Any]] = {
    "model": [5, [], {}, True],
    "prompt": [
        *(5, 1.5, True, {}, "", [], [""], ["one", "two"], [[1, 2]], [1.5], [1.0], [True], [None], [-1], [1, -1]),
        *([512], [HUGE], [-HUGE], [1] * (MAX_CONTEXT + 1), [1] * MAX_CONTEXT, "word " * MAX_CONTEXT),
    ],
    "max_tokens": [0, -1, HUGE, -HUGE, MAX_CONTEXT, 1.5, 1.0, "5", True, [], {}],
    "temperature": [-0.1, 2.1, HUGE, NAN, INFINITY, -INFINITY, "1", True, [], {}],
    "top_p": [0, -0.1, 1.1, NAN, INFINITY, -INFINITY, "1", True, []],
    "top_k": [-2, 1.5, "1", True, []],
    "seed": [1 << 63, -(1 << 63) - 1, HUGE, 1.5, "1", True, []],
    "stop": ["", [""], ["a", ""], ["a"] * 17, 5, True, [5], [None], [["a"]], {}],
    "ignore_eos": [1, "true", None, []],
    "stream": [1, "true", []],
    "stream_options": [{}, {"include_usage": True}, 5, True, []],
    "user": [5, [], {}],
    "n": [2, 0, "1", []],
    "best_of": [2, "1"],
    "echo": [True, "false"],
    "logprobs": [0, 1, True],
    "suffix": ["", "x"],
    "presence_penalty": [0.1, "0"],
    "frequency_penalty": [-1, "0"],
    "logit_bias": [{}, {"5": 1}],
}
CASES = [(field, value) for field, values in WRONG.items() for value in values]


def name(value: Any) -> str:
    return value if isinstance(value, str) and len(value) < 30 else str(value)[:30]


@pytest.mark.parametrize(("field", "value"), CASES, ids=name)
async def test_a_wrong_field_is_named(api: Api, field: str, value: Any) -> None:
    error = refusal(await post(api, json.dumps({"prompt": PROMPT, field: value}).encode()))
    assert error["type"] == "invalid_request_error" and untouched(api)
    assert error["param"] == ("max_tokens" if value == "word " * MAX_CONTEXT or field == "max_tokens" else field) or (
        field == "prompt" and error["code"] == "context_length_exceeded"
    )
    assert error["param"] in error["message"]


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


async def test_without_a_prompt_there_is_nothing_to_complete(api: Api) -> None:
    assert refusal(await post(api, b"{}"))["param"] == "prompt"


async def test_a_prompt_that_leaves_no_room_says_how_much_there_is(api: Api) -> None:
    error = refusal(await api.complete(prompt=[5] * 1020, max_tokens=5))
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert all(number in error["message"] for number in ("1024", "1020", "5"))


@pytest.mark.parametrize(
    "prompt", ["one text or one list", ["one", "two"], [[1, 2], [3]], [True]], ids=["empty", "texts", "lists", "bools"]
)
async def test_what_a_prompt_may_be_is_said(api: Api, prompt: Any) -> None:
    error = refusal(await api.complete(prompt=prompt if isinstance(prompt, list) else ""))
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
async def test_what_is_no_json_is_refused(api: Api, content: bytes) -> None:
    error = refusal(await post(api, content))
    assert error["code"] == "invalid_json" and untouched(api)


@pytest.mark.parametrize("content", [b"[]", b'"x"', b"null", b"5", b"true", b'[{"prompt": "x"}]'])
async def test_what_is_no_object_is_refused(api: Api, content: bytes) -> None:
    error = refusal(await post(api, content))
    assert error["code"] == "invalid_body" and "object" in error["message"] and untouched(api)


@pytest.mark.parametrize(
    "content",
    [b'{"prompt": "x", "prompt": "y"}', b'{"prompt": "a\\u0000b"}', b'{"prompt": "\\ud83d\\ude00", "stop": "\\u0000"}'],
    ids=["a name twice", "a NUL character", "a surrogate pair"],
)
async def test_what_is_odd_but_json_is_served(api: Api, content: bytes) -> None:
    assert (await post(api, content)).status_code == 200


async def chunks(total: int) -> AsyncIterator[bytes]:
    for _ in range(total // 100):
        yield b" " * 100


@pytest.mark.parametrize("content", [b" " * 3000, chunks(3000)], ids=["with content-length", "chunked"])
async def test_a_body_over_the_limit_is_refused(model: Model, content: Any) -> None:
    api = make_api(model, max_body_bytes=2000)
    error = refusal(await post(api, content), 413)
    assert error["code"] == "request_too_large" and "2000" in error["message"] and untouched(api)


async def test_a_body_of_just_the_limit_is_read(model: Model) -> None:
    api = make_api(model, max_body_bytes=2000)
    assert (await post(api, b'{"prompt": "x"}'.ljust(2000))).status_code == 200


@pytest.mark.parametrize("declared", ["-1", "5.5", "\u00b2", "", "x"])
async def test_no_content_length_breaks_the_reading(declared: str) -> None:
    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    headers = [(b"content-length", declared.encode("latin-1"))]
    assert await read_body(Request({"type": "http", "method": "POST", "headers": headers}, receive), 1000) == b"{}"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
async def test_what_says_that_it_is_not_json_is_refused(api: Api, kind: str) -> None:
    response = await api.post("/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": kind})
    assert "application/json" in refusal(response, 415)["message"] and untouched(api)


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON", ""])
async def test_json_is_read(api: Api, kind: str) -> None:
    response = await api.post("/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": kind})
    assert response.status_code == 200


# --- routes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/completions"), ("PUT", "/v1/completions"), ("POST", "/v1/models"), ("DELETE", "/mell/migrations")],
)
async def test_a_wrong_method_is_told_which_are_right(api: Api, method: str, path: str) -> None:
    response = await api.send(method, path)
    refusal(response, 405)
    assert response.headers["allow"]


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/chat/completions", "/v1/completions/x", "/%00", "/v1/models/tiny"])
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
fields = st.dictionaries(st.sampled_from([*WRONG, "zzz"]), anything | st.lists(st.integers(-2, 600), max_size=5))
bounded = fields.map(lambda given: {"max_tokens": 1, **given})


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=anything | fields | bounded)
async def test_no_json_makes_us_fail(api: Api, value: Any) -> None:
    response = await post(api, json.dumps(value).encode())
    assert response.status_code < 500, response.text
    assert response.status_code < 400 or refusal(response, response.status_code)
    await api.backend.service.idle()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200) | anything.map(lambda value: json.dumps(value).encode()))
@pytest.mark.parametrize("path", ["/v1/completions", "/mell/migrations"])
async def test_no_bytes_make_us_fail(api: Api, path: str, content: bytes) -> None:
    response = await api.post(path, content=content, headers=JSON)
    assert response.status_code < 500, response.text
