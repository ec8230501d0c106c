"""docs/api.md: the endpoints of vLLM's application, and from the OpenAPI document Mell's own with their parameters."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from app.frontend.guard.routes import CLOSED_ROUTES
from app.ingress.http.openapi import document
from app.ingress.http.operation import STATUSES
from deployments.engine.port import Tie

Schema = Mapping[str, Any]

PAGE = Path(__file__).parents[1] / "api.md"

CODES = {
    "invalid_json": (400, "the body is not JSON, or nested too deeply"),
    "invalid_body": (400, "the body is not an object, or has too many members"),
    "invalid_value": (400, "`param` has an invalid value, or contradicts other members"),
    "unknown_parameter": (400, "`param` does not exist; of `/mell` only: vLLM ignores unknown members"),
    "unsupported_parameter": (400, "a client may not set `param`"),
    "media_not_allowed": (
        400,
        "an image, audio or video is neither base64 in a `data:` address nor from `ingress.allowed_media_domains`, or "
        "has a `uuid` and no content",
    ),
    "too_many_media": (400, "the request has more media than `ingress.max_media`"),
    "context_length_exceeded": (400, "the prompt is longer than `ingress.max_prompt_tokens` or the model's context"),
    "invalid_api_key": (401, "the key is missing or invalid"),
    "missing_model": (400, "there are several models, and the call names none"),
    "model_not_allowed": (403, "the API key may not use the model"),
    "class_not_allowed": (403, "the API key may not use the service class"),
    "not_copied": (409, "blocks were not copied: see `POST /mell/cache/copy`"),
    "not_pinned": (409, "no replica has room for the pin: see `POST /mell/cache/pin`"),
    "no_names": (422, "the blocks of the prompt have no names: see `DELETE /mell/cache`"),
    "request_too_large": (413, "the body is too large"),
    "rate_limit_exceeded": (
        429,
        "a limit of the API key is reached; `Retry-After` is the time until it allows the request",
    ),
    "saturated": (
        503,
        "`ingress.max_requests` requests are running, or too many for the class, or a first token would come too late "
        "(`ingress.refuse_late`); try again after `Retry-After`",
    ),
    "unavailable": (
        503,
        "no replica took the request in time (`ingress.no_replica_timeout_s`); try again after `Retry-After`",
    ),
    "engines_lost": (
        503,
        "`ingress.max_engine_losses` engines have died with the request on board; the header `X-Should-Retry: false` "
        "keeps OpenAI's and Anthropic's clients from repeating it by themselves",
    ),
    "internal_error": (500, "a mistake of the server, which is in the ingress's log"),
    "timeout": (504, "the request exceeded its time limit; 408 with this code: its body did"),
}
"""Status and meaning of each `code` of Mell's own errors."""

TIED = {
    Tie.SEEDED: "`seed` with a `temperature` above 0, with vLLM's older model runner (on CPU: vLLM 0.29)",
    Tie.DRAFTED: "`seed` with a `temperature` above 0, on engines with a `speculative_config`",
    Tie.POOLED: "embeddings, scores and classes: all requests of [pooling models](frontend.md#pooling-models)",
}
"""The requests that no other engine continues."""

