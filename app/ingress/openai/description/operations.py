"""Every route of `app.ingress.http.routes` in words: what it takes, what it answers, and what it refuses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel

from app.ingress.openai.description import described
from app.ingress.openai.requests.schema import (
    MAX_CHOICES,
    MAX_STOPS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    MoveRequest,
    TokenizeRequest,
)

JSON, EVENTS, PLAIN = "application/json", "text/event-stream", "text/plain; charset=utf-8"


class Access(StrEnum):
    """Who may call a route."""

    ANYBODY = "anybody"
    CLIENT = "apiKey"
    OPERATOR = "adminKey"


class Tag(StrEnum):
    """What a route is for."""

    GENERATION = "Generation"
    MODEL = "Model and tokens"
    SERVICE = "Service"
    CONTROL = "Control"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a route answers if all is well. `model` describes JSON; None: any text, or any JSON object."""

    description: str
    model: type[BaseModel] | None = None
    status: int = 200
    media_type: str = JSON
    chunk: type[BaseModel] | None = None
    """What an event holds, of a route that also answers with server-sent events."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One route.

    `refused` are, in words, bodies that are refused though every member by itself is right. `errors` are the statuses
    that it may answer beside 500. `in_path` describes the parameters of its path, and `example` is a body that is
    accepted.
    """

    method: str
    path: str
    id: str
    tag: Tag
    access: Access
    summary: str
    answer: Answer
    errors: tuple[int, ...] = ()
    description: str = ""
    body: type[BaseModel] | None = None
    example: Mapping[str, Any] = field(default_factory=dict)
    in_path: Mapping[str, str] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    labelled: bool = False
    """Whether it heeds X-Request-Id."""


