"""vLLM's messages to and from an engine core, as far as Mell reads them without vLLM.

vLLM encodes a message with msgpack (vllm/v1/serial_utils.py), as an array: the order of members is the format. Large
tensors are frames of their own, to which the first frame refers by number. Members that Mell only passes on stay
encoded. A test compares the members of both messages with those of the pinned vLLM.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

Frames = tuple[bytes, ...]
"""An encoded message: its array, and its large tensors."""

NIL = msgspec.Raw(b"\xc0")
"""None, encoded."""
_DEFAULT_MAX_TOKENS = 16
"""vLLM's default, with which the parameter is not encoded."""
_ARRAY = 3
"""The code of msgpack's extension type for the bytes of a small array (`CUSTOM_TYPE_RAW_VIEW`)."""


class Adapter(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """vLLM's `LoRARequest`: a LoRA adapter by its name in the API, its number, and the folder or hub name of its files.

    A number means the same adapter in all processes, and files that are loaded anew have another one.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class CoreRequest(msgspec.Struct, array_like=True, gc=False):
    """vLLM's `EngineCoreRequest`. `sampling_params` lacks the members that have their default value."""

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: msgspec.Raw = NIL
    sampling_params: dict[str, Any] | None = None
    pooling_params: msgspec.Raw = NIL
    arrival_time: float = 0.0
    lora_request: Adapter | None = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    prompt_embeds: msgspec.Raw = NIL
    prompt_is_token_ids: msgspec.Raw = NIL
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: msgspec.Raw = NIL
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: msgspec.Raw = NIL
    abort_immediately: bool = False
    session_id: str | None = None
    kv_hints: msgspec.Raw = NIL

    @property
    def pooled(self) -> bool:
        """True for a request of a pooling model, which has pooling parameters instead of sampling parameters."""
        return self.sampling_params is None and self.pooling_params != NIL

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters; empty for a pooled request."""
        return self.sampling_params or {}

    @property
    def has_media(self) -> bool:
        """True if images, audio or video have places in the prompt."""
        return bytes(self.mm_features) != bytes(NIL)

    @property
    def max_tokens(self) -> int | None:
        """The bound on the output, 0 for a pooled request; None without one."""
        if self.sampling_params is None:
            return 0 if self.pooled else None
        bound: int | None = self.sampling_params.get("max_tokens", _DEFAULT_MAX_TOKENS)
        return bound

    def context(self, outputs: Sequence[int]) -> list[int]:
        """The tokens of the prompt, with `outputs` behind them."""
        return [*(self.prompt_token_ids or ()), *outputs]


class CoreOutput(msgspec.Struct, array_like=True, gc=False):
    """The first members of vLLM's `EngineCoreOutput`; it decodes without the others."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(CoreRequest)
_outputs = msgspec.msgpack.Decoder(CoreOutput)


def decode_request(frames: Frames) -> CoreRequest:
    """The request in `frames`, without its large tensors. Raises msgspec.DecodeError."""
    return _requests.decode(frames[0])


def encode_request(request: CoreRequest, tensors: Frames = ()) -> Frames:
    """The frames of a request; `tensors` are those of the message that it was decoded from."""
    return (_encoder.encode(request), *tensors)


class TokenLogprobs(NamedTuple):
    """The natural logarithm of a token's probability; `top` are pairs of token id and logprob, the likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


def decode_logprobs(rest: bytes) -> list[TokenLogprobs]:
    """The logprobs of a step's tokens in the rest of its output (`migration.protocol.request.Extras`); none: empty.

    A row of vLLM's arrays begins with the sampled token. It may hold more of the likeliest than were asked for.
    """
    lists = _outputs.decode(rest).new_logprobs
    if lists is None:
        return []
    import numpy as np

    ids, values = (np.frombuffer(data.data, dtype).reshape(shape).tolist() for dtype, shape, data in lists[:2])
    return [
        TokenLogprobs(row[0], tuple(zip(names[1:], row[1:], strict=True)))
        for names, row in zip(ids, values, strict=True)
    ]


class Prefilled(NamedTuple):
    """The prompt of a request in tokens, and how many of them an engine had in its cache when it began to compute.

    `loaded` of these came from its tier of host memory.
    """

    prompt: int
    cached: int
    loaded: int = 0


def encode_logprobs(ids: Sequence[int], logprobs: Sequence[float], prefilled: Prefilled | None = None) -> bytes:
    """An output whose one token has logprobs: `ids` are the sampled token and the likeliest ones.

    `prefilled` as in `encode_prefilled`.
    """
    # Imported here, since whoever only reads requests needs no arrays.
    import numpy as np

    arrays = (np.array([ids], np.int32), np.array([logprobs], np.float32), np.zeros(1, np.int32))
    lists = [(a.dtype.str, a.shape, msgspec.msgpack.Ext(_ARRAY, a.tobytes())) for a in arrays]
    return _encode_output([*lists, None], prefilled)


def encode_prefilled(prefilled: Prefilled) -> bytes:
    """The output of the step that ends a prefill, with vLLM's `PrefillStats`."""
    return _encode_output(None, prefilled)


def _encode_output(logprobs: Any, prefilled: Prefilled | None) -> bytes:
    if prefilled is None:
        return _encoder.encode(CoreOutput("", [], logprobs))
    prompt, cached, loaded = prefilled
    stats = {
        "num_prompt_tokens": prompt,
        "num_computed_tokens": prompt - cached,
        "num_cached_tokens": cached,
        "num_local_cached_tokens": cached - loaded,
        "num_external_cached_tokens": loaded,
    }
    return _encoder.encode(["", [], logprobs, *(None,) * (PREFILL_STATS - 3), stats])


PREFILL_STATS = 11
"""The index of the member `prefill_stats` of vLLM's `EngineCoreOutput`."""
