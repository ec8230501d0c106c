"""Response bodies as models: they describe answers, which are written elsewhere, and a test holds the two together."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from migration.protocol.record import MigrationRecord
from policies.model import Phase, ReplicaState


class Described(BaseModel):
    """A response body or a part of one. More members may be added to it in later versions."""

    model_config = ConfigDict(defer_build=True)


class ErrorDetail(Described):
    """What is wrong. Some errors have members beside these, such as `candidates`."""

    message: str = Field(description="In words.")
    type: str = Field(description="The kind of error, as OpenAI names it; it follows from the status.")
    param: str | None = Field(description="The parameter that is wrong: `messages[0].content`.")
    code: str | None = Field(description="For programs; null where the status says it all.")


class Error(Described):
    """An error, as OpenAI has it."""

    error: ErrorDetail


class Usage(Described):
    """Tokens that were used. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(Described):
    """The logprobs of a choice, with one entry per token."""

    text_offset: list[int] = Field(description="Characters before the token.")
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]] = Field(description="The token itself and the likeliest, by their texts.")


class CompletionChoice(Described):
    """One choice of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(Described):
    """A completion."""

    id: str
    object: Literal["text_completion"]
    created: int = Field(description="Unix time in seconds.")
    model: str
    choices: list[CompletionChoice] = Field(description="`n` for each prompt, in the order of the prompts.")
    usage: Usage


class CompletionChunkChoice(Described):
    """What an engine step adds to a choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None = Field(description="Null but in the choice's last chunk.")


class CompletionChunk(Described):
    """One event of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int = Field(description="Unix time in seconds.")
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = Field(None, description="Only with `include_usage`: null but in the last chunk.")


class TokenLogprob(Described):
    """A token's logprob."""

    token: str
    logprob: float
    bytes: list[int] = Field(description="The token's text in UTF-8.")


class ScoredToken(TokenLogprob):
    """A token of the answer, with the likeliest in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Described):
    """The logprobs of a choice."""

    content: list[ScoredToken]
    refusal: None


class AnsweredFunction(Described):
    """A function that is called."""

    name: str
    arguments: str = Field(description="JSON; cut off if the answer is.")


class AnsweredCall(Described):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnsweredMessage(Described):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str | None = Field(description="Null if there are only calls.")
    refusal: None
    tool_calls: list[AnsweredCall] = Field(default_factory=list, description="Left out if there are none.")


class ChatChoice(Described):
    """One choice of a chat."""

    index: int
    message: AnsweredMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Described):
    """An answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int = Field(description="Unix time in seconds.")
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(Described):
    """More of a function that is called."""

    name: str = Field("", description="Only in the first chunk of a call.")
    arguments: str = Field(description="More of the JSON.")


class CallDelta(Described):
    """More of a call of a tool."""

    index: int = Field(description="Which call of the choice it is.")
    id: str = Field("", description="Only in the first chunk of a call.")
    type: Literal["function"] = Field("function", description="Only in the first chunk of a call.")
    function: FunctionDelta


class Delta(Described):
    """What a chunk adds to a message."""

    role: Literal["assistant"] = Field("assistant", description="Only in the first chunk of a choice.")
    content: str = Field("", description="More of the text.")
    tool_calls: list[CallDelta] = Field(default_factory=list, description="New calls, and more of known ones.")


class ChatChunkChoice(Described):
    """What an engine step adds to a choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = Field(
        description="Null but in the choice's last chunk."
    )


class ChatCompletionChunk(Described):
    """One event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int = Field(description="Unix time in seconds.")
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = Field(None, description="Only with `include_usage`: null but in the last chunk.")


class ModelEntry(Described):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int = Field(description="Unix time in seconds of the ingress's start.")
    owned_by: Literal["mell"]
    max_model_len: int = Field(description="The context: most tokens of prompt and answer together.")
    vocab_size: int = Field(description="Token ids are below this.")


class ModelList(Described):
    """All models, of which there is one."""

    object: Literal["list"]
    data: list[ModelEntry]


class Tokens(Described):
    """The tokens of a text or a chat."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = Field(description="Null unless asked for.")


class Text(Described):
    """The text of tokens."""

    prompt: str


class Versions(Described):
    """Versions of Mell and of what it runs on."""

    version: str
    vllm: str
    ray: str
    torch: str


class RunningRequest(Described):
    """A request on a replica."""

    id: str
    label: str = Field(description="Its `X-Request-Id`, or its id.")
    tokens: int = Field(description="Prompt and output so far.")
    phase: Phase
    age_s: float
    movable: bool
    immovable_reason: str | None
    hop: int = Field(description="Rises with each move and each resubmission.")


class Replica(Described):
    """A replica with its requests."""

    id: str
    state: ReplicaState
    node: str
    pids: list[int] = Field(description="Replica, EngineCore and all workers; empty if the replica does not report.")
    capacity_tokens: int
    free_blocks: int
    used_tokens: int
    preemptions: int
    kv_blocks_loaded: int
    staging_slots_in_use: int
    requests: list[RunningRequest]


class State(Described):
    """The cluster as the scheduler sees it; before the first answer of a scheduler only the first, second and last."""

    as_of: float = Field(description="Unix time in seconds.")
    mode: Literal["act", "observe", "off"]
    policy: str = ""
    fence: int = Field(0, description="Rises with every scheduler that starts.")
    wanted_replicas: int = 0
    estimates: dict[str, Any] = Field(default_factory=dict, description="What is believed of links and replicas.")
    resting_pairs: list[list[str]] = Field(
        default_factory=list, description="Source and target between which moves fail."
    )
    dry_run: dict[str, Any] = Field(default_factory=dict, description="Only in the mode `observe`.")
    replicas: list[Replica]


class Migrations(Described):
    """Migrations, newest first."""

    migrations: list[MigrationRecord]


class MoveStarted(Described):
    """The migration has begun."""

    id: str = Field(description="Its id in `/mell/migrations`, which tells how it ends.")


class DrainStarted(Described):
    """The replica is being emptied."""

    id: str
    state: Literal["DRAINING"]
