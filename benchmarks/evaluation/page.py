"""The page: prose by hand, in which tables and figures are replaced by those of the newest runs.

A table or figure stands between two comments, `<!-- NAME -->` and `<!-- end -->`; a section of `sections` makes it.
"""

import re
from collections.abc import Mapping, Sequence

from benchmarks.evaluation.runs.case import Case
from benchmarks.evaluation.runs.results import Results
from benchmarks.evaluation.runs.scale import Scale
from benchmarks.evaluation.section import PageSection
from benchmarks.evaluation.sections import (
    batching,
    claims,
    costly,
    frontier,
    glance,
    held,
    independent,
    needed,
    paths,
    sensitivity,
    setting,
)
from benchmarks.evaluation.style import Pictures

SECTIONS: Sequence[PageSection] = tuple(
    module.SECTION
    for module in (
        *(setting, glance, held, needed, batching, frontier),
        *(paths, costly, sensitivity, claims, independent),
    )
)

_PART = re.compile(r"<!-- (?P<name>[a-z0-9-]+) -->\n.*?<!-- end -->", re.DOTALL)


def cases(scale: Scale, sections: Sequence[PageSection] = SECTIONS) -> list[Case]:
    """All runs of the page, without duplicates."""
    return list(dict.fromkeys(case for section in sections for case in section.cases(scale)))


def write(
    page: str, results: Results, scale: Scale, pictures: Pictures, sections: Sequence[PageSection] = SECTIONS
) -> str:
    """The page with the tables and figures of these results; also writes the figures. Those of other sections stay.

    Raises `ValueError` as `fill` does.
    """
    parts: dict[str, str] = {}
    for section in sections:
        parts |= section.parts(results, scale, pictures)
    filled = fill(page, parts)
    if scale.name == "full":
        return filled
    title, _, rest = filled.partition("\n")
    return f"{title}\n\n**Tables and figures of the {scale.name} version: short runs, large errors.**\n{rest}"


def fill(page: str, parts: Mapping[str, str]) -> str:
    """The page with these parts. Raises `ValueError` if it lacks one of them, or has one twice."""
    found = [match["name"] for match in _PART.finditer(page)]
    if wrong := sorted(name for name in parts if found.count(name) != 1):
        raise ValueError(f"the page is to have each of these parts once: {', '.join(wrong)}")

    def renewed(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- {name} -->\n\n{parts[name]}\n\n<!-- end -->" if name in parts else match[0]

    return _PART.sub(renewed, page)
