"""Orders of operators: the bodies of their calls. Unknown members and other types are refused."""

from typing import Any, Self, TypeVar

import pydantic
from pydantic import BaseModel, Field, model_validator

from app.adapters import MAX_NAME
from app.ingress.errors import ApiError
from migration.protocol.messages import PathRequest
from policies.decision.limits import Mode
from policies.model import Role
from policies.precedence import DEFAULT_CLASS

_MODEL = "The model's name; unset: the only model."


class OrderBody(BaseModel, extra="forbid", strict=True):
    """The body of a call, a JSON object."""


class MoveRequest(OrderBody, json_schema_extra={"examples": [{"request_id": "demo", "path": "kv"}]}):
    """Body of POST /mell/migrations. `request_id` may be the id or the client's label."""

    request_id: str = Field(
        min_length=1, description="The request's id, or its `X-Request-Id` if only one running request has it."
    )
    target: str | None = Field(None, description="The replica to move it to. Unset: the placement policy's choice.")
    path: PathRequest = Field(
        PathRequest.AUTO,
        description='"kv" sends KV blocks, with "tokens" the target prefills; "auto": KV where possible.',
    )


class RoleOrder(OrderBody, json_schema_extra={"examples": [{"role": "prefill"}]}):
    """Body of POST /mell/replicas/{replica}/role."""

    role: Role | None = Field(description="`null`: the role that Mell assigns.")


class MemoryRequest(OrderBody, json_schema_extra={"examples": [{"blocks": 1500}]}):
    """Body of POST /mell/replicas/{replica}/memory."""

    blocks: int | None = Field(strict=True, description="Size of the KV pool, in blocks; `null`: Mell sizes it.")


class PairRequest(OrderBody, json_schema_extra={"examples": [{"lower": "REPLICA", "upper": "REPLICA"}]}):
    """Body of POST /mell/pairs."""

    lower: str = Field(description="Id of the replica that keeps the lower layers.")
    upper: str = Field(description="Id of the replica that keeps the upper ones.")


class ModeRequest(OrderBody, json_schema_extra={"examples": [{"mode": "off"}]}):
    """Body of POST /mell/mode."""

    mode: Mode = Field(
        description='"act" carries decisions out; "observe" makes and shows them, and does as "off", which makes none.'
    )


class BoundsOrder(OrderBody, json_schema_extra={"examples": [{"min_replicas": 2, "max_replicas": 6}]}):
    """Body of POST /mell/bounds."""

    min_replicas: int = Field(
        ge=0, le=10_000, description="Minimum number of replicas; 0, with `memory.budget_mib`: a model may sleep."
    )
    max_replicas: int = Field(ge=1, le=10_000, description="Maximum number of replicas, at least the minimum.")
    model: str | None = Field(None, description=_MODEL)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas is above max_replicas")
        return self


class LevelOrder(OrderBody, json_schema_extra={"examples": [{"ttft_p99_s": 1.5}]}):
    """Body of POST /mell/level. At least one time is given; the other one stays the same."""

    service_class: str = Field(DEFAULT_CLASS, alias="class", description="The service class.")
    ttft_p99_s: float | None = Field(
        None, gt=0, description="Longest time to the first token of 99 % of the requests, in seconds."
    )
    itl_p99_ms: float | None = Field(
        None, gt=0, description="Longest time between two tokens of a stream, for 99 % of them, in milliseconds."
    )
    model: str | None = Field(None, description=_MODEL)

    @model_validator(mode="after")
    def _has_a_time(self) -> Self:
        if self.ttft_p99_s is None and self.itl_p99_ms is None:
            raise ValueError("give ttft_p99_s, itl_p99_ms or both")
        return self


class DrainOrder(OrderBody, json_schema_extra={"examples": [{"wait_s": 300}]}):
    """Body of POST /mell/ingress/drain. All members are optional."""

    wait_s: float = Field(60.0, ge=0, le=86_400, description="Longest wait for the end of running calls, in seconds.")


class NodeDrainOrder(OrderBody, json_schema_extra={"examples": [{"within_s": 150}]}):
    """Body of POST /mell/nodes/{node}/drain. All members are optional."""

    within_s: float | None = Field(
        None, ge=0, le=86_400, description="Time until the node ends, in seconds; `null`: it ends once it is empty."
    )


class HandOverOrder(OrderBody, json_schema_extra={"examples": [{"to": "http://mell-new:8000"}]}):
    """Body of POST /mell/hand-over."""

    to: str = Field(min_length=1, max_length=2048, description="The URL of the other Mell's ingress, without `/v1`.")
    admin_key: str | None = Field(
        None, min_length=1, max_length=1024, description="The other Mell's `ingress.admin_key`, if it has one."
    )


