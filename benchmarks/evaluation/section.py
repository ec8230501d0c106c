"""Sections of the page."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.evaluation.runs.case import Case
from benchmarks.evaluation.runs.results import Results
from benchmarks.evaluation.runs.scale import Scale
from benchmarks.evaluation.style import Pictures


@dataclass(frozen=True, slots=True)
class PageSection:
    """A section of the page: the runs it needs, and its tables and figures by name, which depend on these runs only."""

    cases: Callable[[Scale], list[Case]]
    parts: Callable[[Results, Scale, Pictures], Mapping[str, str]]
