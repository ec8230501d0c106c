"""The OpenAPI 3.1 document of the routes, made from the request models and `operations`."""

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from app.ingress.openai.description.described import Error
from app.ingress.openai.description.operations import EVENTS, JSON, OPERATIONS, Access, Operation, Tag
from app.versions import VERSION

STATUSES = {
    400: "The body is not JSON, or a parameter in it is wrong, unknown or not supported.",
    401: "The key is missing or not valid.",
    403: "There is no admin key, and the client's address is not loopback.",
    404: "What is asked for does not exist.",
    405: "The path has no such method; `Allow` lists those that it has.",
    408: "The body came too slowly.",
    409: "Several running requests have this label.",
    413: "The body is larger than `ingress.max_body_bytes`.",
    415: "The body says that it is not JSON.",
    422: "It cannot be done; the message says why.",
    429: "The API key's limits are reached.",
    500: "A mistake of the server.",
    503: "Nobody can serve this now.",
    504: "It took longer than `ingress.request_timeout_s`.",
}
"""What the statuses of errors mean, on every route."""

_TAGS = {
    Tag.GENERATION: "Completions and chats, as OpenAI defines them.",
    Tag.MODEL: "The model, and its tokenizer.",
    Tag.SERVICE: "For probes, monitoring and clients' generators; open to anybody.",
    Tag.CONTROL: "Replicas and migrations, for operators.",
}
_KEYS = {
    Access.CLIENT: "An API key. Not wanted where `ingress.api_keys_file` is not set.",
    Access.OPERATOR: "`ingress.admin_key`. Where it is not set, the calls are open to loopback only.",
}
_RETRY_AFTER = {"description": "Seconds after which to try again.", "schema": {"type": "integer", "minimum": 1}}
_LABEL = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "A label, not an address: characters beside `A-Za-z0-9._:/@+=-` and those after the 128th are "
    "dropped. It shows in state, migrations and logs, and comes back on the response.",
    "schema": {"type": "string"},
}


class _Untitled(GenerateJsonSchema):
    """Members have descriptions; titles made of their names would say nothing."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@cache
def document() -> dict[str, Any]:
    """The whole document. It is the same object each time: do not change it."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Mell",
            "version": VERSION,
            "description": "A large language model on several engines, between which running requests move.",
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": tag.value, "description": text} for tag, text in _TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {
                access.value: {"type": "http", "scheme": "bearer", "description": text}
                for access, text in _KEYS.items()
            },
        },
    }


def models(operation: Operation) -> list[type[BaseModel]]:
    """What describes the bodies of a route, request and responses."""
    answer = operation.answer
    return [model for model in (operation.body, answer.model, answer.chunk) if model is not None]


def statuses(operation: Operation) -> list[int]:
    """Of the errors that it may answer."""
    return sorted({*operation.errors, 500})


def _schemas() -> dict[str, Any]:
    wanted: dict[type[BaseModel], None] = dict.fromkeys(
        [Error, *(model for operation in OPERATIONS for model in models(operation))]
    )
    _, schemas = models_json_schema(
        [(model, "validation") for model in wanted],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Untitled,
    )
    definitions: dict[str, Any] = schemas["$defs"]
    return dict(sorted(definitions.items()))


def _described(operation: Operation) -> dict[str, Any]:
    """The operation object."""
    described: dict[str, Any] = {
        "operationId": operation.id,
        "tags": [operation.tag.value],
        "summary": operation.summary,
    }
    if text := "\n\n".join(filter(None, (operation.description, _refused(operation)))):
        described["description"] = text
    if parameters := _parameters(operation):
        described["parameters"] = parameters
    if operation.body is not None:
        content = {"schema": _reference(operation.body), "example": dict(operation.example)}
        described["requestBody"] = {"required": True, "content": {JSON: content}}
    described["responses"] = _responses(operation)
    # The empty requirement: which keys are wanted is a matter of configuration.
    described["security"] = [] if operation.access is Access.ANYBODY else [{operation.access.value: []}, {}]
    return described


def _refused(operation: Operation) -> str:
    return "\n".join(["Refused:", "", *(f"- {rule}" for rule in operation.refused)]) if operation.refused else ""


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    in_path: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "description": text, "schema": {"type": "string"}}
        for name, text in operation.in_path.items()
    ]
    return in_path + ([_LABEL] if operation.labelled else [])


def _responses(operation: Operation) -> dict[str, Any]:
    answer = operation.answer
    schema = {"type": "object"} if answer.model is None else _reference(answer.model)
    content: dict[str, Any] = {
        answer.media_type: {"schema": schema if answer.media_type == JSON else {"type": "string"}}
    }
    if answer.chunk is not None:
        content[EVENTS] = {"schema": _events(answer.chunk)}
    errors = {str(status): _error(status) for status in statuses(operation)}
    return {str(answer.status): {"description": answer.description, "content": content}, **errors}


def _events(chunk: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI 3.1 has no schema for what is in events; one for the whole stream can only say that it is text."""
    return {
        "type": "string",
        "description": f"With `stream`: events `data: ` with a `{chunk.__name__}` each, or with an `Error` that ends "
        "the answer; the last one is `data: [DONE]`.",
    }


def _error(status: int) -> dict[str, Any]:
    error: dict[str, Any] = {"description": STATUSES[status], "content": {JSON: {"schema": _reference(Error)}}}
    if status in (429, 503):
        error["headers"] = {"Retry-After": {**_RETRY_AFTER, "required": status == 429}}
    if status == 401:
        error["headers"] = {"WWW-Authenticate": {"description": "Bearer.", "schema": {"type": "string"}}}
    return error


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