_INTRO = """\
# HTTP API

<!-- Made by `python -m docs.make`; edit `docs/make/api.py` and
     `app/ingress/http/control.py`. -->

The API is that of vLLM 0.32.0's own server application, which runs in the ingress ([frontend.md](frontend.md)): its
endpoints, parameters, answers and errors, as in vLLM's documentation. [Service](#service) and [Control](#control) are
Mell's. `GET /openapi.json` describes all of them in one OpenAPI 3.1 document.

**Keys.** If keys are configured, add `-H "Authorization: Bearer $KEY"` to the examples. An API key does not open
[Control](#control), and `ingress.admin_key` opens nothing else ([operations.md](operations.md)).

**Bodies** are JSON, with `Content-Type: application/json` or none. As with vLLM's server, values are converted where
that is clear (`"stream": 1`), and UTF-16 and halves of surrogate pairs are read. NaN, infinity and whole numbers of
more than 64 bits are refused everywhere; vLLM's server takes them in members that it does not read. An offer of another
protocol (`Upgrade`) is ignored: the answer comes by HTTP/1.1.

**X-Request-Id** is a label, not an address: up to 128 characters of `A-Za-z0-9._:/@+=-`, others are dropped. State,
migrations, logs and the response contain it, vLLM makes the answer's `id` of it, and an order to move may name it if
only one running request has it.

## Endpoints

| Endpoint | Streams | Moves | In `mell_requests_total` |
|---|---|---|---|
| `POST /v1/completions` | yes | yes; those of a beam search, of one token each, are only placed | `completions` |
| `POST /v1/chat/completions` | yes | yes | `chat` |
| `POST /v1/chat/completions/batch` | | yes | `chat` |
| `POST /v1/responses` | yes | yes | `responses` |
| `POST /v1/messages` | yes | yes | `messages` |
| `POST /v1/messages/count_tokens` | | needs no engine | `count_tokens` |
| `POST /generative_scoring` | | requests of one token each, only placed | `generative_scoring` |
| `POST /tokenize`, `POST /detokenize` | | need no engine | `tokenize`, `detokenize` |
| `GET /v1/models`, with `enable_tokenizer_info_endpoint` `GET /tokenizer_info` | | need no engine | |
| `POST /v1/embeddings`, `POST /v2/embed` | | no, as all below: each input is placed by itself | `embeddings` |
| `POST /score`, `POST /v1/score` | | no | `score` |
| `POST /rerank`, `POST /v1/rerank`, `POST /v2/rerank` | | no | `rerank` |
| `POST /classify` | | no | `classify` |
| `POST /pooling` | | no | `pooling` |

The endpoints from `/v1/embeddings` on are those of [pooling models](frontend.md#pooling-models), each as far as vLLM
has it for the model; those that generate text answer 404 then. `model` is the model's name or that of an
[adapter](frontend.md#adapters).

**Several models** ([`llm_configs`](configuration.md#llm_configs)): the body's `model` decides which one serves a call.
A call without it gets 400 with the names and the code `missing_model`; an unknown name 404, as from vLLM.
`/v1/models` lists all models, in the order of the settings and with their adapters. An
[API key](operations.md#api-keys) may list models: its clients see only these, and get 403 for others.
`GET /tokenizer_info` takes the name as `?model=`. Models whose replicas are away hold up no other one: their requests
leave a tenth of `ingress.max_requests` to each other model (of more than five, an equal part of half of it).

Not available yet: prompts and media as embeddings, streamed input, `tool_server`.

**Images, audio and video** are parts of messages, as in vLLM: base64 in a `data:` address, or an address of an allowed
domain (`ingress.allowed_media_domains`). vLLM's `uuid` of a part is dropped: it would stand for the part's content in
the caches that all clients share, and a part of a `uuid` alone is refused.

**Responses are not stored**: several ingress processes share nothing, so a later call could not find them. `store` has
no effect, as in vLLM's server by default; `background` and `previous_response_id` get 400, and
`/v1/responses/{response_id}` 404. Send the earlier items as `input`, or the messages as `previous_input_messages`.

```sh
curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
  -d '{"prompt": "Blocks move", "max_tokens": 32, "temperature": 0}'
```

```sh
curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{"messages": [{"role": "user", "content": "Where do blocks move?"}], "max_tokens": 32}'
```

```sh
curl http://127.0.0.1:8000/v1/messages -H 'Content-Type: application/json' \\
  -d '{"model": "smollm2-135m", "messages": [{"role": "user", "content": "Where do blocks move?"}], "max_tokens": 32}'
```

CLOSED
## Service classes

With `scheduler.classes`, a request's class decides who waits when room is scarce
([policies.md](policies.md#service-classes)). The first of these counts:

1. the header `X-Mell-Class: NAME`;
2. the body's member `service_tier`, as in OpenAI's and Anthropic's APIs: `default` and `standard_only` are the class
   `default`; `flex`, `scale` and `priority` are the class of that name, if there is one. `ingress.service_tiers` maps
   them to other classes. `auto`, and a tier without a class, name none;
3. the first class of the API key, if it lists classes;
4. the class `default`.

```sh
curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -H 'X-Mell-Class: batch' \\
  -d '{"prompt": "Blocks move", "max_tokens": 32}'
```

An unknown class or tier gets 400 with the known ones, and a class that the API key does not list 403 with the code
`class_not_allowed`. Without `scheduler.classes` neither header nor tier has an effect. The answer's `service_tier` is
vLLM's: that of the request on `/v1/responses`, else null.

## Moves

A request that moves, or whose replica dies, continues with the next token, and its answer is that of an undisturbed
request. The path of a move changes only its time:

| Path | Requests |
|---|---|
| KV blocks | text and media, on engines that [move by KV](limits.md#what-moves-how), with alike caches |
| tokens, the target prefills | all others; those for which it is faster; all whose replica died |
| none | [immovable requests](#immovable-requests); requests of one token, such as those of a beam search |

- **Exactly:** greedy and seeded sampling, penalties, `min_tokens`, `max_tokens`, stop strings and tokens, `logit_bias`,
  `bad_words`, `allowed_token_ids`, structured outputs, tool calls and reasoning in the middle of their text, `n`,
  several prompts, `echo`, `logprobs` and `prompt_logprobs` but for rounding, and usage.
- **In distribution:** sampling without a seed draws with fresh randomness.
- [limits.md](limits.md#exactness) has the conditions, by parameter.
"""

