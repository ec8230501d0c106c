"""Entries of `lora_modules`, and the numbers of adapters."""

from pathlib import Path
from typing import Any

import pytest

from app.adapters import adapter_number, listed_adapters, read_modules
from migration.protocol.core_messages import Adapter


def test_both_forms_of_vllm_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sql").mkdir()
    monkeypatch.chdir(tmp_path)
    modules = read_modules(["a=sql", {"name": "b", "path": "org/b", "base_model_name": "m", "is_3d_lora_weight": True}])
    assert modules[0] == {"name": "a", "path": str(tmp_path / "sql")}
    first, second = listed_adapters(modules)
    assert (first.lora_name, first.lora_path, first.base_model_name) == ("a", str(tmp_path / "sql"), None)
    assert second == Adapter("b", adapter_number("b", "org/b"), "org/b", "m", is_3d_lora_weight=True)
    assert read_modules(modules) == modules


def test_other_files_at_the_same_path_are_another_adapter(tmp_path: Path) -> None:
    modules, numbers = read_modules([f"a={tmp_path}"]), set()
    for alpha, weight in (("8", b"1"), ("8", b"2"), ("16", b"2")):
        (tmp_path / "adapter_config.json").write_text(alpha)
        (tmp_path / "adapter_model.safetensors").write_bytes(weight)
        numbers |= {adapter.lora_int_id for _ in range(2) for adapter in listed_adapters(modules)}
    assert len(numbers) == 3


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ("a=b", "must be a list"),
        ({"a": "b"}, "must be a list"),
        (["a"], "'a'"),
        (["=b"], "'=b'"),
        ([{"name": "a"}], "path"),
        ([{"name": "a", "path": "b", "rank": 8}], "rank"),
        ([{"name": "a" * 257, "path": "b"}], "name"),
        (["a=b", "c=d", "a=e"], "named a"),
    ],
)
def test_other_entries_are_refused(entries: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read_modules(entries)


def test_numbers_are_those_of_vllm_and_differ() -> None:
    triples = [(name, path, revision) for name in "ab" for path in ("x", "bx") for revision in ("", "1")]
    numbers = {adapter_number(*triple) for triple in triples}
    assert len(numbers) == len(triples) and all(0 < number < 1 << 31 for number in numbers)
    assert adapter_number("a", "x") == adapter_number("a", "x") == 386063089
