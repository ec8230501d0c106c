"""The command that serves windows: it plays, and its table says what the runs did."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.windows import KINDS, SETTINGS, Served, WindowResult, jobs_of, main, render
from simulator.replay.trace import read_trace


@pytest.mark.slow
def test_a_short_window_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "windows.json"
    short = ["--kinds", "decode", "--seeds", "1", "--warmup-s", "20", "--length-s", "60", "--processes", "1"]
    assert main([*short, "--json", str(file)]) == 0
    (result,) = json.loads(file.read_text())
    assert result["kind"] == "decode"
    assert result["mell"]["gpu_seconds"] > 0
    assert result["constant"]["keeps"]
    assert "in 0 of 1" in (out := capsys.readouterr().out) or "in 1 of 1" in out


def test_a_window_is_written_as_a_trace(tmp_path: Path) -> None:
    assert (
        main(["--write", str(tmp_path), "--kinds", "onoff", "--seeds", "2", "--warmup-s", "60", "--length-s", "90"])
        == 0
    )
    read, jobs = read_trace(tmp_path / "onoff_2.csv.gz").requests, jobs_of(KINDS["onoff"], 2, 150.0)
    assert [(each.prompt_tokens, each.output_tokens) for each in read] == [(job.prompt, job.output) for job in jobs]
    assert read[-1].at_s - read[0].at_s == pytest.approx(jobs[-1].arrival_s - jobs[0].arrival_s, abs=0.002)


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--kinds", "stormy"])
    assert "no kind 'stormy'" in capsys.readouterr().err


@pytest.mark.parametrize("name", KINDS)
def test_every_request_fits_a_replica_and_equal_seeds_give_equal_requests(name: str) -> None:
    kind = KINDS[name]
    jobs = jobs_of(kind, 1, 200.0)
    assert jobs == jobs_of(kind, 1, 200.0) != jobs_of(kind, 2, 200.0)
    assert all(job.prompt + job.output <= kind.capacity for job in jobs)
    assert [job.arrival_s for job in jobs] == sorted(job.arrival_s for job in jobs)


def test_the_table_compares_windows_that_a_constant_number_keeps() -> None:
    kept = Served("mell", 90.0, 1.0, 0.1, {"drain": 1, "overload": 2}, 0, True)
    dearer = replace(kept, gpu_seconds=105.0)
    missed = Served("mell", 50.0, 9.0, 0.1, {"overload": 7}, 5, False)
    constant = Served("constant 4", 100.0, 1.0, 0.1, {}, 0, True)
    results = [("steady", kept, constant), ("tiny", dearer, constant), ("wave", missed, None)]
    text = render([WindowResult(kind, 1, mell, best) for kind, mell, best in results])
    assert "keeps the level in 2 of 2 windows" in text
    assert "with 0.97 of" in text
    assert [row.split()[-1] for row in text.split("\n")[1:3]] == ["0.30", "-"]
    assert "6 moves, 1.20 for each GPU-second" in text
    assert "none up to" in text
    assert [row.split() for row in text.split("\n") if row.startswith("all")] == [["all", "2", "11", "5"]]


def test_an_autoscaler_is_judged_by_one_setting_for_all_windows_and_by_the_best_of_each() -> None:
    mell = Served("mell", 80.0, 1.0, 0.1, {}, 0, True)
    dear, cheap = replace(mell, name="dear", gpu_seconds=160.0), replace(mell, name="cheap", gpu_seconds=100.0)
    missed = replace(cheap, keeps=False)
    # Only the first setting keeps both levels; the others are cheaper in the first window.
    first = WindowResult("steady", 1, mell, None, (dear, *[cheap] * (len(SETTINGS) - 1)))
    second = WindowResult("wave", 1, mell, None, (dear, *[missed] * (len(SETTINGS) - 1)))
    text = next(part for part in render([first, second]).split("\n\n") if "best single" in part)
    assert f"({SETTINGS[0]}): level kept in 2 of 2 windows, Mell takes 0.50 of" in text
    assert [row.split()[-1] for row in text.split("\n")[1:]] == ["0.80", "0.50"]
