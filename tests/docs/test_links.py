"""Links in the documentation lead somewhere: to a file, and to a heading in it. Files that it names exist."""

import re
from pathlib import Path

import pytest

from tests.docs import markdown
from tests.docs.markdown import PAGES, ROOT

_PATH = re.compile(r"(?:app|benchmarks|deployments|migration|policies|requirements|tests)/[\w./-]+")


def missing(page: Path) -> list[str]:
    """The files and folders of the project that a page names in code and that do not exist."""
    return [code for code in markdown.code(page) if _PATH.fullmatch(code) and not (ROOT / code).exists()]


def broken(page: Path) -> list[str]:
    """The links of a page within the repository that lead nowhere."""
    found = []
    for link in markdown.links(page):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        if not target.exists() or (anchor and anchor not in markdown.anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` (c)\n## Twice\n## Twice\n[1](#a-b-c) [2](#twice-1) [3](#no) [4](no.md) ![5](no.png#x)\n")
    assert broken(page) == ["#no", "no.md", "no.png#x"]


def test_links_in_code_are_none(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`[1](no.md)`\n```sh\n[2](no.md)\n```\n")
    assert broken(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    assert missing(page) == []


def test_missing_files_are_found(tmp_path: Path) -> None:
    (page := tmp_path / "page.md").write_text("`app/main.py` `app/no.py` app/neither.py `tests/docs/` `no/such.py`\n")
    assert missing(page) == ["app/no.py"]
