"""Request bodies: as OpenAI and vLLM define them, and moves. What is not supported is refused, never ignored."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from app.ingress.errors import ApiError
from app.ingress.openai.requests.formats import ResponseFormat, StructuredOutputs
from app.ingress.openai.requests.messages import Messages
from app.ingress.openai.requests.refusals import parse
from app.ingress.openai.requests.strict import NotEmpty, Strict
from app.ingress.openai.requests.tools import NamedTool, ToolChoice, Tools
from app.ingress.openai.sampling import Structured
from migration.protocol.messages import PathRequest

_INT64 = 1 << 63
MAX_STOPS = 16
MAX_STOP_TOKENS = 128
MAX_BIASES = 1024
"""The two above: as many as vLLM's GPU sampler holds (v1/worker/gpu/sample/logit_bias.py)."""

MAX_N = 16
MAX_CHOICES = 128
"""Choices of one answer, over all prompts: each is a request of its own to the replicas."""
MAX_LOGPROBS, MAX_TOP_LOGPROBS = 5, 20
"""OpenAI's maxima for completions and chats; the latter is vLLM's default for `max_logprobs`, too."""

# A list's first wrong member tells that it is another kind of list: the others need not be looked at.
Tokens = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[NotEmpty], Field(min_length=1, fail_fast=True)]
TokenLists = Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]

_MODEL: Any = Field(None, description="The served model's id; another one is not found.")
_UNSUPPORTED: Any = Field(None, description="Not supported: only `null`.")


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool = Field(False, description="Whether a last chunk without choices tells the usage.")


class Generation(Strict):
    """What completions and chats have in common. Fields with a single allowed value are known but not supported."""

    prompt_field: ClassVar[str]

    model: str | None = _MODEL
    max_tokens: int | None = Field(None, ge=1, description="Most tokens of each choice.")
    min_tokens: int = Field(
        0,
        ge=0,
        description="Tokens of each choice before which neither the model nor `stop` or `stop_token_ids` ends it; "
        "not above the most that there may be.",
    )
    temperature: float | None = Field(None, ge=0.0, le=2.0, description="0: the likeliest token each time. Unset: 1.")
    top_p: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="Draw from the likeliest tokens that have this probability together. Unset: 1.",
    )
    top_k: int | None = Field(
        None, ge=-1, description="Draw from this many of the likeliest tokens. Unset, 0 or -1: from all."
    )
    min_p: float | None = Field(
        None, ge=0.0, le=1.0, description="Draw from tokens at least this likely relative to the likeliest. Unset: 0."
    )
    seed: int | None = Field(
        None,
        ge=-_INT64,
        lt=_INT64,
        description="Tokens are drawn the same way each time. A prompt's choices have this seed and those after it.",
    )
    presence_penalty: float | None = Field(
        None, ge=-2.0, le=2.0, description="Taken from the logits of tokens that the choice has. Unset: 0."
    )
    frequency_penalty: float | None = Field(
        None,
        ge=-2.0,
        le=2.0,
        description="Taken from the logits of tokens for each time that the choice has them. Unset: 0.",
    )
    repetition_penalty: float | None = Field(
        None,
        gt=0.0,
        description="Above 1, tokens that prompt or choice have get less likely, below 1 likelier. Unset: 1.",
    )
    logit_bias: dict[int, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = Field(
        None, max_length=MAX_BIASES, description="Added to the logits of these token ids of the vocabulary."
    )
    stop: NotEmpty | list[NotEmpty] | None = Field(
        None,
        description=f"Texts, at most {MAX_STOPS}, before the first of which a choice ends.",
    )
    stop_token_ids: list[int] | None = Field(
        None, max_length=MAX_STOP_TOKENS, description="Token ids of the vocabulary that end a choice."
    )
    ignore_eos: bool = Field(False, description="Whether a choice goes on after the model's end.")
    stream: bool | None = Field(False, description="Whether to answer with server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only with `stream`.")
    user: str | None = Field(None, description="Accepted, not used.")
    priority: int = Field(
        0,
        ge=-_INT64,
        lt=_INT64,
        description="With `engine_kwargs.scheduling_policy: priority`, an engine runs lower ones first and preempts "
        "higher ones first; else without effect.",
    )
    response_format: ResponseFormat | None = Field(None, description="What the answer has to match, as OpenAI has it.")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="What the answer has to match, as vLLM has it; instead of `response_format`."
    )
    n: int | None = Field(
        None, ge=1, le=MAX_N, description=f"Choices for each prompt. Unset: 1. At most {MAX_CHOICES} over all prompts."
    )

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def longest(self) -> tuple[str, int | None]:
        """The parameter that bounds the answer, and what it says."""
        return "max_tokens", self.max_tokens

    @property
    def structured(self) -> Structured | None:
        """What the answer has to match, if anything."""
        wanted = self.structured_outputs or self.response_format
        return wanted.structured if wanted is not None else None

    @property
    def form(self) -> str:
        """The parameter that says what the answer has to match, if one does."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    @property
    def choices(self) -> int:
        """Choices for each prompt."""
        return self.n or 1

    @property
    def likeliest(self) -> int | None:
        """With how many of the likeliest tokens the logprob of each token is told; None: it is not told."""
        raise NotImplementedError


class CompletionRequest(Generation):
    """Body of POST /v1/completions."""

    prompt_field = "prompt"

    prompt: Annotated[NotEmpty | Tokens | Texts | TokenLists, Field(union_mode="left_to_right")] = Field(
        description="A text, a list of token ids, or a list of texts or of such lists: one or more prompts."
    )
    best_of: int | None = Field(None, ge=1, description="Accepted if it is `n`.")
    echo: bool | None = Field(False, description="Whether choices begin with their prompt; not with `logprobs`.")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Tell each token's logprob, and those of this many of the likeliest. Unset: none.",
    )

    suffix: None = _UNSUPPORTED

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """One or more prompts, as they were written."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @property
    def likeliest(self) -> int | None:
        """See `Generation.likeliest`."""
        return self.logprobs


