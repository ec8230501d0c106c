"""Traces with the names of blocks."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from app.simulator.workload.hashed import is_hashed

from app.simulator.errors import BadInput
from app.simulator.workload.workload import Recipe, draw, read_trace
from policies.model import Tokens


def row(at: float = 0.0, prompt: int = 25, names: Any = (1, 2, 3)) -> dict[str, Any]:
    return {"arrival_s": at, "prompt_tokens": prompt, "output_tokens": 5, "hash_ids": names}


def written(path: Path, *rows: dict[str, Any]) -> Path:
    text = "\n".join(map(json.dumps, rows)).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_prompts_have_the_names_of_their_full_blocks(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, row(1.0, 30, [1, 9, 10]), row(0.0, 25, [1, 2, 3]))
    assert is_hashed(path)
    recipe = Recipe(read_trace(path), None, 10.0, Tokens(50), block_tokens=10)
    jobs = draw(recipe, 0).jobs
    # The first prompt's last block is not full; the second is cut to half of the capacity.
    assert [(job.prompt, job.names) for job in jobs] == [(25, (1, 2)), (25, (1, 9))]


def test_names_are_left_out_unless_caches_are_simulated(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "trace.jsonl", row()))
    assert draw(Recipe(trace, None, 10.0, Tokens(100)), 0).jobs[0].names == ()
    with pytest.raises(BadInput, match="leave the lengths as they are"):
        Recipe(trace, None, 10.0, Tokens(100), length_scale=2.0, block_tokens=10)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(row(names=[-1])),
        json.dumps(row(names=[1 << 64])),
        '{"arrival_s": 1, "hash_ids": []',
        '{"hash_ids": [1]}',
        json.dumps(row(names=["a"])),
        json.dumps(row(-1)),
    ],
)
def test_a_line_that_is_no_request_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(BadInput, match="line 1"):
        read_trace(path)


def test_other_files_are_no_such_trace(tmp_path: Path) -> None:
    for content in (b"arrival_s,prompt_tokens\n", b'{"version": 1}\n', b"\x1f\x8bbroken", b""):
        path = tmp_path / "file"
        path.write_bytes(content)
        assert not is_hashed(path)
    assert not is_hashed(tmp_path / "missing")
