"""The pages as a whole: the sizes of those that are read first, their numbers, and a way to each of them."""

import re
from pathlib import Path

import pytest

from app.versions import VERSION
from tests.docs import markdown
from tests.docs.markdown import PAGES, ROOT

README = ROOT / "README.md"
DOCS = ROOT / "docs"
README_LINES = 170
GLOSSARY_TERMS = 40
GENERATED = {DOCS / name for name in ("api.md", "configuration.md")}

_TERM = re.compile(r"^\| \*\*(.+?)\*\*", re.MULTILINE)
_NUMBER = re.compile(r"\d[\d,]*\.\d+")
_OBSCURE = re.compile(r"\b(told|tells|heard|said|says|so many|what is to|(is|are) to be)\b", re.IGNORECASE)
"""Verbs of speech for data, and clauses in the place of nouns."""


def terms(glossary: str) -> list[str]:
    """The terms of a glossary: what stands in bold in the first column of its tables."""
    return _TERM.findall(glossary)


def unlinked(files: set[Path], pages: tuple[Path, ...]) -> set[Path]:
    """The files to which no page but themselves has a link."""
    linked = {
        target
        for page in pages
        for link in markdown.links(page)
        if not link.startswith("http") and (target := (page.parent / link.partition("#")[0]).resolve()) != page
    }
    return files - linked


def strange_numbers(summary: str, whole: str) -> list[str]:
    """The numbers with decimals in a summary that the whole does not have."""
    return sorted(set(_NUMBER.findall(summary)) - set(_NUMBER.findall(whole)))


def obscure(page: Path) -> list[str]:
    """The lines of a page that use words which plain English avoids."""
    return [line for line in markdown.sentences(page) if _OBSCURE.search(line)]


def test_the_front_page_is_short() -> None:
    assert len(README.read_text().splitlines()) <= README_LINES


def test_the_glossary_is_short_and_defines_each_term_once() -> None:
    found = terms((DOCS / "glossary.md").read_text())
    assert 0 < len(found) <= GLOSSARY_TERMS
    assert len(set(found)) == len(found)


def test_terms_are_found() -> None:
    assert terms("| Term | Meaning |\n|---|---|\n| **a b**, c | **no** |\n| d | e |\n") == ["a b"]


def test_every_page_and_picture_is_linked_from_another_page() -> None:
    files = {path for kind in ("*.md", "*.png", "*.svg", "*.json") for path in DOCS.glob(f"**/{kind}")}
    assert len(files) > 20
    assert unlinked(files, PAGES) == set()


def test_an_unlinked_page_is_found(tmp_path: Path) -> None:
    (one := tmp_path / "one.md").write_text("[two](two.md#part) [one](one.md)\n")
    (two := tmp_path / "two.md").write_text("[other](http://example.org/one.md)\n")
    assert unlinked({one, two}, (one, two)) == {one}


@pytest.mark.parametrize("page", ["glossary.md", "limits.md", "results.md", "architecture.md", "operations.md"])
def test_the_front_page_leads_to(page: str) -> None:
    assert f"docs/{page}" in {link.partition("#")[0] for link in markdown.links(README)}


def test_the_front_page_has_the_version_and_date_of_the_newest_changes() -> None:
    shown = re.search(r"^\*Version (\S+) of ([\d-]+)(.*):", README.read_text(), re.MULTILINE)
    newest = re.search(r"^## (\S+) \(([\d-]+)(.*)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert shown is not None and newest is not None and shown.groups() == newest.groups() and shown[1] == VERSION


def test_the_summary_has_the_numbers_of_the_evaluation() -> None:
    summary, whole = (DOCS / name for name in ("evaluation-summary.md", "evaluation.md"))
    assert strange_numbers(summary.read_text(), whole.read_text()) == []


def test_a_strange_number_is_found() -> None:
    assert strange_numbers("7.5 % of 1,000.25, 3", "7.5 and 1,000.3") == ["1,000.25"]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in GENERATED], ids=lambda page: page.name)
def test_written_pages_are_in_plain_english(page: Path) -> None:
    assert obscure(page) == []


def test_obscure_words_are_found_outside_of_code(tmp_path: Path) -> None:
    (page := tmp_path / "page.md").write_text("The replica is told.\n`said` is a field.\n```sh\nsays\n```\n")
    assert obscure(page) == ["The replica is told."]
