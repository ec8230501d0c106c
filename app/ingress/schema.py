"""Request bodies: completions as OpenAI defines them, and moves. What is not supported is refused, never ignored."""

from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from app.ingress.errors import ApiError
from migration.messages import PathRequest

_INT64 = 1 << 63


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class CompletionRequest(BaseModel):
    """Body of POST /v1/completions. Fields with a single allowed value are known but not supported."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[int], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    stop: Annotated[str, Field(min_length=1)] | list[Annotated[str, Field(min_length=1)]] | None = None
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class MoveRequest(BaseModel):
    """Body of POST /mell/migrations. `request_id` may be the id or the client's label."""

    model_config = ConfigDict(extra="forbid", strict=True)

    request_id: str = Field(min_length=1)
    target: str | None = None
    path: PathRequest = PathRequest.AUTO


MAX_STOPS = 16


def parse_completion(body: bytes) -> CompletionRequest:
    """Read a request body. Raises ApiError 400 that names the field."""
    request = _parse(CompletionRequest, body)
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options is only allowed with stream: true", param="stream_options")
    if len(request.stops) > MAX_STOPS:
        raise ApiError(400, f"stop: at most {MAX_STOPS} strings", param="stop")
    return request


def parse_move(body: bytes) -> MoveRequest:
    """Read a request body. Raises ApiError 400 that names the field."""
    return _parse(MoveRequest, body)


Body = TypeVar("Body", bound=BaseModel)


def _parse(kind: type[Body], body: bytes) -> Body:
    try:
        return kind.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_context=False)) from None


_UNSUPPORTED = {
    "n",
    "best_of",
    "echo",
    "logprobs",
    "suffix",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
}


_EITHER = {
    "prompt": "write one text or one list of token ids, not empty",
    "stop": "write a string or a list of strings, none of them empty",
}
"""Fields of several types, of which pydantic would explain the first only."""


def _refusal(errors: list[Any]) -> ApiError:
    """The first mistake, in words."""
    first = errors[0]
    param = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        unknown = ".".join(map(str, first["loc"]))
        return ApiError(400, f"unknown parameter {unknown!r}", param=unknown, code="unknown_parameter")
    if param in _UNSUPPORTED:
        return ApiError(400, f"{param!r} is not supported with this value", param=param, code="unsupported_parameter")
    if param is None:
        return ApiError(400, "the body must be a JSON object", code="invalid_body")
    wrong = first["msg"] if first["type"] == "missing" else _EITHER.get(param, first["msg"])
    return ApiError(400, f"{param}: {wrong}", param=param, code="invalid_value")
