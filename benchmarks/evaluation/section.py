"""Sections of the page."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.evaluation.runs.case import Case
from benchmarks.evaluation.runs.results import Results
from benchmarks.evaluation.runs.scale import Scale
from benchmarks.evaluation.style import Pictures


@dataclass(frozen=True, slots=True)
class PageSection:
    """A section of the page: the runs it needs, and its text, which depends on these runs only."""

    title: str
    cases: Callable[[Scale], list[Case]]
    write: Callable[[Results, Scale, Pictures], str]


def blocks(*parts: str) -> str:
    """Paragraphs, tables and figures, separated by empty lines; empty parts are left out."""
    return "\n\n".join(part for part in parts if part)
