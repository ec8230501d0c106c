"""What a part of the page is."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.evaluation.case import Case
from benchmarks.evaluation.results import Results
from benchmarks.evaluation.scale import Scale
from benchmarks.evaluation.style import Pictures


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page: the runs that it needs, and its text, which only these decide."""

    title: str
    cases: Callable[[Scale], list[Case]]
    write: Callable[[Results, Scale, Pictures], str]


def blocks(*parts: str) -> str:
    """Paragraphs, tables and figures, one below the other."""
    return "\n\n".join(part for part in parts if part)
