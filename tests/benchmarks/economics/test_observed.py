"""Observations of a replay, and the file of runs."""

from pathlib import Path

import pytest

from benchmarks.economics.case import Conditions
from benchmarks.economics.observed import LiveRun, ObservedMigration, ServedRequest, missing, observe
from benchmarks.instruments.runs import append_runs, read_runs
from simulator.errors import BadInput
from simulator.replay.measurements import ReplayMeasurements, ReplaySample, ReplicaSample
from simulator.replay.stream import Record, StreamOutcome
from simulator.replay.trace import TraceRequest
from tests.benchmarks.economics.made_up import CONDITIONS, case, looks, migration, run, served


def record(at_s: float, *chunks_s: float, outcome: StreamOutcome = StreamOutcome.OK) -> Record:
    return Record(TraceRequest(0, at_s, 100, 11), at_s + 0.25, at_s + 9, chunks_s, 11, outcome)


def sample(at_s: float, **preemptions: int) -> ReplaySample:
    replicas = tuple(ReplicaSample(name, "RUNNING", 0, 1, 0, count) for name, count in preemptions.items())
    return ReplaySample(at_s, 0, 0, 0, replicas=replicas)


def test_requests_include_the_warm_up_and_gaps_do_not() -> None:
    records = (record(1.0, 2.0, 9.0), record(20.0, 21.0, 21.5), record(30.0, outcome=StreamOutcome.FAILED))
    seen = observe(case(), ReplayMeasurements(records), began=0.0, cpu=0.5)
    assert seen.requests == (
        ServedRequest(1.0, 100, 11, 2.0, 10.0, True),
        ServedRequest(20.0, 100, 11, 21.0, 29.0, True),
        ServedRequest(30.0, 100, 11, None, 39.0, False),
    )
    assert seen.gap_s is not None and (seen.gap_s.count, seen.gap_s.max) == (1, 0.5)
    assert seen.send_lag_s is not None and seen.send_lag_s.count == 2


def test_preemptions_of_gone_replicas_stay_in_the_sum() -> None:
    samples = (sample(0.0, a=2), sample(1.0, a=3, b=0), ReplaySample(2.0, 0, 0, 0), sample(3.0, b=4))
    seen = observe(case(), ReplayMeasurements((), samples), began=0.0, cpu=0.5)
    assert [look.preemptions for look in seen.looks] == [2, 3, 3, 7]
    assert [look.states for look in seen.looks][2:] == [None, {"b": "RUNNING"}]


def test_migrations_are_oldest_first_in_replay_time() -> None:
    facts = {"path": "kv", "outcome": None, "rounds": 1, "pause_s": None, "duration_s": 0.5, "bytes": 7}
    items = ({**facts, "started_at": 1012.0}, {**facts, "started_at": 1010.0})
    seen = observe(case(), ReplayMeasurements((), migrations=items), began=1000.0, cpu=0.5)
    assert seen.migrations[0] == ObservedMigration(10.0, "kv", None, 1, None, 0.5)
    assert seen.migrations[1].at_s == 12.0


def test_runs_round_trip_through_the_file(tmp_path: Path) -> None:
    runs = [
        run(migrations=[migration(1.0), migration(2.0, None, None)], seen=looks({"a": "RUNNING"}, None)),
        run(case("serve", repeat=3), requests=[served(1.0, first_s=None)]),
    ]
    for one in runs:
        append_runs(tmp_path / "runs", one)
    assert read_runs(tmp_path / "runs", LiveRun) == runs


def test_without_a_file_there_are_no_runs(tmp_path: Path) -> None:
    assert read_runs(tmp_path / "none", LiveRun) == []


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_text('{"case": 1}\n')
    with pytest.raises(BadInput, match="not a file of runs"):
        read_runs(tmp_path / "other", LiveRun)


def test_only_cases_without_a_run_are_missing(tmp_path: Path) -> None:
    append_runs(tmp_path / "runs", run(case("mell")))
    slower = CONDITIONS.pace.model_copy(update={"decode_s": 0.1})
    cases = [case("mell"), case("serve"), case("mell", repeat=1), case(conditions=Conditions(pace=slower))]
    assert missing(cases, read_runs(tmp_path / "runs", LiveRun)) == cases[1:]
