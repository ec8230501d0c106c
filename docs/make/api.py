"""docs/api.md from the OpenAPI document: every route with its parameters, refusals and an example."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from app.ingress.openai.description.openapi import STATUSES, document, statuses
from app.ingress.openai.description.operations import EVENTS, OPERATIONS, Access, Operation
from deployments.engine.port import Tie

Schema = Mapping[str, Any]

PAGE = Path(__file__).parents[1] / "api.md"

CODES = {
    "invalid_json": (400, "the body is not JSON in UTF-8"),
    "invalid_body": (400, "the body is not an object"),
    "invalid_value": (400, "`param` has an invalid value, or contradicts other members"),
    "unknown_parameter": (400, "`param` does not exist: unknown members are refused, never ignored"),
    "unsupported_parameter": (400, "this value of `param` is not supported"),
    "context_length_exceeded": (400, "the prompt, or prompt and answer, is too long"),
    "no_chat_template": (400, "the model has no chat template"),
    "invalid_api_key": (401, "the key is missing or invalid"),
    "model_not_found": (404, "another model is served"),
    "request_too_large": (413, "the body is too large"),
    "rate_limit_exceeded": (
        429,
        "a limit of the API key is reached; `Retry-After` is the time until it allows the request",
    ),
    "tool_parser_failed": (500, "vLLM's tool-call parser failed"),
    "saturated": (503, "`ingress.max_requests` requests are running; try again after `Retry-After`"),
    "unavailable": (503, "no replica accepts the request"),
    "timeout": (504, "the request exceeded its time limit; 408 with this code: its body did"),
}
"""Status and meaning of each `code`."""

TIED = {Tie.SEEDED: "`seed` with a `temperature` above 0, on GPUs with vLLM's older model runner"}
"""The requests that an engine cannot continue exactly."""

_INTRO = """\
# HTTP API

<!-- Made by `python -m docs.make`; edit
     `app/ingress/openai/description/operations.py` and the request models. -->

