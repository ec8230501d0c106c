"""Calls by hostile or broken clients: each is refused quickly and in OpenAI's shape, and leaves nothing.

What is wrong with a single parameter is in test_bad_input.py.
"""

import gzip
import json
from typing import Any

import httpx
import pytest

from app.ingress.openai.model import Model
from tests.app.ingress.fakes import MESSAGES, Api, Exchange, make_api
from tests.app.ingress.http.test_bad_input import CHATS, COMPLETIONS, JSON, post, refusal, untouched

DIGITS = "9" * 5000


def nested(levels: int, around: str = "1") -> str:
    """A schema nested `levels` deep."""
    return '{"properties":{"a":' * levels + around + "}}" * levels


def chat(members: str) -> bytes:
    return f'{{"messages": {json.dumps(MESSAGES)}, "max_tokens": 1, {members}}}'.encode()


def named(schema: str) -> str:
    return f'"response_format": {{"type": "json_schema", "json_schema": {{"name": "x", "schema": {schema}}}}}'


def outputs(schema: str) -> str:
    return f'"structured_outputs": {{"json": {schema}}}'


def tool(schema: str) -> str:
    function = f'{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}'
    return f'"tools": [{function}], "tool_choice": "required"'


# --- schemas ------------------------------------------------------------------------------------------

HOLDERS = {
    "response_format": (named, "response_format.json_schema.schema"),
    "structured_outputs": (outputs, "structured_outputs.json"),
    "tools": (tool, "tools[0].function.parameters"),
}
NO_SCHEMAS = {
    "NaN": '{"minimum": NaN}',
    "infinity": '{"a": [{"b": -Infinity}]}',
    "a number above all": '{"maximum": 1e999}',
    "a list": "[1]",
    "true": "true",
    "a number": "5",
}


@pytest.mark.parametrize("schema", NO_SCHEMAS.values(), ids=NO_SCHEMAS)
@pytest.mark.parametrize("holder", HOLDERS)
async def test_an_invalid_schema_is_named(api: Api, holder: str, schema: str) -> None:
    write, param = HOLDERS[holder]
    error = refusal(await post(api, chat(write(schema)), CHATS))
    assert (error["param"], error["code"]) == (param, "invalid_value") and untouched(api)


@pytest.mark.parametrize("levels", [100, 1_000, 20_000])
@pytest.mark.parametrize("holder", HOLDERS)
async def test_an_excessively_deep_schema_is_invalid_json(api: Api, holder: str, levels: int) -> None:
    error = refusal(await post(api, chat(HOLDERS[holder][0](nested(levels))), CHATS))
    assert error["code"] == "invalid_json" and untouched(api)


@pytest.mark.parametrize("holder", HOLDERS)
async def test_a_deep_schema_is_left_to_the_engine(api: Api, holder: str) -> None:
    assert (await post(api, chat(HOLDERS[holder][0](nested(40))), CHATS)).status_code == 200


async def test_a_schema_as_text_is_left_to_the_engine_however_deep(api: Api) -> None:
    assert (await post(api, chat(outputs(json.dumps(nested(5_000)))), CHATS)).status_code == 200


@pytest.mark.parametrize("definitions", ["5", "[]", "null", '"x"'])
async def test_invalid_definitions_are_named(api: Api, definitions: str) -> None:
    error = refusal(await post(api, chat(tool(f'{{"$defs": {definitions}}}')), CHATS))
    assert error["param"] == "tools" and untouched(api)


# --- earlier calls ------------------------------------------------------------------------------------

