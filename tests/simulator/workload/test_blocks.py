"""Traces with the names of blocks."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from policies.model import Tokens
from simulator.errors import BadInput
from simulator.workload.workload import Recipe, draw, read_trace


def row(at: float = 0.0, prompt: int = 25, names: Any = (1, 2, 3)) -> dict[str, Any]:
    return {"arrival_s": at, "prompt_tokens": prompt, "output_tokens": 5, "hash_ids": names}


def written(path: Path, *rows: dict[str, Any]) -> Path:
    text = "\n".join(map(json.dumps, rows)).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_prompts_have_the_names_of_their_full_blocks(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, row(1.0, 30, [1, 9, 10]), row(0.0, 25, [1, 2, 3]))
    recipe = Recipe(read_trace(path), None, 10.0, Tokens(50), block_tokens=10)
    jobs = draw(recipe, 0).jobs
    # The first prompt's last block is not full; the second is cut to half of the capacity.
    assert [(job.prompt, job.names) for job in jobs] == [(25, (1, 2)), (25, (1, 9))]


def test_names_are_left_out_unless_caches_are_simulated(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "trace.jsonl", row()))
    assert draw(Recipe(trace, None, 10.0, Tokens(100)), 0).jobs[0].names == ()
    with pytest.raises(BadInput, match="leave the lengths as they are"):
        Recipe(trace, None, 10.0, Tokens(100), length_scale=2.0, block_tokens=10)


def test_names_are_read_only_on_request(tmp_path: Path) -> None:
    assert not read_trace(written(tmp_path / "trace.jsonl", row()), with_names=False).has_names


def test_names_count_as_caches_only_if_there_are_any(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path / "trace.jsonl", row())).has_names
    assert not read_trace(written(tmp_path / "trace.jsonl", row(names=[]))).has_names
