"""The names of prompts in the ingress."""

from dataclasses import replace
from pathlib import Path

import pytest

from app.frontend.names import PromptNamer
from migration.protocol.continuing import isolated
from migration.protocol.core_messages import Adapter, CoreRequest, encode_request
from policies.prefix.names import Naming, default_naming, digests, name_of

NAMING = default_naming(16)
TOKENS = list(range(50))


def names(namer: PromptNamer, naming: Naming | str = NAMING, adapter: Adapter | None = None) -> tuple[int, ...]:
    request = CoreRequest("r", TOKENS, sampling_params={}, lora_request=adapter)
    return namer.names(request, encode_request(request), naming)


def test_names_are_those_of_the_engines_as_soon_as_their_naming_is_known() -> None:
    namer = PromptNamer("sha256")
    assert names(namer, "none runs") == ()
    assert names(namer) == tuple(name_of(digest) for digest in digests(TOKENS, 16))
    assert len(names(namer, default_naming(8))) == 6


def test_names_of_a_tenants_requests_have_its_salt() -> None:
    request = isolated(CoreRequest("r", TOKENS, sampling_params={}, cache_salt="own"), "tenant")
    found = PromptNamer("sha256").names(request, encode_request(request), NAMING)
    assert found == tuple(name_of(digest) for digest in digests(TOKENS, 16, "tenant:own"))


def test_engines_that_name_blocks_differently_are_noted_once(caplog: pytest.LogCaptureFixture) -> None:
    namer, other = PromptNamer("sha256"), replace(NAMING, mark=1)
    assert names(namer, other) == names(namer, other) == ()
    assert len(caplog.records) == 1 and "not routed by content" in caplog.text
    assert len(names(namer)) == 3
    assert names(PromptNamer("sha256_cbor")) == ()


def test_an_adapter_is_known_by_its_number_and_its_folder(tmp_path: Path) -> None:
    namer, plain = PromptNamer("sha256"), names(PromptNamer("sha256"))
    here = names(namer, adapter=Adapter("sql", 7, str(tmp_path)))
    assert here and here != plain
    assert here == names(namer, adapter=Adapter("another name", 7, str(tmp_path)))
    assert here != names(namer, adapter=Adapter("sql", 8, str(tmp_path)))
    assert names(namer, adapter=Adapter("sql", 7, "organisation/on-a-hub")) == ()
    assert names(namer, adapter=Adapter("sql", 7, "~/sql"))


@pytest.mark.parametrize(
    ("naming", "tokens", "adapter", "why"),
    [
        ("no replica runs", TOKENS, None, "the blocks of the prompt have no names: no replica runs"),
        (replace(NAMING, mark=1), TOKENS, None, "this ingress names blocks differently from the engines: see its log"),
        (NAMING, TOKENS, Adapter("sql", 7, "on/a-hub"), "this ingress does not know the folder of the adapter 'sql'"),
        (NAMING, TOKENS[:15], None, "the prompt has 15 tokens, and a KV block 16: only full blocks are cached"),
    ],
)
def test_a_prompt_without_names_has_one_cause(
    naming: Naming | str, tokens: list[int], adapter: Adapter | None, why: str
) -> None:
    namer, request = PromptNamer("sha256"), CoreRequest("r", tokens, sampling_params={}, lora_request=adapter)
    assert namer.names(request, encode_request(request), naming) == ()
    assert namer.why_unnamed(request, naming).startswith(why)