class StartProfile(OrderBody, json_schema_extra={"examples": [{"max_iterations": 50}]}):
    """Body of POST /mell/start_profile, as vLLM has it. All members are optional."""

    profile_prefix: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="Beginning of the names of the files, before the replica's id.",
    )
    delay_iterations: int | None = Field(None, ge=0, description="Steps of the engine before the recording begins.")
    max_iterations: int | None = Field(None, ge=0, description="Steps after which it ends by itself; 0: not at all.")


class PromptOrder(OrderBody):
    """An order about a prompt. Members have the meaning that they have in a request."""

    prompt: str | list[int] | None = Field(
        None, description="A text or token ids, as in a completion: not with `messages`."
    )
    messages: list[dict[str, Any]] | None = Field(None, description="The messages of a chat, text only.")
    model: str | None = Field(None, description="The model's name or that of an adapter. Unset: the only model.")
    cache_salt: str | None = Field(
        None, min_length=1, description="With `cache.isolation: key`, the name of an API key and a colon come first."
    )

    @property
    def of_prompt(self) -> bool:
        """False without a prompt."""
        return self.prompt is not None or self.messages is not None


class OnePromptOrder(PromptOrder):
    """An order that needs a prompt."""

    @model_validator(mode="after")
    def _has_one_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either a prompt or messages")
        return self


class MatchOrder(OnePromptOrder, json_schema_extra={"examples": [{"prompt": "You are a helpful assistant."}]}):
    """Body of POST /mell/cache/match."""

    prompt_cache_key: str | None = Field(None, description="The session, with `scheduler.routing: session`.")


class CopyPrompt(
    OnePromptOrder,
    populate_by_name=True,
    json_schema_extra={"examples": [{"prompt": "You are a helpful assistant.", "from": "a", "to": "b"}]},
):
    """Body of POST /mell/cache/copy."""

    source: str = Field(alias="from", min_length=1, description="The replica that has the prompt's blocks.")
    target: str = Field(alias="to", min_length=1, description="The replica that is to get them.")

    @model_validator(mode="after")
    def _is_between_two(self) -> Self:
        if self.source == self.target:
            raise ValueError("from and to are the same replica")
        return self


class PinOrder(
    OnePromptOrder, json_schema_extra={"examples": [{"prompt": "You are a helpful assistant.", "ttl_s": 3600}]}
):
    """Body of POST /mell/cache/pin."""

    ttl_s: float = Field(600.0, ge=0, le=86400, description="Seconds until the pin expires; 0 ends it now.")
    replica: str | None = Field(None, min_length=1, description="The only replica to pin them on. Unset: all.")


class DropOrder(PromptOrder, json_schema_extra={"examples": [{"prompt": "You are a helpful assistant."}]}):
    """Body of DELETE /mell/cache. All members are optional."""

    replica: str | None = Field(None, min_length=1, description="The only replica to delete them on. Unset: all.")

    @model_validator(mode="after")
    def _is_of_one_prompt_or_all(self) -> Self:
        if self.prompt is not None and self.messages is not None:
            raise ValueError("give a prompt or messages, or neither for all blocks")
        if not self.of_prompt and (self.model is not None or self.cache_salt is not None):
            raise ValueError("model and cache_salt are those of a prompt or of messages: give one of both")
        return self


class LoadAdapter(OrderBody, json_schema_extra={"examples": [{"lora_name": "sql", "lora_path": "/models/sql"}]}):
    """Body of POST /v1/load_lora_adapter, as vLLM has it."""

    lora_name: str = Field(
        min_length=1, max_length=MAX_NAME, description="The adapter's name, for `model` in requests."
    )
    lora_path: str = Field(
        min_length=1, description="A folder that every node of replicas has, or the name of a repository on a hub."
    )
    load_inplace: bool = Field(
        False, description="Replace a loaded adapter of that name; requests that run with it keep the earlier one."
    )
    is_3d_lora_weight: bool = Field(False, description="The layout of the weights of experts, see vLLM.")
    base_model_name: str | None = Field(None, description="The name of the adapter's model; unset: the only model.")


class UnloadAdapter(OrderBody, json_schema_extra={"examples": [{"lora_name": "sql"}]}):
    """Body of POST /v1/unload_lora_adapter, as vLLM has it."""

    lora_name: str = Field(min_length=1, description="The adapter's name.")
    lora_int_id: int | None = Field(None, description="Without effect, as in vLLM.")


Order = TypeVar("Order", bound=BaseModel)


def parse_order(kind: type[Order], body: bytes) -> Order:
    """Read a request body. Raises ApiError 400 with the invalid member."""
    try:
        return kind.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0]) from None


def _refusal(first: Any) -> ApiError:
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    if first["type"] == "value_error":
        return ApiError(400, str(first["ctx"]["error"]), code="invalid_body")
    if not first["loc"]:
        return ApiError(400, "the body must be a JSON object", code="invalid_body")
    param = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown parameter {param!r}", param=param, code="unknown_parameter")
    return ApiError(400, f"{param}: {first['msg']}", param=param, code="invalid_value")
