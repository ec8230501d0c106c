"""From a validated request to what replicas need to know of it: what completions and chats have in common."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from app.ingress.answer import Shape
from app.ingress.errors import ApiError
from app.ingress.model import Model
from app.ingress.schema import Generation
from migration.request import IngressId, RequestSpec, Sampling
from policies.model import RequestId

Request = TypeVar("Request", bound=Generation)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[Request]):
    """An endpoint that generates text. `tokens` makes a prompt of a request, and may raise ApiError.

    `default_tokens` is the longest answer to a request that does not say; None: what the prompt leaves of the context.
    """

    id_prefix: str
    parse: Callable[[bytes], Request]
    tokens: Callable[[Request, Model], tuple[int, ...]]
    shape: Shape
    default_tokens: int | None


def to_spec(
    endpoint: Endpoint[Request], request: Request, model: Model, request_id: RequestId, label: str, ingress: IngressId
) -> RequestSpec:
    """What replicas need to know of a request.

    Raises:
        ApiError: 404 for another model, 400 for a request that cannot be served.
    """
    model.check_name(request.model)
    prompt = endpoint.tokens(request, model)
    longest = _longest(endpoint, request, len(prompt), model.max_context)
    return RequestSpec(request_id, label, prompt, _sampling(request, model, longest), ingress)


def _longest(endpoint: Endpoint[Request], request: Request, prompt: int, context: int) -> int:
    """Most tokens of the answer. Raises ApiError 400 when they and the prompt exceed the context."""
    name, asked = request.longest
    left = context - prompt
    longest = asked or endpoint.default_tokens or left
    if 0 < longest <= left:
        return longest
    field, excess = (name, f" and {name} is {longest}") if left > 0 else (request.prompt_field, "")
    raise ApiError(
        400,
        f"{field}: this model's context is {context} tokens; the prompt has {prompt}{excess}",
        param=field,
        code="context_length_exceeded",
    )


def _sampling(request: Generation, model: Model, max_tokens: int) -> Sampling:
    if request.min_tokens > max_tokens:
        raise ApiError(
            400,
            f"min_tokens ({request.min_tokens}) is above the most tokens that there may be ({max_tokens})",
            param="min_tokens",
            code="invalid_value",
        )
    stop_token_ids = tuple(request.stop_token_ids or ())
    logit_bias = tuple(sorted((request.logit_bias or {}).items()))
    model.check_ids("stop_token_ids", stop_token_ids)
    model.check_ids("logit_bias", [token for token, _ in logit_bias])
    return Sampling(
        max_tokens=max_tokens,
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        seed=request.seed,
        ignore_eos=request.ignore_eos,
        stop_token_ids=stop_token_ids,
        min_tokens=request.min_tokens,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        logit_bias=logit_bias,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
