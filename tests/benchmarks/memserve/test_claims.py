"""The settings and claims of the paper: what is simulated, and the verdicts that follow from figures."""

from dataclasses import replace

import pytest

from benchmarks.evaluation.page import fill
from benchmarks.evaluation.sections.claims import Verdict
from benchmarks.memserve import case as cases_module
from benchmarks.memserve.__main__ import PAGE, tables
from benchmarks.memserve.case import RATES, SCHEDULED, TRIPLE, PaperCase
from benchmarks.memserve.claims import CLAIMS, Promised, better, case, cases, falls, index_times, verdicts
from benchmarks.memserve.results import Figures, PaperFigures, simulated
from simulator.outcome.metrics import Window

LIKE = PaperFigures(10.0, 20.0, 1.0, 2.0, 0.05, 0.1, 0.5, 1e6)
EQUAL: Figures = dict.fromkeys(cases(), LIKE)
"""Every setting serves alike."""


def changed(setting: str, workload: str, rate: float, **figures: float) -> Figures:
    return {**EQUAL, case(setting, workload, rate): replace(LIKE, **figures)}


def test_where_all_settings_serve_alike_only_the_index_reproduces() -> None:
    found = [finding.verdict for _, finding in verdicts(EQUAL)]
    assert set(found[:-1]) == {Verdict.NOT}


@pytest.mark.parametrize(
    ("jct", "p99", "verdict"),
    [(6.0, 10.0, Verdict.REPRODUCES), (8.0, 16.0, Verdict.PARTLY), (6.0, 20.0, Verdict.NOT), (9.5, 10.0, Verdict.NOT)],
)
def test_the_figure_that_falls_least_beside_its_promise_decides(jct: float, p99: float, verdict: Verdict) -> None:
    rate = RATES["sharegpt_like"][1]
    promised = (Promised("jct", "JCT", 0.3), Promised("jct_p99", "its P99", 0.42))
    found = changed("1P2D", "sharegpt_like", rate, jct=jct, jct_p99=p99)
    assert falls("sharegpt_like", [("1P2D", "PD")], promised)(found).verdict is verdict


def test_a_claim_takes_one_rate_for_all_its_figures() -> None:
    first, second, _ = RATES["sharegpt_like"]
    found = {
        **changed("1P2D", "sharegpt_like", first, jct=1.0),
        case("1P2D", "sharegpt_like", second): replace(LIKE, jct_p99=1.0),
    }
    promised = (Promised("jct", "JCT", 0.3), Promised("jct_p99", "its P99", 0.42))
    assert falls("sharegpt_like", [("1P2D", "PD")], promised)(found).verdict is Verdict.NOT


def test_the_page_has_a_place_for_every_table() -> None:
    parts = tables(EQUAL)
    assert len(parts["memserve-claims"].splitlines()) == len(CLAIMS) + 2
    assert fill(PAGE.read_text(), parts) != PAGE.read_text()


def test_sessions_that_share_a_document_ask_about_the_same_blocks() -> None:
    alone, shared = (
        {job.session: job.names[:60] for job in PaperCase(SCHEDULED, "loogle_like", 1.0, share=share).run().jobs}
        for share in (1, 2)
    )
    assert len(set(alone.values())) == len(alone)
    assert -(-len(shared) // 2) <= len(set(shared.values())) <= len(shared) // 2 + 1


def test_settings_differ_as_the_paper_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a short simulation: caching shortens first tokens, and an instance for prefills shortens gaps."""
    monkeypatch.setattr(cases_module, "WINDOW", Window(5.0, 40.0))
    settings = {setting.name: setting for setting in TRIPLE}
    each = {name: PaperCase(settings[name], "sharegpt_like", 3.0) for name in ("PD", "PD-CC", "2P1D")}
    found = simulated(list(each.values()), seeds=1, processes=1)
    assert better(found, each["PD-CC"], each["PD"], "ttft") > 0.2
    assert found[each["PD-CC"]].hits > 0.5 and found[each["PD"]].hits == 0.0
    assert found[each["2P1D"]].tpot_p99 < found[each["PD"]].tpot_p99 and found[each["2P1D"]].moved > 0


def test_the_index_holds_what_is_matched() -> None:
    assert all(0 < seconds < 1 for seconds in index_times(3))
