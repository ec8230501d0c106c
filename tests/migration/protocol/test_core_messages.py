"""Messages to and from an engine core, against vLLM's own."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.kv_hints import KvHintsEnvelope
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from migration.protocol.continuing import continued, loading, plain_spec, probe, to_spec
from migration.protocol.core_messages import (
    PREFILL_STATS,
    Adapter,
    CoreOutput,
    CoreRequest,
    Frames,
    Prefilled,
    TokenLogprobs,
    decode_logprobs,
    decode_request,
    encode_logprobs,
    encode_prefilled,
    encode_request,
)
from migration.protocol.request import IngressId, RequestSpec, Trait
from policies.model import RequestId
from policies.precedence import Precedence


def test_members_are_vllms_in_vllms_order() -> None:
    """A new version of vLLM that adds one has to be looked at: what it is for when a request moves."""
    assert CoreRequest.__struct_fields__ == EngineCoreRequest.__struct_fields__
    assert Adapter.__struct_fields__ == LoRARequest.__struct_fields__
    assert CoreOutput.__struct_fields__ == EngineCoreOutput.__struct_fields__[: len(CoreOutput.__struct_fields__)]


RICH = EngineCoreRequest(
    request_id="client's",
    prompt_token_ids=[5, 6, 7],
    mm_features=None,
    sampling_params=SamplingParams(
        max_tokens=20,
        min_tokens=4,
        temperature=0.5,
        seed=3,
        logprobs=2,
        prompt_logprobs=1,
        bad_words=["x"],
        allowed_token_ids=[5, 9],
        logit_bias={5: 1.5},
        structured_outputs=StructuredOutputsParams(regex="a+"),
        extra_args={"kv_transfer_params": {"mell_load": {"load": "/etc/passwd", "first": 0, "last": 1}}, "other": 1},
    ),
    pooling_params=None,
    arrival_time=12.5,
    lora_request=LoRARequest("adapter", 1, "/adapters/a"),
    cache_salt="salt",
    data_parallel_rank=3,
    prompt_embeds=torch.arange(300.0),
    priority=-2,
    trace_headers={"traceparent": "00"},
    reasoning_ended=True,
    session_id="client's",
    kv_hints=KvHintsEnvelope("1", "client's", []),
)


def encoded(request: EngineCoreRequest) -> Frames:
    return tuple(bytes(frame) for frame in MsgpackEncoder().encode(request))


def decoded(frames: Frames) -> EngineCoreRequest:
    request: EngineCoreRequest = MsgpackDecoder(EngineCoreRequest).decode([bytearray(frame) for frame in frames])
    return request


def of(frames: Frames, label: str = "", **others: Any) -> RequestSpec:
    """The spec of a request that vLLM has encoded."""
    return to_spec(decode_request(frames), frames, RequestId("r"), label, IngressId("i"), **others)


def spec(request: EngineCoreRequest = RICH) -> RequestSpec:
    return of(encoded(request), label="label")


def test_the_engines_priority_is_that_of_the_spec() -> None:
    assert spec().priority == decoded(continued(spec(), "name", "key", ())).priority == -2
    ordered = of(encoded(RICH), precedence=Precedence("chat", 3.0), priority=7)
    assert (ordered.priority, ordered.precedence) == (7, Precedence("chat", 3.0))
    assert [decoded(continued(ordered, "name", "key", outputs)).priority for outputs in ((), (1, 2))] == [7, 7]


def members(request: EngineCoreRequest, *without: str) -> dict[str, Any]:
    """All members but these, in a form that can be compared."""
    names = set(EngineCoreRequest.__struct_fields__) - set(without)
    return {name: re.sub(r" at 0x\w+", "", repr(getattr(request, name))) for name in names}


def test_a_request_survives_with_its_tensors() -> None:
    frames = encoded(RICH)
    assert len(frames) > 1
    again = decoded(encode_request(decode_request(frames), frames[1:]))
    assert members(again) == members(decoded(frames))
    assert torch.equal(again.prompt_embeds, RICH.prompt_embeds)


def test_a_spec_has_the_facts_that_decisions_need() -> None:
    made = spec()
    assert (made.prompt_tokens, made.max_tokens) == (3, 20) and made.traits == frozenset(Trait) - {Trait.POOLED}
    assert made.adapter == Adapter("adapter", 1, "/adapters/a")
    greedy = plain_spec("r", (5,), 9, seed=1)
    assert greedy.traits == frozenset(), "a seed draws nothing when the likeliest token is taken"


def test_vllms_default_of_max_tokens_is_not_encoded() -> None:
    request = CoreRequest("r", [5], sampling_params={"temperature": 0.0})
    default = SamplingParams().max_tokens
    assert of(encode_request(request)).max_tokens == default
    sent = EngineCoreRequest("r", [5], None, SamplingParams(max_tokens=default), None, 0.0, None, None, None)
    assert of(encoded(sent)).max_tokens == default


UNBOUNDED = CoreRequest("r", [5], sampling_params={"max_tokens": None})


@pytest.mark.parametrize(
    "request_",
    [CoreRequest("r", [5]), UNBOUNDED, CoreRequest("r", None, sampling_params={"max_tokens": 1})],
    ids=["neither kind", "unbounded", "no tokens"],
)
def test_a_request_without_a_prompt_or_an_end_is_refused(request_: CoreRequest) -> None:
    with pytest.raises(ValueError, match="no prompt of tokens, or no max_tokens"):
        of(encode_request(request_))


OWN = ("data_parallel_rank", "session_id", "kv_hints")
"""Members that address parts of a cluster, which no client may do."""
EDITED = ("request_id", "external_req_id", "prompt_token_ids", "sampling_params", "lora_request", *OWN)
LOADED = Adapter("1", 1, "/here/a", is_3d_lora_weight=True)
"""The request's adapter as an engine has loaded it."""


