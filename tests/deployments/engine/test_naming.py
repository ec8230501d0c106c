"""Names of blocks: vLLM's own are those that the rest of Mell computes without it."""

from types import SimpleNamespace

import pytest

from deployments.engine.naming import BlockNamer
from migration.protocol.continuing import continued, plain_spec
from migration.protocol.core_messages import Adapter, CoreRequest, encode_request
from policies.prefix.names import digests, name_of

pytestmark = pytest.mark.slow
"""Importing vLLM takes seconds."""

PROMPT = list(range(3, 60))


def namer(algorithm: str = "sha256") -> BlockNamer:
    return BlockNamer(SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm, block_size=16)))


@pytest.mark.parametrize("salt", [None, "a", "b" * 100])
def test_names_of_a_prompt_are_those_computed_without_vllm(salt: str | None) -> None:
    request = CoreRequest("r", PROMPT, sampling_params={"max_tokens": 5}, cache_salt=salt)
    assert namer().names(encode_request(request)) == [name_of(digest) for digest in digests(PROMPT, 16, salt)]


def test_output_is_part_of_the_context() -> None:
    frames = continued(plain_spec("r", tuple(PROMPT[:40]), 50), "r-0", "r.0", tuple(PROMPT[40:]))
    assert namer().names(frames) == [name_of(digest) for digest in digests(PROMPT, 16)]


def test_adapters_have_names_of_their_own() -> None:
    plain = CoreRequest("r", PROMPT, sampling_params={"max_tokens": 5})
    adapted = CoreRequest(
        "r", PROMPT, sampling_params={"max_tokens": 5}, lora_request=Adapter("poet", 1, "/adapters/poet")
    )
    assert not {*namer().names(encode_request(plain))} & {*namer().names(encode_request(adapted))}
