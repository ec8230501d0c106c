"""The paper's settings on a pair of replicas: what is sent, what is counted, and the table."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.evaluation.page import fill
from benchmarks.instruments.runs import append_runs, read_runs
from benchmarks.memserve import live
from benchmarks.memserve.__main__ import PAGE
from benchmarks.memserve.live import RATES, SYSTEMS, PairAnswer, PairRun, counted, predict, tables
from benchmarks.routing import case
from simulator.errors import BadInput

RUN = PairRun("full", "loogle_like", 0, (PairAnswer(0.1, 2.1, 100, 60, 41), PairAnswer(0.3, 0.3, 100, 20, 1)), {})


def test_hand_overs_are_counted_by_outcome() -> None:
    metrics = """\
# TYPE mell_migrations_total counter
mell_migrations_total{outcome="committed",path="kv",reason="disaggregate",WorkerId="1"} 3.0
mell_migrations_total{outcome="committed",path="tokens",reason="disaggregate"} 1.0
mell_migrations_total{outcome="aborted",path="kv",reason="disaggregate"} 2.0
mell_migrations_total{outcome="committed",path="kv",reason="balance"} 9.0
"""
    assert counted(metrics) == {"committed": 4, "aborted": 2}


def test_runs_are_appended_to_a_file_of_runs(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    assert read_runs(path, PairRun) == []
    append_runs(path, RUN)
    assert read_runs(path, PairRun) == [RUN]
    path.write_text("{}\n")
    with pytest.raises(BadInput, match="is not a file of runs"):
        read_runs(path, PairRun)


def test_only_what_the_file_lacks_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs"
    append_runs(path, RUN)
    performed = list[tuple[str, str]]()

    def perform(to: Path, system: str, workloads: list[str], seed: int) -> None:
        assert to == path and seed == 0
        performed.extend((system, workload) for workload in workloads)

    monkeypatch.setattr(live, "_perform", perform)
    assert live.measure(path, 1) == [RUN]
    assert {*performed, ("full", "loogle_like")} == {(system, workload) for system in SYSTEMS for workload in RATES}
    assert len(performed) == len(SYSTEMS) * len(RATES) - 1


def test_table_has_the_means_and_the_simulated_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "predict", lambda system, workload, seed: replace(RUN, system=system))
    handed = replace(RUN, handed_over={"committed": 1, "aborted": 1})
    parts = tables([handed])
    assert parts["memserve-live"].splitlines()[-1] == (
        "| loogle_like | full | 1.20, 2.10 | 1.20, 2.10 | 200, 300 | 50.0, 50.0 | 40% | 50%, 1 failed |"
    )
    assert fill(PAGE.read_text(), parts) != PAGE.read_text()


@pytest.mark.slow
def test_the_simulator_plays_every_setting_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case, "BEGIN_S", 5.0)
    runs = {system: predict(system, "loogle_like", 0) for system in SYSTEMS}
    played = {system: run for system, run in runs.items() if run is not None}
    assert runs.keys() - played.keys() == {"prefill"}
    assert len({len(run.answers) for run in played.values()}) == 1
    found = {system: sum(answer.cached for answer in run.answers) for system, run in played.items()}
    assert found["none"] == 0 and min(found[system] for system in ("off", "decode", "full", "auto")) > 0
