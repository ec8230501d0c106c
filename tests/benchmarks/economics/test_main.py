"""The command line, with runs that take no time."""

import csv
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.economics import __main__ as economics
from benchmarks.economics.case import Conditions, LiveCase, RunWindow
from benchmarks.economics.measure import arrivals, perform
from benchmarks.economics.observed import LiveRun
from benchmarks.instruments.runs import read_runs
from simulator.replay.measurements import ReplaySample
from tests.benchmarks.economics.made_up import case, looks, run, served

STATES = {"mell": {"a": "RUNNING"}, "worst_fit": {"a": "RUNNING", "b": "RUNNING"}, "serve": {"a": "RUNNING"}}


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """A trace with a request every 10 s for ten minutes, of 100 prompt and 10 output tokens."""
    with gzip.open(tmp_path / "steady.csv.gz", "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arrival_s", "prompt_tokens", "output_tokens"])
        writer.writerows([at_s, 100, 10] for at_s in range(0, 600, 10))
    return tmp_path


@pytest.fixture
def performed(monkeypatch: pytest.MonkeyPatch) -> list[LiveCase]:
    """The runs carried out so far; the third one fails."""
    done: list[LiveCase] = []

    def perform(
        case: LiveCase, traces: Path, show: Callable[[ReplaySample], None], record: Path | None = None
    ) -> LiveRun:
        if len(done) == 2:
            done.append(case)
            raise RuntimeError("the application did not start")
        done.append(case)
        show(ReplaySample(1.0, 0, 0, 0))
        return run(case, requests=[served(130.0)], seen=looks(STATES[case.variant]))

    monkeypatch.setattr(economics, "perform", perform)
    return done


def measure(traces: Path, *options: str) -> int:
    where = ["--traces", str(traces), "--out", str(traces / "runs"), "--windows", "steady:0", "--repeat", "1"]
    return economics.main([*where, "--seconds", "100", *options])


def test_ended_runs_are_kept_and_the_missing_ones_made_later(traces: Path, performed: list[LiveCase]) -> None:
    assert measure(traces) == economics.FAILED
    assert [one.case.variant for one in read_runs(traces / "runs", LiveRun)] == ["mell", "worst_fit"]
    assert measure(traces) == 0
    assert [one.variant for one in performed] == ["mell", "worst_fit", "serve", "serve"]


def test_runs_may_be_made_a_few_at_a_time(traces: Path, performed: list[LiveCase]) -> None:
    for _ in range(2):
        assert measure(traces, "--variants", "mell", "worst_fit", "--at-most", "1") == 0
    assert [one.variant for one in performed] == ["mell", "worst_fit"]


def test_tables_contain_the_requested_runs(
    traces: Path, performed: list[LiveCase], capsys: pytest.CaptureFixture[str]
) -> None:
    measure(traces, "--variants", "mell", "worst_fit")
    capsys.readouterr()
    assert measure(traces, "--variants", "mell") == 0
    assert "1 of worst_fit" not in capsys.readouterr().out
    assert economics.main(["--report", str(traces / "runs")]) == 0
    out = capsys.readouterr().out
    assert "100 s after 120 s of warm-up" in out
    assert "GPU-seconds" in out and "0.50 [0.50, 0.50]" in out


def test_predictions_leave_out_runs_that_cannot_be_simulated(
    traces: Path, performed: list[LiveCase], capsys: pytest.CaptureFixture[str]
) -> None:
    measure(traces, "--variants", "mell", "serve")
    capsys.readouterr()
    assert economics.main(["--predict", str(traces / "runs")]) == 0
    out = capsys.readouterr().out
    assert "mell on steady:0" in out and "serve on" not in out


def test_file_without_predictable_runs_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert economics.main(["--predict", str(tmp_path / "none")]) == economics.BAD_INPUT
    assert "no runs" in capsys.readouterr().err


@pytest.mark.parametrize("window", ["nowhere:0", "steady:11", "steady"])
def test_windows_are_checked_before_anything_runs(traces: Path, performed: list[LiveCase], window: str) -> None:
    assert measure(traces, "--windows", "steady:0", window) == economics.BAD_INPUT
    assert performed == []


def test_a_variant_that_follows_a_level_needs_one(
    traces: Path, performed: list[LiveCase], capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(traces, "--variants", "mell_slo") == economics.BAD_INPUT
    assert "give --slo" in capsys.readouterr().err
    assert performed == []


def test_the_level_and_the_delays_are_conditions(traces: Path, performed: list[LiveCase]) -> None:
    measure(traces, "--variants", "mell", "--slo", "ttft_p99_s=2,itl_p99_ms=300", "--delays", "1", "10")
    conditions = performed[0].conditions
    assert (conditions.ttft_p99_s, conditions.itl_p99_ms) == (2.0, 300.0)
    assert (conditions.upscale_s, conditions.downscale_s) == (1.0, 10.0)


def test_arrivals_are_cut_scaled_and_fitted_to_the_context(traces: Path) -> None:
    conditions = Conditions(warmup_s=20.0, seconds=60.0)
    due = arrivals(case(window=RunWindow("steady", 1.0, time_scale=2.0), conditions=conditions), traces)
    assert [one.at_s for one in due] == [0.0, 20.0, 40.0, 60.0]
    assert [one.row for one in due] == [6, 7, 8, 9]
    long = arrivals(case(window=RunWindow("steady", 1.0, token_scale=90.0), conditions=conditions), traces)
    assert {one.prompt_tokens + one.output_tokens for one in long} == {conditions.pace.max_model_len}


def test_predictions_are_compared_with_runs_on_request(
    traces: Path, performed: list[LiveCase], capsys: pytest.CaptureFixture[str]
) -> None:
    measure(traces, "--variants", "mell")
    capsys.readouterr()
    options = ["--variants", "mell", "--windows", "steady:0", "--seconds", "100", "--repeat", "2"]
    assert economics.main(["--foretell", str(traces), "--against", str(traces / "runs"), *options]) == 0
    out = capsys.readouterr().out
    assert "1 runs, 2 seeds" in out and "DIFFERS" not in out.split("1 runs, 2 seeds")[1]


@pytest.mark.slow
def test_windows_are_planned_with_the_requests_and_the_engines_of_the_runs(
    traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--windows", "steady:1:2", "--warmup", "20", "--seconds", "60", "--max-replicas", "2"]
    assert economics.main(["--frontier", str(traces), *given, "--slo", "ttft_p99_s=2"]) == 0
    out = capsys.readouterr().out
    assert "steady.csv.gz: 4 requests in 80 s, the first 20 not counted" in out
    assert "16,384 tokens of KV cache" in out and "level: TTFT p99 2 s" in out
    assert "Mell with this level keeps the level on 1.00 GPUs on average" in out
    assert economics.main(["--frontier", str(traces), *given]) == economics.BAD_INPUT
    assert "give --slo" in capsys.readouterr().err


@pytest.mark.parametrize("record", [None, Path("recordings")])
def test_the_scheduler_records_on_request(record: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class Started(Exception):
        """The application would have been started."""

    def mell(port: int, replicas: int, **settings: Any) -> None:
        given.update(settings)
        raise Started

    monkeypatch.setattr("benchmarks.economics.measure.mell", mell)
    monkeypatch.setattr("benchmarks.economics.measure.arrivals", lambda case, traces: ())
    with pytest.raises(Started):
        perform(case(), Path(), lambda now: None, record)
    assert given["scheduler"].get("record") == (None if record is None else str(record.absolute()))
