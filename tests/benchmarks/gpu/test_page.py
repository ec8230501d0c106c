"""The page has every row with its conditions, and lists the questions that no GPU has answered."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu.page import open_questions, write_page
from benchmarks.gpu.record import Row, RunRecord, Spread
from benchmarks.gpu.sections import SECTIONS, cell, number
from docs.make.gpu import PAGE, RECORDS, page
from tests.benchmarks.gpu.rows import EQUAL, ON, ORIGIN, ROWS, SERVING

ALL = RunRecord(ROWS)
QUESTIONS = [question for section in SECTIONS for question in section.answers]


def test_page_of_the_documentation_is_up_to_date(tmp_path: Path) -> None:
    assert PAGE.read_text() == page(tmp_path), "run: python -m docs.make"
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in RECORDS.glob("*.svg")}


def test_every_picture_of_the_documentation_is_used() -> None:
    assert all(f"{RECORDS.name}/{path.name}" in PAGE.read_text() for path in RECORDS.glob("*.svg"))


def test_page_has_every_row(tmp_path: Path) -> None:
    write_page(ALL, tmp_path)
    text = (tmp_path / "page.md").read_text()
    for title in (section.title for section in SECTIONS):
        assert f"## {title}\n" in text
    for piece in (
        "# Measured on one H100\n",
        "2027-01-02, commit abc1234. H100, 80 GiB, driver 1. Python 3.12.",
        "| 24,576 | KV | 4 of 5 | 27.1 | 3.25 [2.5, 4.12] | 51.5 [50, 60] |",
        "- failed: KV, 24,576: committed by tokens: None",
        "A remark.",
        "| 64 | tokens_per_s tok/s | 1,234 [1, 2] | 2,000 [1, 2] | 0.6 |",
        "| Mell, cuda_ipc | greedy | cached = moved by kv | 15 of 16 | 14 of 16 |",
        "| kill -9 | 9 of 16 | 1 | 0.055 | 0.5 | 77.5 | 4 committed by kv |",
        "| tokens | target | 3 | 1.25 | 22.5 | 6.5 | 8.5 |",
        "| 64 MiB | 107 [100, 110] |",
        "`pytest tests/gpu`: 31 passed, 7 skipped",
        "| replica 0 | GPU memory | 745 | 256 |",
        "| moves | cut | 388.5 |",
        "| Mell, 2 replica(s) | 8b model, CUDA graphs; cuda_ipc | 101.5 |",
        "MeasureNeighbours",
    ):
        assert piece in text, piece
    assert text.count(ON) >= 6
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "2027-01-02-moves.svg",
        "2027-01-02-serving.svg",
        "page.md",
    ]


def test_empty_record_leaves_every_question_open(tmp_path: Path) -> None:
    empty = RunRecord([ORIGIN])
    assert open_questions([empty]) == [f"- {question}." for question in QUESTIONS]
    write_page(empty, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]


def test_cpu_answers_no_question() -> None:
    assert open_questions([RunRecord([replace(ORIGIN, device="cpu"), *ROWS[1:]])]) == open_questions([])


def test_answered_questions_go() -> None:
    left = open_questions([ALL])
    assert "- Throughput and latency beside vLLM's own server at 64 streams." not in left
    assert "- Throughput and latency beside vLLM's own server at 256 streams." in left
    assert "- Equality of moved with unmoved texts, with vLLM's usual kernels." not in left
    assert "- Equality of moved with unmoved texts, batch-invariant." in left
    more: list[Row] = [replace(SERVING, streams=256), replace(EQUAL, conditions="batch-invariant", sampling="seeded")]
    gone = set(left) - set(open_questions([ALL, RunRecord([ORIGIN, *more])]))
    assert len(gone) == 3


@pytest.mark.parametrize(
    ("value", "text"), [(1433.4, "1,433"), (116.6, "116.6"), (27.13, "27.1"), (6.0, "6"), (0.0551, "0.0551")]
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_cells() -> None:
    assert cell(None) == "" and cell(Spread(1, 5, 5, 5)) == "5" and cell(Spread(4, 5)) == "5"
    assert cell(Spread(2, 5, 4, 6)) == "5 [4, 6]"