_READING = (400, 408, 413, 415)
_LIMITED = (429, 503, 504)
_GENERATION_REFUSED = (
    "`model` is not the served one (404).",
    "Prompt and most tokens of the answer together exceed the context, or the prompt `ingress.max_prompt_tokens`.",
    "`min_tokens` is above the most tokens that there may be.",
    f"More than {MAX_STOPS} `stop` strings.",
    "A token id in `stop_token_ids` or `logit_bias` that is not in the vocabulary.",
    "`stream_options` without `stream`.",
    "Both `response_format` and `structured_outputs`, or none or several of the members of the latter.",
    "A schema, an expression or a grammar that the engine cannot compile.",
    "A `seed` that leaves less than 64 bits for those of the other choices.",
)

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/v1/completions",
        "createCompletion",
        Tag.GENERATION,
        Access.CLIENT,
        "Complete a prompt",
        Answer("The completion, whole or as events.", described.Completion, chunk=described.CompletionChunk),
        (*_READING, 401, 404, *_LIMITED),
        "As OpenAI defines it, with vLLM's sampling parameters. `max_tokens` is 16 unless given.",
        CompletionRequest,
        {"prompt": "Blocks move", "max_tokens": 32, "temperature": 0},
        refused=(
            *_GENERATION_REFUSED,
            "An empty prompt, or one with a token id that is not in the vocabulary.",
            f"More than {MAX_CHOICES} choices: prompts times `n`.",
            "`best_of` other than `n`.",
            "`echo` with `logprobs`.",
        ),
        labelled=True,
    ),
    Operation(
        "POST",
        "/v1/chat/completions",
        "createChatCompletion",
        Tag.GENERATION,
        Access.CLIENT,
        "Answer a chat",
        Answer("The answer, whole or as events.", described.ChatCompletion, chunk=described.ChatCompletionChunk),
        (*_READING, 401, 404, *_LIMITED),
        "As OpenAI defines it, with vLLM's sampling parameters. The prompt is made by the model's chat template.",
        ChatRequest,
        {"messages": [{"role": "user", "content": "Where do blocks move?"}], "max_tokens": 32},
        refused=(
            *_GENERATION_REFUSED,
            "A model without a chat template, and messages that the template refuses or makes nothing of.",
            "Both `max_tokens` and `max_completion_tokens`.",
            "`top_logprobs` without `logprobs`.",
            "`tool_choice` without `tools`, or with a function that is none of them.",
            "A call that must be made, together with another form of the answer.",
            '`tools` with "auto" where there is no `model_loading_config.tool_call_parser`.',
            "`tool_calls` of a message that is not an assistant's.",
            "Tools whose `$defs` have one name for different schemas.",
        ),
        labelled=True,
    ),
    Operation(
        "GET",
        "/v1/models",
        "listModels",
        Tag.MODEL,
        Access.CLIENT,
        "List the models",
        Answer("The only model.", described.ModelList),
        (401,),
    ),
    Operation(
        "GET",
        "/v1/models/{model}",
        "getModel",
        Tag.MODEL,
        Access.CLIENT,
        "Describe a model",
        Answer("The model.", described.ModelEntry),
        (401, 404),
        in_path={"model": "Its id, which may have slashes."},
    ),
    Operation(
        "POST",
        "/tokenize",
        "tokenize",
        Tag.MODEL,
        Access.CLIENT,
        "Tell the tokens of a text or a chat",
        Answer("The tokens: what a completion of it would have for a prompt.", described.Tokens),
        (*_READING, 401, 404, *_LIMITED),
        "As vLLM's server has it.",
        TokenizeRequest,
        {"prompt": "Blocks move"},
        refused=(
            "`model` is not the served one (404).",
            "Both `prompt` and `messages`, or neither.",
            "`tools` without `messages`.",
            "A model without a chat template, and messages that the template refuses.",
        ),
    ),
    Operation(
        "POST",
        "/detokenize",
        "detokenize",
        Tag.MODEL,
        Access.CLIENT,
        "Tell the text of tokens",
        Answer("The text, special tokens included.", described.Text),
        (*_READING, 401, 404, *_LIMITED),
        "As vLLM's server has it.",
        DetokenizeRequest,
        {"tokens": [5, 6, 7]},
        refused=("`model` is not the served one (404).", "A token id that is not in the vocabulary."),
    ),
    Operation(
        "GET",
        "/health",
        "health",
        Tag.SERVICE,
        Access.ANYBODY,
        "Tell whether requests can be served",
        Answer("They can: the initial replicas have run, and at least one does.", media_type=PLAIN),
        (503,),
    ),
    Operation(
        "GET",
        "/live",
        "live",
        Tag.SERVICE,
        Access.ANYBODY,
        "Tell whether the ingress runs",
        Answer("It does.", media_type=PLAIN),
    ),
    Operation(
        "GET",
        "/version",
        "version",
        Tag.SERVICE,
        Access.ANYBODY,
        "Tell what runs",
        Answer("Versions.", described.Versions),
    ),
    Operation(
        "GET",
        "/metrics",
        "metrics",
        Tag.SERVICE,
        Access.ANYBODY,
        "Tell the whole application's metrics",
        Answer("Prometheus's text format; docs/metrics.md explains each metric.", media_type=CONTENT_TYPE_PLAIN_0_0_4),
    ),
    Operation(
        "GET",
        "/openapi.json",
        "openapi",
        Tag.SERVICE,
        Access.ANYBODY,
        "Describe these calls",
        Answer("A document of OpenAPI 3.1."),
    ),
    Operation(
        "GET",
        "/mell/state",
        "getState",
        Tag.CONTROL,
        Access.OPERATOR,
        "Show replicas and the requests on them",
        Answer("The state as of `as_of`: the last one known while the scheduler is away.", described.State),
        (401, 403),
    ),
    Operation(
        "GET",
        "/mell/migrations",
        "listMigrations",
        Tag.CONTROL,
        Access.OPERATOR,
        "Show migrations",
        Answer("Up to 1,000, newest first; the last ones known while the scheduler is away.", described.Migrations),
        (401, 403),
    ),
    Operation(
        "POST",
        "/mell/migrations",
        "migrate",
        Tag.CONTROL,
        Access.OPERATOR,
        "Move a running request",
        Answer("The migration has begun.", described.MoveStarted, 202),
        (*_READING, 401, 403, 404, 409, 422, 503),
        body=MoveRequest,
        example={"request_id": "demo", "path": "kv"},
        refused=(
            "No running request has the id or label (404), or several have the label (409, with `candidates`).",
            "The request cannot be moved (422), see docs/api.md; no other replica runs, or `target` does not (422).",
            "The scheduler or the source's replica is away (503).",
        ),
    ),
    Operation(
        "POST",
        "/mell/replicas/{replica}/drain",
        "drain",
        Tag.CONTROL,
        Access.OPERATOR,
        "Empty a replica and stop it",
        Answer("Its requests move to others while they run; then it stops.", described.DrainStarted, 202),
        (401, 403, 404, 422, 503),
        in_path={"replica": "An id from `/mell/state`."},
        refused=(
            "No such replica runs (404, with `replicas`).",
            "It is the only one that there may be (422).",
            "The scheduler or the replica is away (503).",
        ),
    ),
)
