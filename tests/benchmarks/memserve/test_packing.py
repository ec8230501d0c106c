"""The benchmark of packing: its simulations are pairs, and its live runs are counted from their looks."""

from dataclasses import replace

import pytest

from benchmarks.memserve import packing
from benchmarks.memserve.packing import ENDS_S, WARMUP_S, PackingLook, PackingRun, live_requests, show_live, simulated
from benchmarks.routing.live import RoutedAnswer
from policies.decision.limits import Sizes
from simulator.outcome.metrics import Window


def test_replicas_are_counted_between_the_warm_up_and_the_end_of_new_sessions() -> None:
    looks = [(0.0, 1), (WARMUP_S, 2), (ENDS_S - 1, 4), (ENDS_S, 9)]
    run = PackingRun(Sizes.BLIND, 0, tuple(PackingLook(at_s, replicas, 0) for at_s, replicas in looks), ())
    assert run.replicas == 3


def test_live_requests_are_those_of_a_seed_and_share_instructions() -> None:
    requests = live_requests(0)
    assert requests == live_requests(0) != live_requests(1)
    assert len({request.session for request in requests}) > 50
    assert {request.prompt[:1500] for request in requests} == {requests[0].prompt[:1500]}


def test_simulations_differ_in_their_sizes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "WINDOW", Window(5.0, 20.0))
    blind, marginal = (simulated("react_like", "slack", sizes, 0) for sizes in (Sizes.BLIND, Sizes.MARGINAL))
    assert replace(marginal, setup=replace(marginal.setup, sizes=Sizes.BLIND)) == blind
    found = [run.perform(lambda now: None)["gpus_mean"] for run in (blind, marginal)]
    assert found[0] > found[1] > 0


def test_live_runs_are_shown_in_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    answers = (RoutedAnswer(0.1, 1.0, 200, 100), RoutedAnswer(0.3, 3.0, 200, 200))
    looks = (PackingLook(WARMUP_S, 3, 5),)
    show_live(PackingRun(sizes, seed, looks, answers) for seed in (1, 0) for sizes in Sizes)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[:2] for line in lines] == [
        ["blind", "0"],
        ["marginal", "0"],
        ["blind", "1"],
        ["marginal", "1"],
    ]
    assert lines[0].split()[2:] == ["3.00", "2", "5", "75.0%", "0.200", "0.30", "2.00"]