_MOVES = """\
## Immovable requests

A request is movable if another engine continues it exactly or, for sampling without a seed, in distribution. The
requests below are not: `/mell/state` gives the reason as `immovable_reason`, an order to move them gets 422, and if
their replica dies after the first token, the answer ends with an error 503, in a stream with [its event](#errors).

| Request | `immovable_reason` |
|---|---|
"""
_NOT_NOW = """
An order for a movable request gets 422 if it is already moving or already on `target`, or if no other replica runs.
"""
_OPEN = "Open to every client."
_CLOSED = "Needs the admin key; without one, it is open on loopback only."
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


_ERRORS = """\
Mell's errors are [Errors](#error); `param` is the path of the invalid member, and `code` is for programs. vLLM's own
errors have the status as `code`. On `/v1/messages` all errors are in Anthropic's form, vLLM's included.

A stream begins once a replica has taken its request: until then a refusal has its status and headers. An answer that
cannot go on after that, since no replica continues it in time, or since its time limit is over, ends with an event, in
the form that the API's clients expect:

| Endpoint | End of a stream |
|---|---|
| `/v1/completions`, `/v1/chat/completions` | `data: {"error": {...}}`, then `data: [DONE]` |
| `/v1/responses` | `event: response.failed`: the response with `status: "failed"`, `error` and the `usage` so far |
| `/v1/messages` | `event: error` with Anthropic's error; 503 is `overloaded_error` |

Without a stream, such an answer has the error's status instead of 200, on all endpoints.
"""


def page() -> str:
    """The whole page."""
    described, schemas = _own(), _schemas()
    operations = [
        (f"{method.upper()} {path}", operation)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    ]
    bodies = {_name(body) for _, operation in operations if (body := _body(operation))}
    asked = _reachable([*bodies])
    lines = [_INTRO.replace("CLOSED\n", "\n".join(_closed())), *_errors()]
    for tag in described["tags"]:
        lines += [f"## {tag['name']}", "", tag["description"], ""]
        for call, operation in operations:
            if tag["name"] in operation["tags"]:
                lines += _section(call, operation)
    lines += [_MOVES + "\n".join(f"| {which} | {why} |" for why, which in TIED.items()), _NOT_NOW]
    for title, names in (("Objects in requests", asked - bodies), ("Objects in answers", schemas.keys() - asked)):
        lines += [f"## {title}", ""]
        for name in sorted(names):
            if "properties" in (schema := schemas[name]):
                table = _table(schema, "Default" if name in asked else "")
                lines += [f"### {name}", "", " ".join(schema["description"].split()), "", *table, ""]
    return "\n".join(lines).rstrip() + "\n"


@cache
def _own() -> dict[str, Any]:
    """The OpenAPI document of Mell's own routes."""
    return document()


