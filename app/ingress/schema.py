"""Request bodies: as OpenAI and vLLM define them, and moves. What is not supported is refused, never ignored."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from app.ingress.errors import ApiError
from app.ingress.refusals import parse
from migration.messages import PathRequest

_INT64 = 1 << 63
MAX_STOPS = 16
MAX_STOP_TOKENS = 128
MAX_BIASES = 1024
"""The two above: as many as vLLM's GPU sampler holds (v1/worker/gpu/sample/logit_bias.py)."""

NotEmpty = Annotated[str, Field(min_length=1)]


class Strict(BaseModel):
    """A body: unknown members are refused, values are not converted between types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool = False


class Generation(Strict):
    """What completions and chats have in common. Fields with a single allowed value are known but not supported."""

    prompt_field: ClassVar[str]

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(None, gt=0.0)
    logit_bias: dict[int, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = Field(None, max_length=MAX_BIASES)
    stop: NotEmpty | list[NotEmpty] | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOP_TOKENS)
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    n: Literal[1] | None = None

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


class CompletionRequest(Generation):
    """Body of POST /v1/completions."""

    prompt_field = "prompt"

    prompt: NotEmpty | Annotated[list[int], Field(min_length=1)]

    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: None = None


def _text(content: Any) -> Any:
    """Text parts become one text, a line each, as in vLLM."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError("write a string or a list of text parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError('only parts of type "text" are supported')
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError('a text part is {"type": "text", "text": "..."}')
    return "\n".join(part["text"] for part in content)


class ChatMessage(Strict):
    """One message of a chat. Calls of tools and other media are not supported; their members may be null."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_text)]
    name: str | None = None
    tool_call_id: str | None = None

    tool_calls: None = None
    function_call: None = None
    refusal: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    def fields(self) -> dict[str, str]:
        """What a chat template sees."""
        return self.model_dump(include={"role", "content", "name", "tool_call_id"}, exclude_none=True)


Messages = Annotated[list[ChatMessage], Field(min_length=1)]


class ResponseFormat(Strict):
    """The format of an answer."""

    type: Literal["text"]


class ChatRequest(Generation):
    """Body of POST /v1/chat/completions."""

    prompt_field = "messages"

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1)

    tools: None = None
    tool_choice: Literal["none"] | None = None
    functions: None = None
    function_call: Literal["none"] | None = None
    response_format: ResponseFormat | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: None = None

    @property
    def longest(self) -> tuple[str, int | None]:
        """See `Generation.longest`; max_tokens is the older name."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class TokenizeRequest(Strict):
    """Body of POST /tokenize. Unless it says, special tokens are added to a prompt, and not to a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False

    continue_final_message: Literal[False] = False
    tools: None = None


class DetokenizeRequest(Strict):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class MoveRequest(Strict):
    """Body of POST /mell/migrations. `request_id` may be the id or the client's label."""

    request_id: str = Field(min_length=1)
    target: str | None = None
    path: PathRequest = PathRequest.AUTO


def parse_completion(body: bytes) -> CompletionRequest:
    """Read a request body. Raises ApiError 400 that names the field."""
    request = parse(CompletionRequest, body)
    _check_together(request)
    return request


def parse_chat(body: bytes) -> ChatRequest:
    """Read a request body. Raises ApiError 400 that names the field."""
    request = parse(ChatRequest, body)
    _check_together(request)
    if None not in (request.max_tokens, request.max_completion_tokens):
        raise ApiError(
            400,
            "max_completion_tokens: it replaces max_tokens, write one of them",
            param="max_completion_tokens",
            code="invalid_value",
        )
    return request


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Read a request body. Raises ApiError 400 that names the field."""
    request = parse(TokenizeRequest, body)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "prompt: write either prompt or messages", param="prompt", code="invalid_value")
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
