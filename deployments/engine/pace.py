"""The speed and the capacity of a paced engine: the `engine_kwargs` of `engine: paced`.

Names are vLLM's if vLLM has the argument. Unknown arguments are errors, since a measurement could not show that an
argument had no effect.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from policies.cost.steps import StepCosts

Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


class Pace(BaseModel):
    """The times of one engine in seconds, its memory in KV blocks, and its limits.

    Decoding is memory-bound: a step reads all weights, for any number of requests. So a step takes `decode_s`, plus
    `decode_s_per_seq` for each request that decodes in it, plus the time of its prefill tokens. It also reads the KV of
    the decoding requests, `context_s` for each token, and each prefilled token attends to the tokens before it,
    `attention_s` for each.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    num_gpu_blocks_override: Count
    """KV blocks; none is reserved."""
    block_size: Count = 16
    """Tokens per block."""
    max_model_len: Count = 4096
    """The largest number of prompt and output tokens together."""
    max_num_seqs: Count = 64
    """The largest number of concurrently running requests."""
    max_num_batched_tokens: Count = 2048
    """The largest number of tokens per step: a longer prefill takes several steps."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """The order of waiting requests: first come first served, or the lowest priority number first."""
    decode_s: Positive = 0.025
    decode_s_per_seq: NotNegative = 0.0001
    prefill_tokens_per_s: Positive = 10_000.0
    context_s: NotNegative = 0.0
    attention_s: NotNegative = 0.0
    startup_s: NotNegative = 0.0
    """Start-up time: loading weights, profiling, capturing graphs."""
    num_layers: Annotated[int, Field(ge=0)] = 0
    """The number of layers that it can give to another engine in a pair; below two, it is in none."""
    layer_mib: NotNegative = 0.0
    """The memory of a layer's parameters, in MiB."""
    block_mib: Positive = 1.0
    """The memory of a KV block over all layers, in MiB."""
    overhead_s: NotNegative = 0.0
    """The part of `decode_s` that does not depend on layers: each part of a pair's step takes it in full."""
    hop_s: NotNegative = 0.0005
    hop_s_per_token: NotNegative = 0.000001
    """The time of a step's way to the other engine of a pair and back, and that of each of its tokens."""
    copy_mib_per_s: Positive = 10_000.0
    load_mib_per_s: Positive = 10_000.0
    """The speed of KV on its way to the other engine, and of parameters on their way from the host."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_gpu_blocks_override * self.block_size < self.max_model_len:
            raise ValueError(
                f"num_gpu_blocks_override: {self.num_gpu_blocks_override} blocks of {self.block_size} tokens do not "
                f"hold max_model_len, {self.max_model_len} tokens; raise the first or lower the last"
            )
        if self.overhead_s >= self.decode_s:
            raise ValueError(f"overhead_s ({self.overhead_s:g}) is a part of decode_s ({self.decode_s:g})")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs ({self.max_num_seqs}): "
                f"not every request could decode in a step"
            )
        return self

    @property
    def costs(self) -> StepCosts:
        """The times of the engine's steps."""
        token_s, weights_s = 1 / self.prefill_tokens_per_s, self.decode_s - self.overhead_s
        linear = (1, weights_s + token_s), (2, weights_s + 2 * token_s)
        return StepCosts(linear, self.overhead_s, self.decode_s_per_seq - token_s, self.context_s, self.attention_s)

    def blocks(self, tokens: int) -> int:
        """The number of blocks for `tokens` tokens."""
        return -(-tokens // self.block_size)


def read_pace(engine_kwargs: Mapping[str, Any]) -> Pace:
    """Validate the arguments of a paced engine.

    Raises:
        ValueError: with one line per mistake.
    """
    try:
        return Pace.model_validate(dict(engine_kwargs))
    except ValidationError as error:
        raise ValueError("\n".join(_line(mistake) for mistake in error.errors())) from None


def _line(mistake: Any) -> str:
    name = ".".join(["engine_kwargs", *map(str, mistake["loc"])])
    if mistake["type"] == "extra_forbidden":
        return f"{name}: a paced engine has no such argument; it has {', '.join(Pace.model_fields)}"
    if mistake["type"] == "missing":
        return f"{name} is required: a paced engine has no GPU memory to measure"
    own = mistake["type"] == "value_error"
    return f"{name}: {mistake['ctx']['error'] if own else mistake['msg']}"
