"""Mell's own routes in words: bodies, responses and refusals."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel

from app.ingress.description import described
from app.ingress.http.orders import (
    BoundsOrder,
    CopyPrompt,
    DropOrder,
    LoadAdapter,
    MatchOrder,
    ModeRequest,
    MoveRequest,
    PinOrder,
    RoleOrder,
    StartProfile,
    UnloadAdapter,
)

JSON, PLAIN = "application/json", "text/plain; charset=utf-8"


class Access(StrEnum):
    """Who may call a route."""

    ANYBODY = "anybody"
    OPERATOR = "adminKey"


class Tag(StrEnum):
    """The purpose of a route."""

    SERVICE = "Service"
    CONTROL = "Control"


@dataclass(frozen=True, slots=True)
class Answer:
    """The response of a route without an error. `model` describes JSON; None: any text, or any JSON object."""

    description: str
    model: type[BaseModel] | None = None
    status: int = 200
    media_type: str = JSON


@dataclass(frozen=True, slots=True)
class Operation:
    """One route.

    `refused` are, in words, calls that are refused although every member of their bodies is valid. `errors` are the
    statuses of its errors beside 500. `in_path` describes the parameters of its path, and `example` is a valid body.
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


_READING = (400, 408, 413, 415)

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "GET",
        "/health",
        "health",
        Tag.SERVICE,
        Access.ANYBODY,
        "Check that requests can be served",
        Answer("They can: the initial replicas have run, and at least one does.", media_type=PLAIN),
        (503,),
    ),
    *(
        Operation(
            method,
            "/ping",
            id,
            Tag.SERVICE,
            Access.ANYBODY,
            "Check that requests can be served, by SageMaker's name",
            Answer("As `GET /health`.", media_type=PLAIN),
            (503,),
        )
        for method, id in (("GET", "ping"), ("POST", "pingByPost"))
    ),
    Operation(
        "GET",
        "/load",
        "load",
        Tag.SERVICE,
        Access.ANYBODY,
        "Count the calls that run",
        Answer("Their number in the ingress process that answers.", described.ServerLoad),
    ),
    Operation(
        "GET",
        "/live",
        "live",
        Tag.SERVICE,
        Access.ANYBODY,
        "Check that the ingress runs",
        Answer("It does.", media_type=PLAIN),
    ),
    Operation(
        "GET",
        "/version",
        "version",
        Tag.SERVICE,
        Access.ANYBODY,
        "Show versions",
        Answer("Versions.", described.Versions),
    ),
    Operation(
        "GET",
        "/metrics",
        "metrics",
        Tag.SERVICE,
        Access.ANYBODY,
        "Collect the metrics of the whole application",
        Answer("Prometheus's text format; docs/metrics.md explains each metric.", media_type=CONTENT_TYPE_PLAIN_0_0_4),
    ),
    Operation(
        "GET",
        "/openapi.json",
        "openapi",
        Tag.SERVICE,
        Access.ANYBODY,
        "Describe all calls",
        Answer("A document of OpenAPI 3.1; its making takes a second or two."),
    ),
    Operation(
        "GET",
        "/mell/state",
        "getState",
        Tag.CONTROL,
        Access.OPERATOR,
        "Show replicas and the requests on them",
        Answer("The state as of `as_of`: the last known one while the scheduler is away.", described.State),
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
            "No other replica may run (422).",
            "The scheduler or the replica is away (503).",
        ),
    ),
    Operation(
        "POST",
        "/mell/replicas/{replica}/role",
        "setRole",
        Tag.CONTROL,
        Access.OPERATOR,
        "Set a replica's role in prefill and decoding",
        Answer("It has the role from the next epoch on, as policies.md describes.", described.RoleSet, 202),
        (*_READING, 401, 403, 404, 422, 503),
        "The role holds until `null` takes it back, or the replica ends.",
        body=RoleOrder,
        in_path={"replica": "An id from `/mell/state`."},
        example={"role": "prefill"},
        refused=(
            "No such replica runs (404, with `replicas`).",
            "`scheduler.mode` is not `act`, so nothing moves requests on (422).",
            "The scheduler is away (503).",
        ),
    ),
    Operation(
        "GET",
        "/mell/mode",
        "mode",
        Tag.CONTROL,
        Access.OPERATOR,
        "Get the scheduler's mode",
        Answer("The mode, and the one in the settings.", described.Modes),
        (401, 403, 503),
        refused=("The scheduler has not reported yet (503).",),
    ),
    Operation(
        "POST",
        "/mell/mode",
        "setMode",
        Tag.CONTROL,
        Access.OPERATOR,
        "Stop the scheduler's moves, or let it move again",
        Answer("The scheduler has the mode: no later epoch acts in another one.", described.ModeSet),
        (*_READING, 401, 403, 422, 503),
        "The mode holds until another order or until the application is deployed again, a restart of the scheduler "
        "included. Moves that have been ordered go on to their ends. The requests of stopping replicas move in every "
        "mode, and so do those that an operator moves.",
        body=ModeRequest,
        example={"mode": "off"},
        refused=(
            "The mode is `act`, and `autoscaling_config.target_ongoing_requests` has Serve decide on the number of "
            "replicas (422).",
            "The scheduler is away (503).",
        ),
    ),
    Operation(
        "POST",
        "/mell/bounds",
        "setBounds",
        Tag.CONTROL,
        Access.OPERATOR,
        "Set the bounds on the number of replicas",
        Answer("They count at once.", described.BoundsSet),
        (*_READING, 401, 403, 422, 503),
        "They count until Serve ends, or a configuration with other bounds is applied. Replicas beyond the maximum are "
        "stopped, and their requests move to others.",
        body=BoundsOrder,
        example={"min_replicas": 2, "max_replicas": 6},
        refused=(
            "`scheduler.mode` is not `act`, or so many replicas are for prefills (422).",
            "The scheduler is away (503).",
        ),
    ),
    Operation(
        "POST",
        "/mell/cache/match",
        "matchPrompt",
        Tag.CONTROL,
        Access.OPERATOR,
        "Look a prompt up in all prefix caches",
        Answer("The tokens that each replica has, and the placement that a request would get now.", described.Match),
        (*_READING, 401, 403, 404, 503),
        "Nothing is placed or promised. A request would be of the class `default`. caching.md explains the answer.",
        body=MatchOrder,
        example={"prompt": "You are a helpful assistant."},
        refused=(
            "Both `prompt` and `messages`, or neither (400).",
            "The prompt is empty, or longer than `ingress.max_prompt_tokens` or the model's context (400).",
            "`messages` with images, audio or video (400).",
            "There is no such model or adapter (404).",
            "The scheduler is away (503).",
        ),
    ),
    Operation(
        "POST",
        "/mell/cache/copy",
        "copyPrompt",
        Tag.CONTROL,
        Access.OPERATOR,
        "Copy the cached blocks of a prompt from one replica to another",
        Answer("The target has the blocks.", described.Copied),
        (*_READING, 401, 403, 404, 409, 503),
        "Only blocks that the target lacks are sent, and requests go on meanwhile.",
        body=CopyPrompt,
        example={"prompt": "You are a helpful assistant.", "from": "a", "to": "b"},
        refused=(
            "Both `prompt` and `messages`, or neither; `from` and `to` are the same replica (400).",
            "The prompt is empty, or longer than `ingress.max_prompt_tokens` or the model's context (400).",
            "`messages` with images, audio or video (400).",
            "There is no such model or adapter, or no such replica runs (404, with `replicas`).",
            "Nothing was copied: the donor has no block of it, the target has no room, or the caches differ (409).",
            "The ingress is starting, or the donor is away (503).",
        ),
    ),
    Operation(
        "POST",
        "/mell/cache/pin",
        "pinBlocks",
        Tag.CONTROL,
        Access.OPERATOR,
        "Keep the blocks of a prompt in host memory for a time",
        Answer("They are not evicted from there.", described.PinnedPrefix),
        (*_READING, 401, 403, 404, 409, 422, 503),
        "On the replicas that have the prompt's first block in their host memory. A later call for the same prompt "
        "replaces its pin; `ttl_s: 0` ends it.",
        body=PinOrder,
        example={"prompt": "You are a helpful assistant.", "ttl_s": 3600},
        refused=(
            "Both `prompt` and `messages`, or neither; `ttl_s` is negative or above a day (400).",
            "The prompt is empty, or longer than `ingress.max_prompt_tokens` or the model's context (400).",
            "`messages` with images, audio or video (400).",
            "There is no such model or adapter, or no such replica runs (404, with `replicas`).",
            "No replica has the prompt in host memory, or its pin has expired (404).",
            "There is no tier of host memory, or `cache.pin_share` is exceeded (409).",
            "The prompt has no full block, or its blocks have no names (422).",
            "The ingress is starting, or no replica answers (503).",
        ),
    ),
    Operation(
        "DELETE",
        "/mell/cache",
        "dropBlocks",
        Tag.CONTROL,
        Access.OPERATOR,
        "Delete the blocks of a prompt, or all blocks, from prefix caches",
        Answer("No later request finds the blocks.", described.Dropped),
        (*_READING, 401, 403, 404, 422, 503),
        "Running requests keep the blocks that they use, and go on. Without `prompt` and `messages`, all blocks are "
        "deleted; the body may be empty.",
        body=DropOrder,
        example={"prompt": "You are a helpful assistant."},
        refused=(
            "Both `prompt` and `messages`; `model` or `cache_salt` with neither (400).",
            "The prompt is empty, or longer than `ingress.max_prompt_tokens` or the model's context (400).",
            "`messages` with images, audio or video (400).",
            "There is no such model or adapter, or no such replica runs (404, with `replicas`).",
            "The prompt has no full block, or its blocks have no names (422).",
            "The ingress is starting (503).",
        ),
    ),
    Operation(
        "POST",
        "/mell/reset_prefix_cache",
        "resetPrefixCache",
        Tag.CONTROL,
        Access.OPERATOR,
        "Drop the cached KV blocks of ended requests, on all running replicas",
        Answer("As vLLM's `/reset_prefix_cache`.", described.CarriedOut),
        (401, 403),
        "As in vLLM, a replica on which requests run keeps its cache: try again.",
    ),
    Operation(
        "POST",
        "/mell/start_profile",
        "startProfile",
        Tag.CONTROL,
        Access.OPERATOR,
        "Start the profilers of all running replicas",
        Answer("As vLLM's `/start_profile`.", described.CarriedOut),
        (*_READING, 401, 403),
        "Engines have a profiler with `engine_kwargs.profiler_config`. The body may be empty.",
        body=StartProfile,
        example={"max_iterations": 50},
    ),
    Operation(
        "POST",
        "/mell/stop_profile",
        "stopProfile",
        Tag.CONTROL,
        Access.OPERATOR,
        "Stop the profilers of all running replicas, and write their files",
        Answer("As vLLM's `/stop_profile`.", described.CarriedOut),
        (401, 403),
        "Until then, a silent engine is not replaced (`deployment_config.engine_silence_s`): writing takes minutes.",
    ),
    Operation(
        "POST",
        "/v1/load_lora_adapter",
        "loadAdapter",
        Tag.CONTROL,
        Access.OPERATOR,
        "Load a LoRA adapter",
        Answer("All running replicas have loaded it, and the ingress processes serve it.", media_type=PLAIN),
        (*_READING, 401, 403, 404, 503),
        "As in vLLM. Without `ingress.allow_runtime_lora_updating` the answer is 404.",
        body=LoadAdapter,
        example={"lora_name": "sql", "lora_path": "/models/sql"},
        refused=(
            "The name is that of the model, of a loaded adapter (without `load_inplace`), or of one in "
            "`lora_modules` (400).",
            "A replica cannot load it; the message has the replica and the reason (400).",
            "No replica runs (503).",
        ),
    ),
    Operation(
        "POST",
        "/v1/unload_lora_adapter",
        "unloadAdapter",
        Tag.CONTROL,
        Access.OPERATOR,
        "Unload a LoRA adapter",
        Answer("No new request can name it; requests that run with it continue.", media_type=PLAIN),
        (*_READING, 401, 403, 404),
        "As in vLLM. Without `ingress.allow_runtime_lora_updating` the answer is 404.",
        body=UnloadAdapter,
        example={"lora_name": "sql"},
        refused=("No such adapter is loaded (404), or it is in `lora_modules` (400).",),
    ),
)
