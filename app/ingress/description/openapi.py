"""The OpenAPI 3.1 document: Mell's own routes, made from models and `operations`, and those of vLLM's application."""

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from app.ingress.description.described import Error
from app.ingress.description.operations import JSON, OPERATIONS, Access, Operation, Tag
from app.versions import VERSION

STATUSES = {
    400: "The body is not JSON, or a parameter in it is invalid, unknown or not supported.",
    401: "The key is missing or not valid.",
    403: "There is no admin key, and the client's address is not loopback; or the API key does not allow it.",
    404: "The route, the request, the replica or the model does not exist.",
    405: "The path does not have this method; `Allow` lists its methods.",
    408: "The body arrived too slowly.",
    409: "Several running requests have this label.",
    413: "The body is larger than `ingress.max_body_bytes`.",
    415: "The body's content type is not JSON.",
    422: "The order cannot be carried out; the message has the reason.",
    429: "The API key's limits are reached.",
    500: "An error of the server.",
    503: "No replica can serve this now.",
    504: "The call took longer than `ingress.request_timeout_s`.",
}
"""The meanings of the statuses of errors, on every route."""

_TAGS = {
    Tag.SERVICE: "For probes, monitoring and client generators; open to every client.",
    Tag.CONTROL: "Replicas, migrations and adapters, for operators.",
}
_API_KEY = "apiKey"
_KEYS = {
    _API_KEY: "An API key; without `ingress.api_keys_file` and `MELL_API_KEYS`, none is needed.",
    Access.OPERATOR.value: "`ingress.admin_key`; without it, the calls are open on loopback only.",
}
_REFERENCE = re.compile(r'"#/components/schemas/([^"]+)"')
_RETRY_AFTER = {"description": "Seconds after which to try again.", "schema": {"type": "integer", "minimum": 1}}


class _Untitled(GenerateJsonSchema):
    """Members have descriptions; titles made of their names would add nothing."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@cache
def own_document() -> dict[str, Any]:
    """The document of Mell's own routes. It is the same object each time: do not change it."""
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
                name: {"type": "http", "scheme": "bearer", "description": text} for name, text in _KEYS.items()
            },
        },
    }


def whole_document(api: Mapping[str, Any]) -> dict[str, Any]:
    """Mell's own routes and those of `api`, the document of vLLM's application with the open routes only."""
    own = own_document()
    paths = {path: {verb: _keyed(call) for verb, call in calls.items()} for path, calls in api["paths"].items()}
    schemas = _reachable(api.get("components", {}).get("schemas", {}), paths)
    components = {**own["components"], "schemas": dict(sorted({**schemas, **own["components"]["schemas"]}.items()))}
    return {**own, "paths": {**paths, **own["paths"]}, "components": components}


def _keyed(operation: Mapping[str, Any]) -> dict[str, Any]:
    return {**operation, "security": [{_API_KEY: []}, {}]}


def _reachable(schemas: Mapping[str, Any], paths: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas to which the operations of `paths` refer, also indirectly."""
    found: dict[str, Any] = {}
    pending: list[Any] = [paths]
    while pending:
        for name in _REFERENCE.findall(json.dumps(pending.pop())):
            if name not in found:
                found[name] = schemas[name]
                pending.append(schemas[name])
    return found


def models(operation: Operation) -> list[type[BaseModel]]:
    """The models of a route's bodies, of request and response."""
    return [model for model in (operation.body, operation.answer.model) if model is not None]


def statuses(operation: Operation) -> list[int]:
    """The statuses of a route's errors."""
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
    # With the empty requirement: which keys are needed is a matter of configuration.
    described["security"] = [] if operation.access is Access.ANYBODY else [{operation.access.value: []}, {}]
    return described


def _refused(operation: Operation) -> str:
    return "\n".join(["Refused:", "", *(f"- {rule}" for rule in operation.refused)]) if operation.refused else ""


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "description": text, "schema": {"type": "string"}}
        for name, text in operation.in_path.items()
    ]


def _responses(operation: Operation) -> dict[str, Any]:
    answer = operation.answer
    schema = {"type": "object"} if answer.model is None else _reference(answer.model)
    content: dict[str, Any] = {
        answer.media_type: {"schema": schema if answer.media_type == JSON else {"type": "string"}}
    }
    errors = {str(status): _error(status) for status in statuses(operation)}
    return {str(answer.status): {"description": answer.description, "content": content}, **errors}


def _error(status: int) -> dict[str, Any]:
    error: dict[str, Any] = {"description": STATUSES[status], "content": {JSON: {"schema": _reference(Error)}}}
    if status in (429, 503):
        error["headers"] = {"Retry-After": {**_RETRY_AFTER, "required": status == 429}}
    if status == 401:
        error["headers"] = {"WWW-Authenticate": {"description": "Bearer.", "schema": {"type": "string"}}}
    return error


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
