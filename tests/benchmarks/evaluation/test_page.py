"""The whole page."""

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure

from benchmarks.evaluation.__main__ import main
from benchmarks.evaluation.page import cases, write
from benchmarks.evaluation.runs.case import Case, Span
from benchmarks.evaluation.runs.scale import FAST, FULL, Scale
from benchmarks.evaluation.runs.store import Store, carry_out
from benchmarks.evaluation.sections import batching, claims, glance, paths, setting
from benchmarks.evaluation.style import Pictures
from tests.benchmarks.evaluation import made_up

TINY = Scale("tiny", 1, 1, *[Span(40.0, 10.0)] * 8)


def verdicts(page: str) -> list[tuple[str, str]]:
    """The verdicts of the table of claims, on `mell` and on `mell_repaired`."""
    return re.findall(r"\*\*(reproduces|partly|does not)\*\*.*\*\*(reproduces|partly|does not)\*\*", page)


class Undrawn(Pictures):
    """Pictures without files, since the layout of figures takes seconds."""

    def save(self, figure: Figure, file: str, sentence: str) -> str:
        """See `Pictures`."""
        pyplot.close(figure)
        return f"![{sentence}]({self.link}/{file}.svg)"


UNDRAWN = Undrawn(Path(), "evaluation")


DOCS = Path(__file__).parents[3] / "docs"
KEPT = (DOCS / "evaluation.md").read_text()
EMPTY = "# Page\n\n" + "".join(f"<!-- {name} -->\n<!-- end -->\n" for name in re.findall("<!-- ([^ ]+) -->\n\n", KEPT))
"""The page without prose, and without the contents of its parts."""


@pytest.fixture(scope="module")
def page() -> str:
    """The page with made-up numbers."""
    return write(KEPT, made_up.results(cases(FULL)), FULL, UNDRAWN)


def headers(page: str) -> list[str]:
    """The headers of tables, in order."""
    return [line for line, after in pairwise(page.splitlines()) if after.startswith("| ---")]


def test_every_part_of_the_page_is_renewed(page: str) -> None:
    assert headers(page) == headers(KEPT)
    kept, renewed = (re.findall(r"<!-- (\S+) -->\n\n(.*?)\n\n<!-- end -->", text, re.DOTALL) for text in (KEPT, page))
    assert [name for name, _ in renewed] == [name for name, _ in kept]
    same = {name for (name, old), (_, new) in zip(kept, renewed, strict=True) if old == new}
    of_others = {"memserve-claims", "memserve-settings", "memserve-live", "disaggregation-modes"}
    of_others |= {"kunserve-claims", "kunserve-contenders", "kunserve-variants"}
    assert {name for name in same if not dict(kept)[name].startswith("![")} == of_others


def test_prose_stays(page: str) -> None:
    without = [re.sub(r"<!-- .*?<!-- end -->", "", text, flags=re.DOTALL) for text in (KEPT, page)]
    assert without[0] == without[1] and len(without[0]) > 5000


def test_all_tables_and_figures_are_parts(page: str) -> None:
    prose = re.sub(r"<!-- .*?<!-- end -->", "", KEPT, flags=re.DOTALL)
    assert not re.findall(r"^[|!].*", prose, re.MULTILINE)


@pytest.mark.parametrize("text", [KEPT.replace("<!-- excess -->", ""), KEPT + "<!-- excess -->\n\n<!-- end -->\n"])
def test_a_page_lacks_no_part_and_has_none_twice(text: str) -> None:
    with pytest.raises(ValueError, match="once: excess"):
        write(text, made_up.results(cases(FULL, [glance.SECTION])), FULL, UNDRAWN, [glance.SECTION])


def test_page_has_no_missing_values(page: str) -> None:
    assert not re.findall(r"[{}]|\bnan\b|\bNone\b|\binf\b|\bTODO\b|-0\.0+\b", page)


def test_every_figure_has_a_name_and_a_description(page: str) -> None:
    links = re.findall(r"!\[[A-Z][^]]{20,}\]\(evaluation/([a-z0-9]+)\.svg\)", page)
    assert len(links) == len(set(links)) == 10


def test_only_a_short_version_has_a_warning(page: str) -> None:
    short = write(EMPTY, made_up.results(cases(FAST, [setting.SECTION])), FAST, UNDRAWN, [setting.SECTION])
    assert short.startswith("# Page\n\n**Tables and figures of the fast version")
    assert "version: short" not in page


def test_verdicts_follow_from_the_numbers() -> None:
    def good(case: Case) -> Mapping[str, Any]:
        is_mell = case.policy == "mell"
        fewer = 5.0 if is_mell and case.batched else 10.0
        return {
            "gpus_mean": 20.0 if is_mell else 29.0,
            "utilisation": 0.95 if is_mell else 0.7,
            "migrations_per_s": fewer,
            "requests_held_mean": 150.0 if is_mell else 100.0,
        }

    wanted = cases(FULL, [claims.SECTION])
    found = write(EMPTY, made_up.results(wanted, good), FULL, UNDRAWN, [claims.SECTION])
    first, second = ([pair[number] for pair in verdicts(found)] for number in (0, 1))
    assert first.count("reproduces") == len(claims.CLAIMS) - 1
    assert first.index("does not") == 4  # the advantage is the same at every rate
    assert second.count("reproduces") == 2  # Theorems 2 and 3, of which nothing was changed


@pytest.mark.slow
def test_small_report_end_to_end(traces: Path, tmp_path: Path) -> None:
    sections = [setting.SECTION, batching.SECTION, paths.SECTION]
    results = carry_out(Store(tmp_path / "runs", traces), cases(TINY, sections), processes=1, quiet=True)
    first, second = (write(EMPTY, results, TINY, Pictures(tmp_path / name, "x"), sections) for name in ("a", "b"))
    assert first == second
    assert first.count("| 13B, Poisson 0.5/s |") == 2
    for link in re.findall(r"\(x/(.+\.svg)\)", first):
        drawn = (tmp_path / "a" / link).read_bytes()
        assert drawn == (tmp_path / "b" / link).read_bytes()
        assert drawn.count(b"<path") > 20


def test_missing_traces_are_reported_before_the_first_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--traces", str(tmp_path)]) == 2
    assert "does not have azure2023_code.csv.gz, azure2023_conv.csv.gz, " in capsys.readouterr().err