class ChatRequest(Generation):
    """Body of POST /v1/chat/completions."""

    prompt_field = "messages"

    messages: Messages = Field(description="The chat so far, the newest message last.")
    max_completion_tokens: int | None = Field(
        None,
        ge=1,
        description="The newer name of `max_tokens`; one of them. Unset: what the prompt leaves of the context.",
    )
    logprobs: bool | None = Field(False, description="Whether to tell each token's logprob.")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="Tell the logprobs of this many of the likeliest tokens, too; only with `logprobs`.",
    )

    tools: Tools | None = Field(None, description="Functions that may be called.")
    tool_choice: ToolChoice | None = Field(
        None,
        description='"auto" (unset, with `tools`: this) wants `model_loading_config.tool_call_parser`; "required" and '
        "a function by its name hold the answer to the form of calls; only with `tools`.",
    )
    parallel_tool_calls: bool | None = Field(None, description="Whether a choice may have several calls. Unset: yes.")
    functions: None = _UNSUPPORTED
    function_call: Literal["none"] | None = Field(None, description="Accepted, not used.")

    @property
    def longest(self) -> tuple[str, int | None]:
        """See `Generation.longest`; max_tokens is the older name."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """See `Generation.likeliest`."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def tool_use(self) -> ToolChoice:
        """Which tools may be called, or must be."""
        return "none" if self.tools is None else self.tool_choice or "auto"

    @property
    def calls_in_parallel(self) -> bool:
        """Whether an answer may have several calls."""
        return self.parallel_tool_calls is not False


class TokenizeRequest(Strict):
    """Body of POST /tokenize. Unless it says, special tokens are added to a prompt, and not to a chat."""

    model: str | None = _MODEL
    prompt: str | None = Field(None, description="A text; either it or `messages`.")
    messages: Messages | None = Field(None, description="A chat, of which the chat template makes a text.")
    add_special_tokens: bool | None = Field(
        None, description="Whether the tokenizer's special tokens are put around the text. Unset: for a `prompt` only."
    )
    add_generation_prompt: bool = Field(True, description="Whether a chat ends with the beginning of an answer.")
    return_token_strs: bool | None = Field(False, description="Whether the tokens' texts are told, too.")

    tools: Tools | None = Field(None, description="What the chat template is shown; only with `messages`.")

    continue_final_message: Literal[False] = Field(False, description="Not supported: only `false`.")


