"""Weights are named by the commit of a hub name, and by the content of files at a path."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from deployments.engine import weights
from deployments.engine.weights import name_weights

COMMIT = "a" * 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of some tensors in two files, as hubs have them."""
    made = tmp_path / "model"
    made.mkdir()
    for part in range(2):
        tensors = {f"layers.{part}.{i}.weight": torch.full((300, 700), 1.0 + i) for i in range(4)}
        tensors[f"layers.{part}.norm"] = torch.ones(700)
        save_file(tensors, made / f"model-{part}.safetensors")
    (made / "tokenizer.json").write_text("{}")
    (made / "README.md").write_text("A model.")
    return made


@pytest.fixture(params=["whole", "sampled"])
def read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How much of the files is read."""
    if request.param == "sampled":
        monkeypatch.setattr(weights, "WHOLE_BYTES", 1 << 20)
    return str(request.param)


def name(folder: Path) -> str:
    return name_weights(str(folder), None)


def changed(folder: Path, tensor: str, part: int = 1) -> None:
    """Store the file anew, with other values of one tensor: its size stays."""
    from safetensors.torch import load_file

    file = folder / f"model-{part}.safetensors"
    size, tensors = file.stat().st_size, load_file(file)
    tensors[tensor] = tensors[tensor] + 0.5
    save_file(tensors, file)
    assert file.stat().st_size == size


@pytest.mark.usefixtures("read")
def test_the_same_files_elsewhere_and_later_have_the_same_name(folder: Path, tmp_path: Path) -> None:
    there = tmp_path / "another"
    shutil.copytree(folder, there)
    os.utime(there / "model-0.safetensors", (1, 1))
    (there / "README.md").write_text("Another text.")
    assert name(folder) == name(there) and len(name(folder)) == 16


@pytest.mark.usefixtures("read")
@pytest.mark.parametrize(
    "change",
    [
        lambda folder: changed(folder, "layers.1.2.weight"),
        lambda folder: changed(folder, "layers.1.norm"),
        lambda folder: changed(folder, "layers.0.0.weight", part=0),
        lambda folder: (folder / "tokenizer.json").write_text("[]"),
        lambda folder: (folder / "modeling_mine.py").write_text("pass"),
        lambda folder: (folder / "model-1.safetensors").unlink(),
        lambda folder: (folder / "model-1.safetensors").rename(folder / "model-2.safetensors"),
    ],
    ids=["a matrix", "a norm", "another file", "the tokenizer", "code", "a file less", "a file renamed"],
)
def test_other_content_under_the_same_path_has_another_name(folder: Path, change: Callable[[Path], None]) -> None:
    before = name(folder)
    change(folder)
    assert name(folder) != before


@pytest.mark.usefixtures("read")
@pytest.mark.parametrize(
    "content", [b"GGUF", bytes(9), b"\xff" * 30, b""], ids=["gguf", "no head", "no length", "empty"]
)
def test_files_of_other_formats_are_named_by_their_content(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.gguf"
    names = set()
    for change in range(2):
        whole = bytearray(content + bytes(3 << 20))
        whole[2 << 20] = change
        file.write_bytes(whole)
        names.add(name(file))
    assert len(names) == 2


def test_a_hub_name_is_the_commit_that_its_revision_led_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for cache, revision, commit in (("cache", "main", COMMIT), ("cache", "v2", "b" * 40), ("other", "main", "c" * 40)):
        references = tmp_path / cache / "models--org--model" / "refs"
        references.mkdir(parents=True, exist_ok=True)
        (references / revision).write_text(commit)
    assert name_weights("org/model", None) == name_weights("org/model", "main") == COMMIT
    assert name_weights("org/model", "v2") == "b" * 40 and name_weights("org/model", "d" * 40) == "d" * 40
    assert name_weights("org/model", None, str(tmp_path / "other")) == "c" * 40
    (tmp_path / "cache/models--org--model/refs/main").write_text("e" * 40)
    assert name_weights("org/model", None) == "e" * 40


@pytest.mark.parametrize("model", ["org/unknown", "s3://bucket/model", "/no/such/folder"])
def test_what_is_neither_here_nor_in_the_cache_has_no_name(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/no/such/cache")
    assert name_weights(model, None) == ""