ARGUMENTS = {
    "no JSON": "{",
    "NaN": "NaN",
    "a number of five thousand digits": f'{{"a": {DIGITS}}}',
    "an abyss": "[" * 100_000,
    "a NUL": "\x00",
}


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
async def test_a_chat_continues_after_invalid_arguments_of_its_model(api: Api, arguments: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    body = json.dumps({"messages": messages, "max_tokens": 1}).encode()
    assert (await post(api, body, CHATS)).status_code == 200
    assert (await post(api, json.dumps({"messages": messages}).encode(), "/tokenize")).status_code == 200


# --- sizes --------------------------------------------------------------------------------------------

LARGE: dict[str, tuple[str, bytes]] = {
    "a hundred thousand members": (COMPLETIONS, json.dumps({f"x{n}": n for n in range(50_000)}).encode()),
    "one name a hundred thousand times": (COMPLETIONS, b'{"prompt": "x"' + b',"seed":[]' * 50_000 + b"}"),
    "a hundred thousand stops": (COMPLETIONS, json.dumps({"prompt": "x", "stop": ["a"] * 100_000}).encode()),
    "a hundred thousand prompts": (COMPLETIONS, json.dumps({"prompt": ["x"] * 100_000}).encode()),
    "a hundred thousand empty prompts": (COMPLETIONS, json.dumps({"prompt": [[]] * 100_000}).encode()),
    "a hundred thousand empty messages": (CHATS, json.dumps({"messages": [{}] * 100_000}).encode()),
    "a hundred thousand wrong parts": (
        CHATS,
        json.dumps({"messages": [{"role": "user", "content": [5] * 100_000}]}).encode(),
    ),
    "a hundred thousand wrong ids": ("/detokenize", json.dumps({"tokens": [-1] * 100_000}).encode()),
}


@pytest.mark.parametrize(("path", "content"), LARGE.values(), ids=LARGE)
async def test_a_hundred_thousand_errors_give_one_message(api: Api, path: str, content: bytes) -> None:
    assert len(content) < api.backend.settings.max_body_bytes
    response = await post(api, content, path)
    refusal(response)
    assert len(response.content) < 10_000 and untouched(api)


# --- encodings ----------------------------------------------------------------------------------------

ENCODED: dict[str, tuple[dict[str, str], bytes]] = {
    "gzip": ({**JSON, "Content-Encoding": "gzip"}, gzip.compress(b'{"prompt": "x"}')),
    "declared UTF-16": (
        {"Content-Type": "application/json; charset=utf-16"},
        '{"prompt": "x"}'.encode("utf-16-le"),
    ),
    "overlong UTF-8": (JSON, b'{"prompt": "\xc0\x80"}'),
    "a surrogate in UTF-8": (JSON, b'{"prompt": "\xed\xa0\x80"}'),
    "half a character": (JSON, b'{"prompt": "\xe2\x82"}'),
    "comments": (JSON, b'{"prompt": "x" /* y */}'),
    "single quotes": (JSON, b"{'prompt': 'x'}"),
    "a trailing comma": (JSON, b'{"prompt": "x",}'),
    "hexadecimal": (JSON, b'{"prompt": "x", "seed": 0x10}'),
    "several lines of JSON": (JSON, b'{"prompt": "x"}\n{"prompt": "y"}'),
    "a form": (JSON, b"prompt=x&max_tokens=5"),
}


@pytest.mark.parametrize(("headers", "content"), ENCODED.values(), ids=ENCODED)
async def test_other_encodings_are_invalid_json(api: Api, headers: dict[str, str], content: bytes) -> None:
    error = refusal(await api.post(COMPLETIONS, content=content, headers=headers))
    assert error["code"] == "invalid_json" and untouched(api)


@pytest.mark.parametrize("kind", ["application/json\x00", "*/*", "application/*", "text/json", ";", "a" * 1_000])
async def test_unusual_content_types_are_refused_or_read(api: Api, kind: str) -> None:
    response = await api.post(COMPLETIONS, content=b"{", headers={"Content-Type": kind})
    refusal(response, 400 if kind == ";" else 415)


# --- heads --------------------------------------------------------------------------------------------


async def raw(api: Api, method: str, path: str, headers: list[tuple[bytes, bytes]]) -> httpx.Response:
    """A call as passed on by a server without any checks."""
    exchange = Exchange(api, b"{}")
    exchange.task.cancel()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("utf-8", "surrogatepass"),
        "root_path": "",
        "query_string": b"\xff\x00&=" * 100,
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("mell", 80),
    }
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    await api.app(scope, receive, send)
    start, *parts = sent
    content = b"".join(part.get("body", b"") for part in parts)
    return httpx.Response(start["status"], headers=start["headers"], content=content)


HEADS: dict[str, list[tuple[bytes, bytes]]] = {
    "a long label": [(b"x-request-id", b"x" * 1_000_000)],
    "a label of control characters": [(b"x-request-id", bytes(range(32)) + b"\x7f\xff")],
    "a long key": [(b"authorization", b"Bearer " + b"x" * 1_000_000)],
    "a key that is no text": [(b"authorization", b"Bearer \xff\xfe\x00")],
    "two keys": [(b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")],
    "two lengths": [(b"content-length", b"5"), (b"content-length", b"7")],
    "a length above all": [(b"content-length", b"9" * 20)],
    "ten thousand headers": [(b"x-%d" % n, b"y") for n in range(10_000)],
}


@pytest.mark.parametrize("headers", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/tokenize", "/detokenize", "/mell/migrations"])
async def test_no_head_causes_a_server_error(api: Api, path: str, headers: list[tuple[bytes, bytes]]) -> None:
    response = await raw(api, "POST", path, headers)
    # The body is {}: unless the declared length differs, the first parameter is missing.
    refusal(response, 413 if headers[0][1].startswith(b"99") else 400)
    assert untouched(api)


@pytest.mark.parametrize(
    "path", ["/\x00", "/\ud800", "/v1/../v1/models/..", "//v1/models", "/" + "a" * 100_000, "*", ""]
)
async def test_no_path_causes_a_server_error(api: Api, path: str) -> None:
    refusal(await raw(api, "GET", path, []), 404)


@pytest.mark.parametrize("name", ["x" * 100_000, "\x00", "\ud800", "a/b/../c", "%", "\u202e"], ids=ascii)
async def test_no_name_causes_a_server_error(api: Api, name: str) -> None:
    for method, path in [("GET", f"/v1/models/{name}"), ("POST", f"/mell/replicas/{name}/drain")]:
        response = await raw(api, method, path, [])
        assert response.status_code == 404 and response.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("method", ["", "get", "FOO", "TRACE", "CONNECT", "OPTIONS", "PATCH", "M" * 10_000, "\u00e9"])
@pytest.mark.parametrize("path", [COMPLETIONS, "/health", "/openapi.json", "/mell/migrations"])
async def test_no_method_causes_a_server_error(api: Api, method: str, path: str) -> None:
    response = await raw(api, method, path, [])
    refusal(response, 405)
    assert response.headers["allow"]


async def test_a_body_in_single_bytes_is_read_up_to_the_limit(model: Model) -> None:
    api = make_api(model, max_body_bytes=1_000)

    async def drip() -> Any:
        for _ in range(100_000):
            yield b" "

    refusal(await post(api, drip(), COMPLETIONS), 413)
    assert untouched(api)
