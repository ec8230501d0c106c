"""The contract: complete, with one owner for each name, and kept by the installed libraries."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import SimpleNamespace

import pytest

from app.compatibility import contract
from app.compatibility.contract import LIBRARIES, ContractPart, LostPart, lost_here, parts, refused
from app.compatibility.facts import Fact
from app.compatibility.supported import PairState, describe, minor, pairs
from app.settings import Settings
from app.versions import installed_version
from tests.style.sources import ROOT, modules, read

PRODUCT = ("app/", "deployments/", "migration/", "policies/", "mell/")
FOR_USERS = {
    "vllm": {"vllm", "config", "envs", "exceptions", "lora.request", "sampling_params", "pooling_params"},
    "ray": {"ray", "actor", "exceptions", "serve", "serve.handle", "serve.config", "serve.exceptions", "util"},
}
"""Modules that users of the libraries import as well. Names of all others are imported in one place each."""

USED_OTHERWISE = {
    *("_global_node", "_BACKGROUND_TASKS", "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS"),
    *("_REASONING_PARSERS_TO_REGISTER", "_TOOL_PARSERS_TO_REGISTER", "NVIDIA_H100"),
    *("async_llm", "core", "multiproc_executor", "cpu_worker", "cpu_attn", "model_loader"),
}
"""Names that Mell reads as attributes or in files, and modules that a fork server imports by their paths."""


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The names of libraries that a module imports when it runs, and from where."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in LIBRARIES:
            yield from ((node.module, each.name) for each in node.names)
        yield from imported(node)


def users() -> Mapping[tuple[str, str], list[str]]:
    """Mell's modules, by the names that they import."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module in modules():
        if module.startswith(PRODUCT):
            for name in imported(ast.parse(read(module))):
                found[name].append(module)
    return found


def is_for_users(module: str) -> bool:
    library, _, rest = module.partition(".")
    return (rest or library) in FOR_USERS[library]


@pytest.mark.slow
def test_all_imports_are_in_the_contract() -> None:
    known = {(module, fact.name) for part in parts() for fact in part.facts for module in fact.modules}
    assert sorted(set(users()) - known) == []


@pytest.mark.slow
def test_each_internal_name_is_imported_in_one_module() -> None:
    several = {name: where for name, where in users().items() if len(where) > 1 and not is_for_users(name[0])}
    assert several == {}
    assert any(len(where) > 1 for where in users().values()), "names for users may be imported by several"


def test_parts_name_their_modules() -> None:
    assert [path for part in parts() for path in part.used_by if not (ROOT / path).exists()] == []
    owned = {path: part.title for part in parts() for path in part.used_by}
    assert [
        each for names in users().values() for each in names if not any(each.startswith(path) for path in owned)
    ] == []


@pytest.mark.slow
def test_facts_of_names_alone_are_of_imported_ones() -> None:
    plain = {(fact.modules, fact.text) for part in parts() for fact in part.facts if fact.text.isidentifier()}
    found = set(users())
    unused = {text for places, text in plain if not any((place, text) in found for place in places)}
    assert unused == USED_OTHERWISE


def test_modules_of_optional_parts_are_imported_by_need() -> None:
    """Without this, the import of another module would fail where such a part is lost."""
    host = "migration.kv.host"
    for module in modules():
        if module.startswith(PRODUCT) and not module.startswith("migration/kv/host/"):
            names = (
                node.module or "" for node in ast.walk(ast.parse(read(module))) if isinstance(node, ast.ImportFrom)
            )
            assert not any(name.startswith(host) for name in names), module


def test_the_installed_libraries_keep_the_contract() -> None:
    assert lost_here() == ()


def test_the_tested_pair_is_the_installed_one_and_comes_first() -> None:
    first = pairs()[0]
    assert [pair.state for pair in pairs()].count(PairState.TESTS) == 1 and first.state is PairState.TESTS
    assert (installed_version("vllm"), installed_version("ray")) == first.contract
    assert first.lost == () and describe(*first.contract)[0]


def test_lost_parts_of_pairs_are_parts() -> None:
    titles = {part.title: part for part in parts()}
    for pair in pairs():
        assert all(titles[title].lost for title in pair.lost), "without the others, Mell does not start"


@pytest.mark.parametrize(
    ("vllm", "ray", "tested", "sentence"),
    [
        ("0.32.7", "2.60.1", True, "vLLM 0.32 with Ray 2.60 passes Mell's tests"),
        ("0.33.0", "2.60.0", False, "vLLM 0.33 with Ray 2.60: only their files were compared"),
        ("0.28.0", "2.60.0", False, "vLLM 0.28 with Ray 2.60 is not supported: 0.32 with 2.60"),
        ("0.32.0", "2.61.0", False, "vLLM 0.32 with Ray 2.61 is not supported"),
    ],
)
def test_versions_are_described(vllm: str, ray: str, tested: bool, sentence: str) -> None:
    is_tested, state = describe(vllm, ray)
    assert is_tested is tested and state.startswith(sentence)
    assert minor("0.32.0+cpu") == "0.32"


TIER = LostPart(ContractPart("Tier", (), (), "there is none", "cache.dram_gib"), (Fact(("vllm.a",), "Gone"),))
LORA = LostPart(ContractPart("LoRA", (), (), "refused", "engine_kwargs.enable_lora"), (Fact(("vllm.b",), "Gone"),))
MOVES = LostPart(ContractPart("Moves", (), (), "none", None), (Fact(("vllm.c",), "Gone"),))
CORE = LostPart(ContractPart("Engine", (), (), None, None), (Fact(("vllm.d",), "Gone"), Fact(("vllm.d",), "New")))


@pytest.mark.parametrize(
    ("dram_gib", "kwargs", "paths"),
    [(0.0, {}, []), (0.5, {}, ["cache.dram_gib"]), (0.0, {"enable_lora": True}, ["engine_kwargs.enable_lora"])],
)
def test_settings_that_ask_for_a_lost_part_are_refused(
    dram_gib: float, kwargs: dict[str, object], paths: list[str]
) -> None:
    model = SimpleNamespace(cache=SimpleNamespace(dram_gib=dram_gib), engine_kwargs=kwargs)
    settings = SimpleNamespace(models=[model])
    lines = refused([TIER, LORA, MOVES], settings)
    assert [line.partition(":")[0] for line in lines] == paths
    (needed,) = refused([CORE], settings)
    assert (
        needed == ("Engine: the installed versions of vLLM and Ray lack what this needs (vllm.d: Gone, and 1 more)")
        and CORE.effect == contract.NO_START
    )


LOST = [LostPart(part, (Fact(("vllm.a",), "Gone"),)) for part in contract.parts() if part.setting is not None]
CHAT = {"model_loading_config": {"model_id": "smollm2-135m"}}


@pytest.mark.parametrize(
    ("args", "asked"),
    [
        ({}, []),
        ({"memory": {"budget_mib": 900}}, ["memory.budget_mib"]),
        ({"llm_configs": [CHAT, {"engine_kwargs": {"enable_lora": True}}]}, ["engine_kwargs.enable_lora"]),
    ],
)
def test_parts_are_asked_for_by_common_sections_and_by_models(args: dict[str, object], asked: list[str]) -> None:
    lines = refused(LOST, Settings.model_validate(args))
    assert [line.partition(":")[0] for line in lines] == asked