`GET /openapi.json` is the same as an OpenAPI 3.1 document. With `ingress.frontend: vllm`, vLLM's own server application
answers everything but [Service](#service) and [Control](#control): see [frontend.md](frontend.md).

**Keys.** If keys are configured, add `-H "Authorization: Bearer $KEY"` to the examples. An API key does not open
`/mell`, and `ingress.admin_key` opens nothing else ([operations.md](operations.md)).

**Bodies** are JSON in UTF-8, with `Content-Type: application/json` or none. Values are not converted between types:
`"5"` is not a number, `1` is not `true`. Unknown members, NaN and infinity are refused.

**Streams.** With `stream`, the answer is a stream of server-sent events: `data: ` and a chunk for every engine step,
then `data: [DONE]`. An error after the first event is an event, `data: ` and an [Error](#error), before the last one.

**X-Request-Id** on a completion or a chat is a label, not an address: up to 128 characters of `A-Za-z0-9._:/@+=-`,
others are dropped. State, migrations, logs and the response contain it, and an order to move may name it if only one
running request has it.
"""

_MOVES = """\
## Immovable requests

A request is movable if another engine continues it exactly or, for sampling without a seed, in distribution. The
requests below are not: `/mell/state` gives the reason as `immovable_reason`, an order to move them gets 422, and if
their replica dies after the first token, the answer ends with 503.

| Request | `immovable_reason` |
|---|---|
"""
_NOT_NOW = """
An order for a movable request gets 422 if it is already moving or already on `target`, or if no other replica runs.
"""
_ACCESS = {
    Access.ANYBODY: "Open to every client.",
    Access.CLIENT: "Needs an API key, if keys are configured.",
    Access.OPERATOR: "Needs the admin key; without one, it is open on loopback only.",
}
_WORDS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "null": "`null`",
    "object": "object",
    "array": "list",
}
_BOUNDS = {
    "minimum": "{} or more",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "minLength": "{} or more characters",
    "minItems": "{} or more members",
    "maxItems": "at most {} members",
    "maxProperties": "at most {} members",
}
_NOT_EMPTY = ("1 or more characters", "1 or more members")


def page() -> str:
    """The whole page."""
    described = document()
    schemas = described["components"]["schemas"]
    bodies = {operation.body.__name__ for operation in OPERATIONS if operation.body}
    asked = _reachable([*bodies])
    lines = [_INTRO, *_errors()]
    for tag in described["tags"]:
        lines += [f"## {tag['name']}", "", tag["description"], ""]
        for operation in OPERATIONS:
            if operation.tag == tag["name"]:
                lines += _section(operation)
    lines += [_MOVES + "\n".join(f"| {which} | {why} |" for why, which in TIED.items()), _NOT_NOW]
    for title, names in (("Objects in requests", asked - bodies), ("Objects in answers", schemas.keys() - asked)):
        lines += [f"## {title}", ""]
        for name in sorted(names):
            if "properties" in (schema := schemas[name]):
                table = _table(schema, "Default" if name in asked else "")
                lines += [f"### {name}", "", " ".join(schema["description"].split()), "", *table, ""]
    return "\n".join(lines).rstrip() + "\n"


def _reachable(names: list[str]) -> set[str]:
    """These schemas, and those that they refer to."""
    found: set[str] = set()
    while names:
        if (name := names.pop()) not in found:
            found.add(name)
            names += re.findall(r'schemas/(\w+)"', json.dumps(document()["components"]["schemas"][name]))
    return found


def _errors() -> list[str]:
    rows = [f"| {status} | {meaning} |" for status, meaning in STATUSES.items()]
    codes = [f"| `{code}` | {status} | {meaning} |" for code, (status, meaning) in CODES.items()]
    return [
        "## Errors",
        "",
        "Every error is an [Error](#error); `param` is the path of the invalid member, and `code` is for programs.",
        "",
        *("| Status | Meaning |", "|---|---|", *rows),
        "",
        *("| `code` | Status | Meaning |", "|---|---|---|", *codes),
        "",
    ]


def _section(operation: Operation) -> list[str]:
    lines = [f"### `{operation.method} {operation.path}`", "", f"{operation.summary}. {_ACCESS[operation.access]}"]
    lines += ["", operation.description]
    lines += ["", *(f"- `{name}` in the path: {text}" for name, text in operation.in_path.items())]
    if operation.body is not None:
        lines += ["", *_table(document()["components"]["schemas"][operation.body.__name__], "Default")]
    if operation.refused:
        also = ", beside members of wrong types or beyond the limits above, and unknown ones" if operation.body else ""
        lines += ["", f"Refused{also}:", "", *(f"- {rule}" for rule in operation.refused)]
    lines += ["", _answers(operation), "", *_curl(operation), ""]
    return list(_squeezed(lines))


def _answers(operation: Operation) -> str:
    """The responses."""
    answer = operation.answer
    kinds = f"`{answer.media_type}`" if answer.model is None else _link(answer.model)
    if answer.chunk is not None:
        kinds += f" or with `stream` `{EVENTS}` of {_link(answer.chunk)}"
    errors = ", ".join(map(str, statuses(operation)))
    return f"Answers {answer.status}, {kinds}. {answer.description} Errors: {errors}."


def _link(model: type[BaseModel]) -> str:
    return f"[{model.__name__}](#{model.__name__.lower()})"


def _curl(operation: Operation) -> list[str]:
    url = "http://127.0.0.1:8000" + re.sub(r"{(\w+)}", lambda name: name[1].upper(), operation.path)
    command = f"curl {'-X POST ' if operation.method == 'POST' and operation.body is None else ''}{url}"
    if operation.body is not None:
        command += f" -H 'Content-Type: application/json' \\\n  -d '{json.dumps(operation.example)}'"
    return ["```sh", command, "```"]


def _table(schema: Schema, default: str) -> list[str]:
    """The members of an object, required ones first, with their defaults if that column has a name."""
    required = schema.get("required", ())
    members = sorted(schema["properties"].items(), key=lambda member: member[0] not in required)
    titles = ["Name", "Type", *([default] if default else []), "Meaning"]
    rows = [titles, ["---"] * len(titles)]
    for name, member in members:
        meaning = member.get("description", "")
        if default:
            cells = ["required" if name in required else f"`{json.dumps(member['default'])}`"]
        else:
            cells, meaning = [], meaning if name in required else f"{meaning} May be missing.".strip()
        rows.append([f"`{name}`", _type(member), *cells, meaning])
    return [f"| {' | '.join(row)} |" for row in rows]


def _type(schema: Schema) -> str:
    """A type in words, with its limits."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        target = document()["components"]["schemas"][name]
        return f"[{name}](#{name.lower()})" if "properties" in target else _type(target)
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if values := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return " or ".join(f"`{json.dumps(value)}`" for value in values)
    words = _WORDS[schema["type"]] if "type" in schema else "anything"
    if schema.get("items"):
        words += f" of {_type(schema['items'])}"
    if isinstance(members := schema.get("additionalProperties"), Mapping):
        words += f" of {_type(members)}"
    limits = [text.format(_number(schema[bound])) for bound, text in _BOUNDS.items() if bound in schema]
    bounds = ["not empty" if bound in _NOT_EMPTY else bound for bound in limits]
    return f"{words} ({', '.join(bounds)})" if bounds else words


def _number(value: float) -> str:
    return f"{value:g}" if abs(value) < 1 << 62 else f"{'-' * (value < 0)}2^{math.log2(abs(value)):g}"


def _squeezed(lines: list[str]) -> Iterator[str]:
    """The lines without an empty one after another."""
    before = ""
    for line in lines:
        if line or before:
            yield line
        before = line
