"""From a validated request to what replicas need to know of it: what completions and chats have in common."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from app.ingress.errors import ApiError
from app.ingress.openai.answers.calls import Calling
from app.ingress.openai.answers.choice import Shape
from app.ingress.openai.model import Model
from app.ingress.openai.requests.schema import Generation
from app.ingress.openai.sampling import Prompt, Sampling, Structured
from migration.protocol.continuing import to_spec
from migration.protocol.core_messages import Frames
from migration.protocol.request import IngressId, RequestSpec
from policies.model import RequestId

Request = TypeVar("Request", bound=Generation)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[Request]):
    """An endpoint that generates text. `prompts` makes prompts of a request, and may raise ApiError.

    `default_tokens` is the longest answer to a request that does not say; None: what the prompt leaves of the context.
    `calling` says how tools are called, None: they are not; it may raise ApiError.
    """

    id_prefix: str
    parse: Callable[[bytes], Request]
    prompts: Callable[[Request, Model], Sequence[Prompt]]
    shape: Shape
    default_tokens: int | None
    calling: Callable[[Request, Model], Calling | None] = lambda request, model: None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request asks of replicas: one spec and sampling per choice, `n` for each prompt, in the order of indices.

    `form` is the parameter that says what the answers have to match, None if they may be anything.
    """

    id: RequestId
    prompts: tuple[Prompt, ...]
    specs: tuple[RequestSpec, ...]
    samplings: tuple[Sampling, ...]
    calling: Calling | None = None
    form: str | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(prompt.tokens) for prompt in self.prompts)

    def prompt(self, choice: int) -> Prompt:
        """The prompt of a choice."""
        return self.prompts[choice * len(self.prompts) // len(self.specs)]


def to_plan(
    endpoint: Endpoint[Request], request: Request, model: Model, request_id: RequestId, label: str, ingress: IngressId
) -> Plan:
    """What replicas need to know of a request.

    Several choices are requests of their own, with the index behind the id and, as in vLLM (v1/engine/
    parallel_sampling.py), the index among those of the prompt added to the seed.

    Raises:
        ApiError: 404 for another model, 400 for a request that cannot be served.
    """
    model.check_name(request.model)
    calling = endpoint.calling(request, model)
    structured = request.structured if calling is None else calling.structured
    form = request.form if structured == request.structured else "tools"
    prompts = tuple(endpoint.prompts(request, model))
    blamed = form if structured is not None else None
    specs: list[RequestSpec] = []
    samplings: list[Sampling] = []
    for prompt in prompts:
        longest = _longest(endpoint, request, len(prompt.tokens), model.max_context)
        sampling = _sampling(request, model, longest, structured)
        for index in range(request.choices):
            own_id = RequestId(f"{request_id}-{len(specs)}") if len(prompts) * request.choices > 1 else request_id
            own = sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + index)
            specs.append(to_spec(_core_request(model, prompt, own, blamed), own_id, label, ingress))
            samplings.append(own)
    return Plan(request_id, prompts, tuple(specs), tuple(samplings), calling, blamed)


def _core_request(model: Model, prompt: Prompt, sampling: Sampling, form: str | None) -> Frames:
    """The request for an engine. Raises ApiError 400 for one that no engine runs, blamed on `form` if there is one."""
    try:
        return model.requests.make(prompt.tokens, sampling)
    except ValueError as error:
        text = f"{form}: {error}" if form is not None else str(error)
        raise ApiError(400, text, param=form, code="invalid_value") from error


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


def _sampling(request: Generation, model: Model, max_tokens: int, structured: Structured | None) -> Sampling:
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
        logprobs=request.likeliest,
        structured=structured,
        priority=request.priority,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
