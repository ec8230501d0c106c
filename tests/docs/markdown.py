"""The contents of pages: fenced blocks, commands within a sentence, links, and headings."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]
PROJECT_PAGES = tuple(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY"))
PAGES = (*PROJECT_PAGES, *sorted((ROOT / "docs").glob("**/*.md")))

_FENCE = re.compile(r"^ *(`{3,})(\S*)\n(.*?)^ *\1 *$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*?) *#*$", re.MULTILINE)
_COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:python -m|make|pip install|pytest|curl|serve run) \S")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block, or a command within a sentence, whose language is `sh` then."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        yield Block(page, text.count("\n", 0, found.start()) + 1, found[2], dedent(found[3]))


def commands(page: Path) -> Iterator[Block]:
    """The commands that stand within the sentences of a page."""
    text = _prose(page)
    for found in _INLINE.finditer(text):
        command = " ".join(found[1].split())
        if _COMMAND.match(command):
            yield Block(page, text.count("\n", 0, found.start()) + 1, "sh", command)


def links(page: Path) -> list[str]:
    """The targets of a page's links and images."""
    return _LINK.findall(_INLINE.sub("", _prose(page)))


def code(page: Path) -> list[str]:
    """The pieces of code within a page's sentences."""
    return _INLINE.findall(_prose(page))


def sentences(page: Path) -> list[str]:
    """The lines of a page, with its code left out."""
    return _INLINE.sub("", _prose(page)).splitlines()


def anchors(page: Path) -> set[str]:
    """The targets of links within a page: GitHub's names for its headings."""
    seen: dict[str, int] = {}
    names = set()
    for heading in _HEADING.findall(_prose(page)):
        plain = _LINK.sub(lambda link: link[0][1 : link[0].index("]")], heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        seen[name] = seen.get(name, -1) + 1
        names.add(f"{name}-{seen[name]}" if seen[name] else name)
    return names


def _prose(page: Path) -> str:
    """A page whose fenced blocks are empty lines."""
    return _FENCE.sub(lambda block: "\n" * block[0].count("\n"), page.read_text())
