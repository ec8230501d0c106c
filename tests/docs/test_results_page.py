"""docs/results.md matches its data, and the numbers that other pages quote from a section are its numbers."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from docs.make import results
from docs.make.results import DATA, PAGE, BenchmarkRun, Question, page, section
from tests.docs.markdown import PAGES, ROOT

README = ROOT / "README.md"
QUESTIONS = {question.title.lower().replace(" ", "-"): question for question in results.read().questions}

_BLOCK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.) ?)")
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z*`\[])")
_ANCHOR = re.compile(r"\((?:docs/)?results\.md#([\w-]+)\)")
_LEFT_OUT = re.compile(r"`[^`]*`|\]\([^)]*\)|^\s*\d+\.\s")
_NUMBER = re.compile(r"(?<!\w)-?\d[\d,]*(?:\.\d+)?")
_COMMIT = re.compile(r"[0-9a-f]{7}( before its rebase)?")

RUN = BenchmarkRun(command="python -m benchmarks.pause", commit="", date="", machine="m", rows=(("pause", "1.5 ms"),))
QUESTION = Question(title="T", asks="Q?", about="A.", columns=("Mell",), summary=("{0[1]}", "-"), runs=(RUN, RUN))


def numbers(text: str) -> set[str]:
    """The absolute numbers of a text, without its code, its links' targets and the numbers of list items."""
    return {found.strip("-,") for found in _NUMBER.findall(_LEFT_OUT.sub(" ", text))}


def quotes(text: str) -> Iterator[tuple[str, list[str]]]:
    """The sentences of a page with links to sections of the results, and the sections' anchors."""
    for block in _BLOCK.split(text):
        for sentence in _SENTENCE.split(block):
            if anchors := _ANCHOR.findall(sentence):
                yield sentence, anchors


def strange(page: Path, of: dict[str, set[str]]) -> list[tuple[str, set[str]]]:
    """The sentences that quote numbers which the sections behind their links do not have."""
    found = []
    for sentence, anchors in quotes(page.read_text()):
        known = set().union(*(of[anchor] for anchor in anchors))
        if unknown := numbers(sentence) - known:
            found.append((sentence, unknown))
    return found


def first(question: Question) -> Question:
    """A question with its first run alone: later runs are of other versions and machines."""
    return question.model_copy(update={"runs": question.runs[:1], "notes": ()})


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m docs.make"


@pytest.mark.parametrize("run", [run for question in QUESTIONS.values() for run in question.runs])
def test_commits_and_dates_have_their_form(run: BenchmarkRun) -> None:
    assert all(_COMMIT.fullmatch(commit) for commit in run.commit.split(" and ") if commit)
    assert re.fullmatch(r"2\d{3}-\d\d-\d\d|", run.date)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_quotes_the_numbers_of_the_sections(path: Path) -> None:
    assert strange(path, {name: numbers(section(question)) for name, question in QUESTIONS.items()}) == []


def test_the_front_page_quotes_the_first_run_of_each_section() -> None:
    known = {name: numbers(section(first(question))) for name, question in QUESTIONS.items()}
    assert len(list(quotes(README.read_text()))) >= 6
    assert strange(README, known) == []


def test_a_number_that_the_section_lacks_is_found(tmp_path: Path) -> None:
    (page := tmp_path / "page.md").write_text(
        "At 7 streams, no link. It is 1.5 ms or 0.96\nat H100 ([a](results.md#a)).\n\n"
        "2. **p99**: 3 `4` ([b](results.md#b))\n"
    )
    found = strange(page, {"a": numbers("1.5 ms"), "b": numbers("3")})
    assert [unknown for _, unknown in found] == [{"0.96"}]


def test_a_row_has_the_source_of_its_run() -> None:
    assert "| pause | 1.5 ms | `benchmarks.pause` | not recorded | not recorded | m |" in section(QUESTION)


def test_a_command_stands_once() -> None:
    assert section(QUESTION).count(".venv/bin/python -m benchmarks.pause") == 1


def test_a_row_with_a_cell_too_few_is_refused() -> None:
    with pytest.raises(ValidationError, match="other cells"):
        Question(**{**QUESTION.model_dump(), "columns": ("Mell", "Counterpart")})


def test_a_machine_without_a_description_is_refused(tmp_path: Path) -> None:
    (data := tmp_path / "results.toml").write_text(DATA.read_text().replace('"1 H100" =', '"2 H100" ='))
    with pytest.raises(ValidationError, match=r"without a description: .*1 H100"):
        results.read(data)
