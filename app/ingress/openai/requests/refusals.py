"""Request bodies that are wrong: the first mistake, in words, with the parameter that holds it."""

from typing import Any, TypeVar

import pydantic
from pydantic import BaseModel

from app.ingress.errors import ApiError

Body = TypeVar("Body", bound=BaseModel)

_UNSUPPORTED = {
    "suffix",
    "functions",
    "function_call",
    "audio",
    "refusal",
    "annotations",
    "continue_final_message",
}
"""Parameters that are known, and served with one value only."""

_EITHER = {
    "prompt": "write a text, a list of token ids, or a list of texts or of such lists, none of them empty",
    "stop": "write a string or a list of strings, none of them empty",
    "tool_choice": 'write "none", "auto", "required", or {"type": "function", "function": {"name": "..."}}',
}
"""Fields of several types, of which pydantic would explain the first only."""

_NESTED = {"messages", "tools", "stream_options", "response_format", "structured_outputs"}
"""Objects within the body: the mistake is named with its path. Elsewhere a path has pydantic's own names in it."""


def parse(kind: type[Body], body: bytes) -> Body:
    """Read a request body. Raises ApiError 400 that names the field."""
    try:
        return kind.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0]) from None


def _refusal(first: Any) -> ApiError:
    loc, kind = first["loc"], first["type"]
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    if not loc:
        return ApiError(400, "the body must be a JSON object", code="invalid_body")
    top = str(loc[0])
    if top in _UNSUPPORTED or (top in _NESTED and loc[-1] in _UNSUPPORTED):
        param = _path(loc) if top in _NESTED else top
        return ApiError(400, f"{param!r} is not supported with this value", param=param, code="unsupported_parameter")
    if kind == "extra_forbidden":
        unknown = _path(loc)
        return ApiError(400, f"unknown parameter {unknown!r}", param=unknown, code="unknown_parameter")
    param = _path(loc) if top in _NESTED else top
    wrong = first["ctx"]["error"] if kind == "value_error" else first["msg"]
    wrong = wrong if kind == "missing" else _EITHER.get(top, wrong)
    return ApiError(400, f"{param}: {wrong}", param=param, code="invalid_value")


def _path(loc: tuple[int | str, ...]) -> str:
    """As OpenAI writes it: messages[0].content."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)[1:]
