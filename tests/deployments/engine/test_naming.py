"""Names of blocks by vLLM's functions, beside its own requests and beside those without vLLM."""

from functools import partial
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackEncoder

from deployments.engine.naming import BlockNamer
from migration.protocol.continuing import continued, plain_spec
from migration.protocol.core_messages import Adapter, Frames, decode_request
from policies.prefix.names import default_naming, digests, name_of

pytestmark = pytest.mark.slow
"""Importing vLLM takes seconds."""

TOKENS = [7 * i % 1000 for i in range(75)]
ADAPTER = Adapter("3", 3, "/adapters/sql")


def core_request(**members: Any) -> EngineCoreRequest:
    given = {"prompt_token_ids": TOKENS, "mm_features": None, **members}
    return EngineCoreRequest(
        request_id="r",
        sampling_params=SamplingParams(max_tokens=5),
        pooling_params=None,
        arrival_time=0.0,
        data_parallel_rank=None,
        **{"lora_request": None, "cache_salt": None, **given},
    )


def encoded(request: EngineCoreRequest) -> Frames:
    return tuple(bytes(frame) for frame in MsgpackEncoder().encode(request))


def by_vllm(request: EngineCoreRequest, size: int = 16, algorithm: str = "sha256") -> list[int]:
    """The names that an engine core gives."""
    hasher = get_request_block_hasher(size, get_hash_fn_by_name(algorithm))
    return [name_of(digest) for digest in Request.from_engine_core_request(request, hasher).block_hashes]


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("size", [8, 16])
def test_names_are_those_of_vllms_core(size: int, algorithm: str) -> None:
    namer = BlockNamer(size, algorithm)
    for members in {}, {"cache_salt": "tenant"}, {"prompt_token_ids": TOKENS[: size - 1]}:
        request = core_request(**members)
        frames = encoded(request)
        assert namer.names(decode_request(frames), partial(encoded, request)) == by_vllm(request, size, algorithm)


def test_names_of_requests_with_an_adapter_are_those_of_vllms_core() -> None:
    adapted = core_request(lora_request=LoRARequest(ADAPTER.lora_name, ADAPTER.lora_int_id, ADAPTER.lora_path))
    namer, frames = BlockNamer(16, "sha256"), encoded(core_request())
    assert namer.names(decode_request(frames), lambda: frames, ADAPTER) == by_vllm(adapted)
    assert namer.names(decode_request(frames), lambda: frames) == by_vllm(core_request())
    assert not set(by_vllm(adapted)) & set(by_vllm(core_request()))


def test_names_without_vllm_are_the_same() -> None:
    frames = encoded(core_request(cache_salt="tenant"))
    names = BlockNamer(16, "sha256").names(decode_request(frames), lambda: frames)
    assert names == [name_of(digest) for digest in digests(TOKENS, 16, "tenant")]


def test_output_is_part_of_the_context() -> None:
    frames = continued(plain_spec("r", tuple(TOKENS[:40]), 50), "r-0", "r.0", tuple(TOKENS[40:]))
    names = BlockNamer(16, "sha256").names(decode_request(frames), lambda: frames)
    assert names == [name_of(digest) for digest in digests(TOKENS, 16)]


def test_namings_differ_in_block_size_algorithm_and_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BlockNamer(16, "sha256").naming == default_naming(16)
    assert BlockNamer(32, "sha256").naming == default_naming(32)
    assert BlockNamer(16, "sha256_cbor").naming.mark != default_naming(16).mark
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert BlockNamer(16, "sha256").naming.mark != default_naming(16).mark
    monkeypatch.undo()
    assert BlockNamer(16, "sha256").naming == default_naming(16)