class DetokenizeRequest(Strict):
    """Body of POST /detokenize."""

    model: str | None = _MODEL
    tokens: list[int] = Field(description="Token ids of the vocabulary.")


class MoveRequest(Strict):
    """Body of POST /mell/migrations. `request_id` may be the id or the client's label."""

    request_id: str = Field(
        min_length=1, description="The request's id, or its `X-Request-Id` if only one running request has it."
    )
    target: str | None = Field(None, description="The replica to move it to. Unset: what the placement policy chooses.")
    path: PathRequest = Field(
        PathRequest.AUTO,
        description='"kv" sends KV blocks, "tokens" has the target prefill; "auto": KV where it can be.',
    )


def parse_completion(body: bytes) -> CompletionRequest:
    """Read a request body. Raises ApiError 400 that names the field."""
    request = parse(CompletionRequest, body)
    _check_together(request)
    if request.best_of not in (None, request.choices):
        raise _unsupported("best_of", "only as many as n can be drawn")
    if request.echo and request.logprobs is not None:
        raise _unsupported("echo", "the logprobs of a prompt are not told: leave out echo or logprobs")
    if (total := len(request.prompts) * request.choices) > MAX_CHOICES:
        raise _wrong("prompt", f"{total} choices are wanted (prompts times n), at most {MAX_CHOICES} are told at once")
    return request


def parse_chat(body: bytes) -> ChatRequest:
    """Read a request body. Raises ApiError 400 that names the field."""
    request = parse(ChatRequest, body)
    _check_together(request)
    if None not in (request.max_tokens, request.max_completion_tokens):
        raise _wrong("max_completion_tokens", "it replaces max_tokens, write one of them")
    if request.top_logprobs and not request.logprobs:
        raise _wrong("top_logprobs", "is only allowed with logprobs: true")
    _check_tools(request)
    return request


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Read a request body. Raises ApiError 400 that names the field."""
    request = parse(TokenizeRequest, body)
    if (request.prompt is None) == (request.messages is None):
        raise _wrong("prompt", "write either prompt or messages")
    if request.tools is not None and request.messages is None:
        raise _wrong("tools", "is only allowed with messages")
    return request


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Read a request body. Raises ApiError 400 that names the field."""
    return parse(DetokenizeRequest, body)


def parse_move(body: bytes) -> MoveRequest:
    """Read a request body. Raises ApiError 400 that names the field."""
    return parse(MoveRequest, body)


def _check_together(request: Generation) -> None:
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options is only allowed with stream: true", param="stream_options")
    if len(request.stops) > MAX_STOPS:
        raise ApiError(400, f"stop: at most {MAX_STOPS} strings", param="stop")
    if request.structured_outputs is not None and request.response_format is not None:
        raise _wrong("structured_outputs", "write it or response_format")
    if request.seed is not None and request.seed + request.choices > _INT64:
        raise _wrong("seed", "the seeds of n choices are this one and those after it, each a 64-bit integer")


def _check_tools(request: ChatRequest) -> None:
    if request.tools is None and request.tool_choice not in (None, "none"):
        raise _wrong("tool_choice", "is only allowed with tools")
    if isinstance(request.tool_use, NamedTool):
        name = request.tool_use.function.name
        if name not in [tool.function.name for tool in request.tools or ()]:
            raise _wrong("tool_choice", f"none of the tools is the function {name!r}")
    if request.tool_use not in ("none", "auto") and request.structured is not None:
        raise _wrong("tool_choice", "a call that must be made has a form of its own: leave out the other one")


def _wrong(field: str, why: str) -> ApiError:
    return ApiError(400, f"{field}: {why}", param=field, code="invalid_value")


def _unsupported(field: str, why: str) -> ApiError:
    return ApiError(400, f"{field}: {why}", param=field, code="unsupported_parameter")