def _schemas() -> dict[str, Schema]:
    schemas: dict[str, Schema] = _own()["components"]["schemas"]
    return schemas


def _body(operation: Schema) -> Schema | None:
    """The schema of an operation's body, a reference; None without a body."""
    body: Schema | None = operation.get("requestBody")
    return None if body is None else body["content"]["application/json"]["schema"]


def _name(reference: Schema) -> str:
    name: str = reference["$ref"].rpartition("/")[2]
    return name


def _reachable(names: list[str]) -> set[str]:
    """These schemas, and those that they refer to."""
    found: set[str] = set()
    while names:
        if (name := names.pop()) not in found:
            found.add(name)
            names += re.findall(r'schemas/(\w+)"', json.dumps(_schemas()[name]))
    return found


def _closed() -> list[str]:
    """The routes of vLLM's server that are closed, by reason."""
    paths: dict[str, list[str]] = {}
    for path, reason in CLOSED_ROUTES.items():
        paths.setdefault(reason, []).append(f"`{path}`")
    return [
        "### Closed routes",
        "",
        "vLLM's other routes answer 404 with the reason, those of its developer mode included.",
        "",
        *(
            "| Routes | Reason |",
            "|---|---|",
            *(f"| {', '.join(named)} | {reason} |" for reason, named in paths.items()),
        ),
        "",
        "",
    ]


def _errors() -> list[str]:
    rows = [f"| {status} | {meaning} |" for status, meaning in STATUSES.items()]
    codes = [f"| `{code}` | {status} | {meaning} |" for code, (status, meaning) in CODES.items()]
    return [
        "## Errors",
        "",
        _ERRORS,
        *("| Status | Meaning |", "|---|---|", *rows),
        "",
        *("| `code` | Status | Meaning |", "|---|---|---|", *codes),
        "",
    ]


def _section(call: str, operation: Schema) -> list[str]:
    schema = _schemas()[_name(body)] if (body := _body(operation)) else None
    description, _, rules = operation.get("description", "").partition("Refused:\n")
    lines = [f"### `{call}`", "", f"{operation['summary']}. {_CLOSED if 'security' in operation else _OPEN}"]
    lines += ["", description, ""]
    lines += [f"- `{p['name']}` in the {p['in']}: {p['description']}" for p in operation.get("parameters", ())]
    if schema is not None:
        lines += ["", *_table(schema, "Default")]
    if rules:
        also = ", beside members of wrong types or beyond the limits above, and unknown ones" if schema else ""
        lines += ["", f"Refused{also}:", rules]
    lines += ["", _answers(operation), "", *_curl(call, schema), ""]
    return list(_squeezed("\n".join(lines).split("\n")))


def _answers(operation: Schema) -> str:
    """The responses."""
    (status, answer), *_ = [pair for pair in operation["responses"].items() if pair[0].startswith("2")]
    ((media_type, content),) = answer["content"].items()
    kind = _type(content["schema"]) if "$ref" in content["schema"] else f"`{media_type}`"
    errors = ", ".join(sorted({"500", *operation["responses"]} - {status, "default"}))
    return f"Answers {status}, {kind}. {answer['description']} Errors: {errors}."


def _curl(call: str, body: Schema | None) -> list[str]:
    method, path = call.split()
    url = "http://127.0.0.1:8000" + re.sub(r"{(\w+)}", lambda name: name[1].upper(), path)
    usual = "GET" if body is None else "POST"
    command = f"curl {'' if method == usual else f'-X {method} '}{url}"
    if body is not None:
        command += f" -H 'Content-Type: application/json' \\\n  -d '{json.dumps(body['examples'][0])}'"
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
            # FastAPI's documents leave out null.
            cells = ["required" if name in required else f"`{json.dumps(member.get('default'))}`"]
        else:
            cells, meaning = [], meaning if name in required else f"{meaning} May be missing.".strip()
        rows.append([f"`{name}`", _type(member), *cells, meaning])
    return [f"| {' | '.join(row)} |" for row in rows]


def _type(schema: Schema) -> str:
    """A type in words, with its limits."""
    if "$ref" in schema:
        name = _name(schema)
        target = _schemas()[name]
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
