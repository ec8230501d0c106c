"""KunServe's evaluation: windows, cases, verdicts, and one play of it."""

from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.evaluation.page import fill
from benchmarks.evaluation.sections.claims import Verdict
from benchmarks.kunserve import results as results_module
from benchmarks.kunserve import windows as windows_module
from benchmarks.kunserve.__main__ import PAGE, tables
from benchmarks.kunserve.case import MODELS, TAIL_S, PairCase, PairContender
from benchmarks.kunserve.claims import (
    CLAIMS,
    FIT,
    PAIRED,
    main_cases,
    sized,
    ten_times,
    variant,
    varied_cases,
    verdicts,
)
from benchmarks.kunserve.results import Outcomes, PairOutcome, PairPlay, figures, simulated
from benchmarks.kunserve.windows import GENERATED, SPIKES, WINDOW_S, PairWindow
from policies.model import RequestId, Tokens
from simulator.world.setup import Exchange

EQUAL = PairOutcome(
    {RequestId(f"r{i}"): float(i) for i in range(100)},
    {RequestId(f"r{i}"): float(i) + 1.0 for i in range(100)},
    [0.05] * 100,
    (0.05, 0.06, 0.07, 0.08),
    [(1.0, 0.05, 10.0)],
    (),
    0,
    0,
    200.0,
    10_000,
    0,
)
ALIKE: Outcomes = {case: [EQUAL] for case in (*main_cases(()), *varied_cases())}
"""Every contender serves alike."""


def test_where_all_contenders_serve_alike_nothing_reproduces_that_is_about_pairs() -> None:
    found = {claim.text: finding.verdict for claim, finding in verdicts(ALIKE)}
    assert {found[claim.text] for claim in CLAIMS[:3]} == {Verdict.NOT}
    assert found["goal: P99 TTFT 10 times lower where the excess fits pairs"] is Verdict.NOT


def test_a_tenth_of_the_wait_reproduces_the_goal() -> None:
    quick = replace(EQUAL, firsts={name: first - 0.9 for name, first in EQUAL.firsts.items()})
    assert ten_times({**ALIKE, PAIRED: [quick]}).verdict is Verdict.REPRODUCES


def test_a_request_without_a_first_token_counts_until_the_end() -> None:
    lost = replace(EQUAL, firsts={})
    assert min(lost.ttft) == WINDOW_S + TAIL_S - 99.0
    assert (EQUAL.waited_s(10.5), EQUAL.waited_s(500.0)) == (0.5, 0.0)


def test_late_requests_miss_five_times_the_median_of_the_contender_without_moves() -> None:
    slow = replace(EQUAL, firsts={name: 6.0 + at for name, at in EQUAL.arrivals.items()})
    assert figures({**ALIKE, PAIRED: [slow]}, PAIRED).late == 1.0
    assert figures(ALIKE, PAIRED).late == 0.0


def test_the_page_has_a_place_for_every_table() -> None:
    parts = tables(ALIKE, ())
    assert len(parts["kunserve-claims"].splitlines()) == len(CLAIMS) + 2
    assert fill(PAGE.read_text(), parts) != PAGE.read_text()


def test_every_variant_says_what_it_varies() -> None:
    names = [(case.contender, case.window, variant(case)) for case in dict.fromkeys(varied_cases())]
    assert len(set(names)) == len(names) and all(name for _, _, name in names)


# --- windows and cases ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GENERATED)
def test_equal_seeds_give_equal_arrivals_in_order(name: str) -> None:
    window = PairWindow(name, 1.0)
    jobs = window.jobs(3, Tokens(10_000), 4)
    assert jobs == window.jobs(3, Tokens(10_000), 4) != window.jobs(4, Tokens(10_000), 4)
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(jobs)) and jobs[-1].arrival_s < WINDOW_S
    assert max(job.prompt + job.output for job in jobs) <= 10_000


def test_spikes_have_five_times_the_rate() -> None:
    jobs = PairWindow("spikes", 10.0).jobs(0, Tokens(10_000), 4)
    begin, length = SPIKES[0]
    inside = sum(begin <= job.arrival_s < begin + length for job in jobs) / length
    before = sum(job.arrival_s < begin for job in jobs) / begin
    assert inside / before == pytest.approx(windows_module.SPIKE, rel=0.15)


@pytest.mark.parametrize("model", MODELS)
def test_a_pair_adds_the_layers_of_one_replica(model: str) -> None:
    case = replace(PAIRED, model=model)
    served, costs = MODELS[model], case.costs().migration
    assert costs is not None
    assert case.gain() == pytest.approx((served.parameters - served.outside) / costs.kv_bytes, rel=0.01)
    assert replace(case, share=0.5).capacity() == pytest.approx(case.capacity(), rel=0.001)


def test_groups_of_k_add_the_layers_of_all_but_one() -> None:
    two, four, eight = (sized(size).gain() for size in (2, 4, 8))
    assert [four / two, eight / two] == pytest.approx([3.0, 7.0], rel=0.01)


# --- one play ---------------------------------------------------------------------------------------------------------


def test_pairs_of_a_short_spike_are_played(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (windows_module, results_module):
        monkeypatch.setattr(module, "WINDOW_S", 50.0)
    monkeypatch.setattr(windows_module, "SPIKES", ((20.0, 12.0),))
    case = replace(PAIRED, count=2, predicts=False)
    cases = [replace(case, contender=each) for each in (PairContender.MOVES, PairContender.PAIRS)]
    found = simulated(cases, 1, 1)
    moves, pairs = (found[case][0] for case in cases)
    assert len(moves.firsts) == len(pairs.firsts) == len(pairs.arrivals)
    assert len(pairs.groups) == 1 and pairs.groups[0].formed_s is not None
    assert pairs.steps and not moves.steps
    assert figures(found, cases[1]).ttft[2] < figures(found, cases[0]).ttft[2]


def test_always_paired_replicas_have_no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (windows_module, results_module):
        monkeypatch.setattr(module, "WINDOW_S", 10.0)
    outcome = PairPlay(PairCase(PairContender.ALWAYS, PairWindow("clumps", FIT), exchange=Exchange.TOGETHER)).perform(
        lambda now: None
    )
    assert len(outcome.groups) == 2 and not outcome.steps and outcome.refused == 0