@pytest.mark.parametrize("outputs", [(), (8,), (8, 9, 8, 9)], ids=len)
def test_a_continued_request_differs_in_nothing_else(outputs: tuple[int, ...]) -> None:
    made = decoded(continued(spec(), "name", "key", outputs))
    assert members(made, *EDITED) == members(decoded(encoded(RICH)), *EDITED)
    assert (made.request_id, made.external_req_id) == ("name", "name")
    assert [getattr(made, name) for name in OWN] == [None] * len(OWN)
    assert made.prompt_token_ids == [5, 6, 7, *outputs]
    expected = RICH.sampling_params.clone()
    expected.extra_args = {"kv_transfer_params": {"mell_key": "key", "mell_output": len(outputs)}}
    if outputs:
        expected.prompt_logprobs, expected.skip_reading_prefix_cache = None, False
    if len(outputs) >= 4:
        expected.min_tokens = 0
    assert made.sampling_params == expected


def test_a_pooled_request_has_no_output_and_reaches_its_engine_as_it_came() -> None:
    params = PoolingParams(task="embed", dimensions=8, extra_kwargs={"compressed_token_type_ids": 3})
    sent = EngineCoreRequest("r", [5, 6, 7], None, None, params, 1.5, None, "salt", 7, session_id="another's")
    made = of(encoded(sent), label="label")
    assert (made.prompt_tokens, made.max_tokens, made.traits) == (3, 0, frozenset({Trait.POOLED}))
    arrived = decoded(continued(made, "name", "key", ()))
    assert members(arrived, *EDITED) == members(decoded(encoded(sent)), *EDITED)
    assert (arrived.sampling_params, arrived.prompt_token_ids) == (None, [5, 6, 7])
    assert [getattr(arrived, name) for name in OWN] == [None] * len(OWN)


def test_a_client_names_neither_a_file_nor_a_slot() -> None:
    for frames in (continued(spec(), "n", "k", ()), loading(spec(), "n", (), {"load": "own"}, 2)):
        assert not any(b"passwd" in frame for frame in frames)


@pytest.mark.parametrize("adapter", [LOADED, None], ids=["adapted", "base"])
def test_an_adapter_is_the_one_that_the_engine_has_loaded(adapter: Adapter | None) -> None:
    run = decoded(continued(spec(), "n", "k", (8,), adapter=adapter)).lora_request
    load = decoded(loading(spec(), "n", (8,), {}, 2, adapter=adapter)).lora_request
    for made in (run, load):
        # vLLM compares adapters by their names alone.
        assert repr(made) == repr(adapter and LoRARequest("1", 1, "/here/a", is_3d_lora_weight=True))


def test_a_load_has_blocks_that_are_named_like_the_requests() -> None:
    made = decoded(loading(spec(), "name", (8, 9), {"load": "m.1", "first": 0, "last": 1}, 4))
    assert made.prompt_token_ids == [5, 6, 7, 8]
    assert made.cache_salt == RICH.cache_salt
    assert (made.priority, *(getattr(made, name) for name in OWN)) == (0, *[None] * len(OWN))
    assert made.sampling_params == SamplingParams(
        max_tokens=1,
        temperature=0.0,
        extra_args={"kv_transfer_params": {"mell_load": {"load": "m.1", "first": 0, "last": 1}}},
    )


