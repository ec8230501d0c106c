"""Auto beside static and off: the comparison, and that all modes play the same requests."""

import pytest

from benchmarks.evaluation.page import fill
from benchmarks.memserve import disaggregated
from benchmarks.memserve.disaggregated import AUTO, MODES, PAGE, ModeCase, ModeComparison, cases, compared, tables
from benchmarks.memserve.results import PaperFigures
from simulator.outcome.metrics import Window


def figures(*jct: float) -> list[PaperFigures]:
    return [PaperFigures(seconds, 2 * seconds, 0.1, 0.2, 0.03, 0.1, 0.5, 1e6) for seconds in jct]


@pytest.mark.parametrize(
    ("auto", "verdict"), [((0.9, 0.9), "yes"), ((1.05, 1.04), "yes"), ((1.1, 1.1), "spread"), ((1.3, 1.2), "no")]
)
def test_auto_is_beside_the_best_other_mode_or_its_runs(auto: tuple[float, float], verdict: str) -> None:
    found = ModeComparison({"off": figures(0.8, 1.2), "static 1": figures(3.0, 4.0), AUTO: figures(*auto)})
    assert found.best == "off" and found.verdict == verdict
    assert found.ratios == [auto[0] / 0.8, auto[1] / 1.2]


def test_all_modes_play_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disaggregated, "WINDOW", Window(5.0, 20.0))
    case = ModeCase("loogle_like", 1.0, cached=True)
    runs = [case.run(mode, 1) for mode in MODES]
    assert all(run.jobs == runs[0].jobs for run in runs)
    assert [(run.setup.prefill_gpus, run.setup.auto_prefills) for run in runs] == list(MODES.values())
    found = compared([case], 1, 1)
    assert found.keys() == {case} and found[case].figures.keys() == MODES.keys()


def test_the_page_has_a_place_for_the_table() -> None:
    equal = ModeComparison({mode: figures(1.0, 1.0) for mode in MODES})
    parts = tables(dict.fromkeys(cases(None), equal))
    assert "within 5% of the best other mode in 24 of 24 cases" in parts["disaggregation-modes"]
    assert fill(PAGE.read_text(), parts) != PAGE.read_text()
