"""The tiny model: deterministic, and generated once."""

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from app import tinymodel
from app.tinymodel import CONTEXT, VOCAB_SIZE, cache_root, digest, ensure_tiny_model
from tests.counts import LONG_ONLY


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MELL_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the generation by one small file; returns the folders of generated models."""
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(tinymodel, "_make_tokenizer", lambda folder: None)
    monkeypatch.setattr(tinymodel, "_make_weights", make)
    return made


def test_mell_cache_names_the_cache(cache: Path) -> None:
    assert cache_root() == cache


@pytest.mark.parametrize("value", [None, ""], ids=["unset", "empty"])
def test_the_default_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("MELL_CACHE", raising=False)
    if value is not None:
        monkeypatch.setenv("MELL_CACHE", value)
    assert cache_root() == Path.home() / ".cache" / "mell"


def test_the_second_call_reuses_the_model(cache: Path, quick: list[Path]) -> None:
    assert ensure_tiny_model() == ensure_tiny_model()
    assert len(quick) == 1


def folders(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def test_no_temporary_files_remain(cache: Path, quick: list[Path]) -> None:
    assert [ensure_tiny_model()] == folders(cache)


def test_a_failed_generation_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError("disk full")

    monkeypatch.setattr(tinymodel, "_make_tokenizer", fail)
    with pytest.raises(OSError, match="disk full"):
        ensure_tiny_model()
    assert folders(cache) == []


def test_the_digest_covers_names_and_contents(tmp_path: Path) -> None:
    seen: set[str] = set()
    for files in ({"a": "1"}, {"a": "2"}, {"b": "1"}, {"a": "1", "b": ""}):
        folder = tmp_path / str(len(seen))
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        seen.add(digest(folder))
    assert len(seen) == 4


def make_in(cache: str, start: float, found: "multiprocessing.Queue[tuple[str, str]]") -> None:
    """In a child process: generate the model at the common start time."""
    os.environ["MELL_CACHE"] = cache
    time.sleep(max(0.0, start - time.time()))
    folder = ensure_tiny_model()
    found.put((str(folder), digest(folder)))


@LONG_ONLY
@pytest.mark.slow
def test_concurrent_processes_share_one_model(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    makers = [context.Process(target=make_in, args=(str(tmp_path), time.time() + 1, found)) for _ in range(3)]
    for maker in makers:
        maker.start()
    results = {found.get(timeout=120) for _ in makers}
    for maker in makers:
        maker.join()
    assert len(results) == 1 and [Path(folder) for folder, _ in results] == folders(tmp_path)


@pytest.mark.slow
def test_the_model_is_the_same_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for name in "ab":
        monkeypatch.setenv("MELL_CACHE", str(tmp_path / name))
        made.append(ensure_tiny_model())
    assert digest(made[0]) == digest(made[1])
    config = json.loads((made[0] / "config.json").read_text())
    assert (config["max_position_embeddings"], config["vocab_size"]) == (CONTEXT, VOCAB_SIZE) == (4096, 512)
    tokens = json.loads((made[0] / "tokenizer_config.json").read_text())
    assert (tokens["model_max_length"], tokens["eos_token"]) == (4096, "</s>")