def test_a_load_has_the_whole_prompt_of_media() -> None:
    """The engine computes positions of an image from all of its tokens, wherever the blocks end."""
    image = MultiModalFeatureSpec(None, "image", "hash", PlaceholderRange(1, 4))
    request = EngineCoreRequest("r", [5, 6, 6, 6, 6, 7], [image], SamplingParams(max_tokens=9), None, 0.0, *[None] * 3)
    seen = spec(request)
    made = decoded(loading(seen, "name", (8, 9), {"load": "m.1"}, 3))
    assert made.prompt_token_ids == [5, 6, 6, 6, 6, 7] and made.mm_features == [image]
    assert decoded(loading(seen, "name", (8, 9), {"load": "m.1"}, 7)).prompt_token_ids == [5, 6, 6, 6, 6, 7, 8]
    (feature,) = decoded(continued(seen, "name", "key", (8, 9))).mm_features or []
    assert feature == image


@pytest.mark.parametrize("reads_cache", [True, False])
def test_a_probe_has_the_names_of_its_request_and_one_greedy_token(reads_cache: bool) -> None:
    params = SamplingParams(max_tokens=9, seed=3, min_tokens=2)
    asked = EngineCoreRequest("r", [5, 6, 7], None, params, None, 0.0, RICH.lora_request, "salt", None)
    made = probe(spec(asked), (8, 9), 4, reads_cache)
    assert made is not None and (made.prompt_tokens, made.max_tokens) == (5, 1)
    sent = decoded(made.body)
    assert (sent.prompt_token_ids, sent.cache_salt) == ([5, 6, 7, 8, 9], "salt")
    assert made.adapter == spec(asked).adapter is not None and sent.lora_request == RICH.lora_request
    expected = SamplingParams(max_tokens=1, temperature=0.0, logprobs=4, ignore_eos=True)
    assert sent.sampling_params is not None
    assert bool(sent.sampling_params.skip_reading_prefix_cache) is not reads_cache
    expected.skip_reading_prefix_cache = sent.sampling_params.skip_reading_prefix_cache
    assert sent.sampling_params == expected


def test_nothing_but_tokens_is_probed() -> None:
    image = MultiModalFeatureSpec(None, "image", "hash", PlaceholderRange(1, 4))
    request = EngineCoreRequest("r", [5, 6, 6, 6, 6, 7], [image], SamplingParams(max_tokens=9), None, 0.0, *[None] * 3)
    assert probe(spec(request), (), 4, True) is None
    assert probe(spec(), (), 0, True) is None


# --- outputs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    ids: list[int]
    values: list[float]


ROWS = [Row([7, 7, 9], [-0.5, -0.5, -float("inf")]), Row([2**31 - 1, 0, 3], [-2.25, -0.125, -1.0])]


def test_logprobs_are_read_from_vllms_arrays() -> None:
    lists = LogprobsLists(
        np.array([row.ids for row in ROWS]), np.array([row.values for row in ROWS], np.float32), np.array([1, 3])
    )
    rest = bytes(MsgpackEncoder(size_threshold=1 << 62).encode(EngineCoreOutput("", [], lists))[0])
    assert decode_logprobs(rest) == [
        TokenLogprobs(row.values[0], tuple(zip(row.ids[1:], row.values[1:], strict=True))) for row in ROWS
    ]
    assert decode_logprobs(bytes(MsgpackEncoder().encode(EngineCoreOutput("", []))[0])) == []


@pytest.mark.parametrize("row", ROWS)
def test_vllm_reads_the_logprobs_of_engines_without_a_model(row: Row) -> None:
    rest = encode_logprobs(row.ids, row.values)
    lists = MsgpackDecoder(EngineCoreOutput).decode(rest).new_logprobs
    assert (lists.logprob_token_ids.tolist(), lists.logprobs.tolist()) == ([row.ids], [row.values])
    assert decode_logprobs(rest)[0].logprob == row.values[0]
    both = encode_logprobs(row.ids, row.values, Prefilled(9, 4))
    assert decode_logprobs(both) == decode_logprobs(rest)
    assert MsgpackDecoder(EngineCoreOutput).decode(both).prefill_stats.num_cached_tokens == 4


def test_vllm_reads_the_prefills_of_engines_without_a_model() -> None:
    assert EngineCoreOutput.__struct_fields__[PREFILL_STATS] == "prefill_stats"
    stats = MsgpackDecoder(EngineCoreOutput).decode(encode_prefilled(Prefilled(9, 4))).prefill_stats
    expected = PrefillStats()
    expected.set(num_prompt_tokens=9, num_local_cached_tokens=4, num_external_cached_tokens=0)
    assert stats == expected
