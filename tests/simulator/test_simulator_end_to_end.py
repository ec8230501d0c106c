"""Whole simulations, by the command line."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from policies.rules.registry import POLICIES
from simulator.__main__ import main
from simulator.planning.__main__ import main as mell_plan
from tests.simulator.replay.make_small_trace import PATH

SMALL = ("--trace", str(PATH), "--warmup", "10", "--capacity-tokens", "1500", "--processes", "1", "--quiet")
TWO = ("--policy", "best_fit", "--policy", "load_balance")

Simulated = Callable[..., dict[str, Any]]

RUN = {
    *("policy", "seed", "gpus_peak", "gpus_mean", "gpu_seconds", "utilisation", "activations_per_s"),
    *("migrations_per_s", "units_moved_per_s", "tokens_moved_per_s", "bytes_moved_per_s"),
    *("moves_by_path", "moves_by_reason", "evictions_per_s", "preemptions_per_s"),
    *("stall_s", "added_ttft_s", "added_completion_s", "ratio_to_bound", "ratio_to_repack"),
    *("requests_held_mean", "requests_waiting_mean", "serving_ratio"),
}


@pytest.fixture
def simulated(tmp_path: Path) -> Simulated:
    """Simulates the small trace and returns the JSON document."""

    def simulate(*argv: str) -> dict[str, Any]:
        path = tmp_path / "outcome.json"
        assert main([*SMALL, "--json", str(path), *argv]) == 0
        outcome: dict[str, Any] = json.loads(path.read_text())
        return outcome

    return simulate


def test_every_policy_is_run_with_every_seed(simulated: Simulated) -> None:
    outcome = simulated(*TWO, "--seed", "1", "--seed", "2", "--lengths", "quantiles")
    assert [(run["policy"], run["seed"]) for run in outcome["runs"]] == [
        ("best_fit", 1),
        ("best_fit", 2),
        ("load_balance", 1),
        ("load_balance", 2),
    ]
    assert [(one["policy"], one["seeds"]) for one in outcome["summary"]] == [("best_fit", 2), ("load_balance", 2)]
    means = [run["gpus_mean"] for run in outcome["runs"][:2]]
    assert outcome["summary"][0]["gpus_mean"]["mean"] == pytest.approx(sum(means) / 2)
    assert outcome["summary"][0]["gpus_mean"]["ci95"] == pytest.approx(12.706 * abs(means[0] - means[1]) / 2)


def test_a_document_has_the_names_that_others_rely_on(simulated: Simulated) -> None:
    outcome = simulated(*TWO)
    assert set(outcome) == {"workload", "setup", "bound", "runs"}
    assert {"peak", "mean"} < set(outcome["bound"])
    assert all(set(run) >= RUN for run in outcome["runs"])
    assert (outcome["workload"]["trace"], outcome["workload"]["by_seed"][0]["requests"]) == ("small_trace.csv.gz", 40)
    assert (outcome["setup"]["capacity_tokens"], outcome["setup"]["costs"]) == (1500, "ideal")


def test_no_policy_does_better_than_the_bound(simulated: Simulated) -> None:
    outcome = simulated(*TWO)
    assert outcome["bound"]["mean"] > 2
    for run in outcome["runs"]:
        assert run["gpus_mean"] >= outcome["bound"]["mean"] == run["bound_mean"]
        assert run["gpus_peak"] >= outcome["bound"]["peak"]
        assert run["ratio_to_bound"] >= run["ratio_to_repack"] >= 1


def test_a_series_is_written_by_option(simulated: Simulated) -> None:
    (run,) = simulated("--policy", "best_fit", "--series")["runs"]
    assert [point["at_s"] for point in run["series"]] == list(range(45))


def test_with_a_fixed_number_of_gpus_requests_wait(simulated: Simulated) -> None:
    (run,) = simulated("--policy", "best_fit", "--max-gpus", "2")["runs"]
    assert run["gpus_peak"] == 2
    assert run["requests_waiting_mean"] > 0
    assert run["serving_ratio"] < 1


def test_a_service_level_takes_the_gpus_that_it_needs(simulated: Simulated) -> None:
    def run(itl_ms: str) -> dict[str, Any]:
        costs = ("--costs", "a100-40g-13b-pcie", "--capacity-tokens", "9000")
        outcome = simulated("--policy", "pack", *costs, "--itl-p99", itl_ms)
        assert outcome["setup"]["itl_p99_s"] == float(itl_ms) / 1e3
        found: dict[str, Any] = outcome["runs"][0]
        return found

    easy, strict = run("400"), run("27")
    assert strict["gpus_mean"] > easy["gpus_mean"]
    assert strict["itl_s"]["p50"] < min(0.027, easy["itl_s"]["p50"])
    assert 0 < easy["ttft_s"]["p50"] < 45


@pytest.mark.slow
def test_a_plan_is_that_of_mell_plan(
    tmp_path: Path, simulated: Simulated, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simulator.planning.cases.SLACKS", (0.5,))
    monkeypatch.setattr("simulator.planning.cases.STEPS", (2.0,))
    monkeypatch.setattr("simulator.planning.cases.FILLS", (0.5, 0.6, 0.7))
    monkeypatch.setattr("simulator.planning.perform.CUTS_S", (1.0,))
    options = ("--costs", "a100-40g-13b-pcie", "--capacity-tokens", "9000", "--ttft-p99", "60", "--horizon", "30")
    found = simulated("--plan", *options)
    said = capsys.readouterr().out
    path = tmp_path / "plan.json"
    assert mell_plan([*SMALL[1:], *options, "--json", str(path)]) == 0
    assert json.loads(path.read_text()) == found
    assert capsys.readouterr().out == said


def test_a_plan_needs_a_level(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--plan", "--costs", "a100-40g-13b-pcie"]) == 2
    assert capsys.readouterr().err == "A plan needs a service level: give --ttft-p99 or --itl-p99.\n"


def test_costs_and_their_calibration_are_read_from_files(simulated: Simulated, tmp_path: Path) -> None:
    costs, measured = tmp_path / "slow.json", tmp_path / "measured.json"
    costs.write_text('{"slots": false, "preemption": false, "startup_s": 60}')
    measured.write_text('{"startup_s": [4, 5, 9]}')
    outcome = simulated("--policy", "best_fit", "--costs", str(costs), "--calibration", str(measured))
    assert (outcome["setup"]["costs"], outcome["setup"]["calibration"]) == ("slow.json", "measured.json")
    (run,) = outcome["runs"]
    assert run["gpus_starting_mean"] > 0
    assert 1 < run["added_ttft_s"]["max"] < 20  # with 60 s to start nothing would be served within the horizon


def test_a_table_has_the_metrics_of_every_policy(simulated: Simulated, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = simulated(*TWO, "--seeds", "2", "--lengths", "quantiles")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "small_trace.csv.gz, lengths from quantiles; 45 s, the first 10 s not counted"
    assert lines[1] == "read as Mell (arrival_s, prompt_tokens, output_tokens), times in seconds"
    assert re.fullmatch(
        r"longer than the 1,500 tokens of a GPU: cut, \d of 40 requests \(.* %\), by .* % of the tokens", lines[2]
    )
    drawn = outcome["workload"]["by_seed"][0]
    assert (drawn["capped"], drawn["cut_tokens"] > 0) == (2, True)
    assert re.match(r"seed 0: 40 requests; they need \d\.\d\d GPUs on average", lines[4])
    names = [line.split()[0] for line in lines[-4:]]
    assert (names[0], names[2]) == ("best_fit", "load_balance")
    assert names[1].startswith("±")
    assert lines[-4].split()[1] == f"{outcome['summary'][0]['gpus_mean']['mean']:.2f}"


def test_the_policies_are_listed_with_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list-policies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines if not line.startswith(" ")] == list(POLICIES)
    assert any(line.startswith("  drain=false (true or false) ") for line in lines)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (("--no-cap",), "Request 3 needs 1,036 tokens, more than the 1,000 of a replica: leave out --no-cap"),
        (("--start", "1000"), "No request arrives after 1000 s"),
    ],
    ids=["larger than a replica", "nothing arrives"],
)
def test_a_workload_that_cannot_be_played_is_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], complaint: str
) -> None:
    assert main([*SMALL, *TWO, "--capacity-tokens", "1000", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(complaint)


@pytest.mark.slow
def test_an_interrupt_ends_every_process(tmp_path: Path) -> None:
    path = tmp_path / "outcome.json"
    endless = ("--poisson", "0.1", "--lengths", "quantiles", "--horizon", "1e5")
    argv = (*endless, *TWO, "--json", str(path), "--processes", "2")
    command = [sys.executable, "-m", "simulator", *argv]
    # A script's background jobs inherit an ignored SIGINT, and so would the simulator.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=heed) as running:
        assert running.stderr is not None
        said = b""
        while said.count(b"simulated:") < 3:  # the bar has moved on: the processes are being started
            said += os.read(running.stderr.fileno(), 4096)
        os.killpg(running.pid, signal.SIGINT)
        said += running.stderr.read()  # ends when no process is left that holds it
        assert running.wait() == 130
    assert said.decode().endswith("Interrupted: nothing is reported.\n")
    assert "Traceback" not in said.decode()
    assert not path.exists()


@pytest.mark.slow
def test_classes_have_metrics_of_their_own_and_the_highest_rank_waits_least(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crowded = (
        *("--poisson", "0.7", "--lengths", "quantiles", "--costs", "a100-40g-13b-pcie", "--capacity-tokens", "9000"),
        *("--max-gpus", "1", "--horizon", "400", "--warmup", "60", "--policy", "pack", "--processes", "1", "--quiet"),
    )
    classes = ("--class", "chat:rank=1,share=0.3", "--class", "batch:rank=-1,share=0.4")
    outcomes = []
    for argv in crowded, (*crowded, *classes):
        assert main([*argv, "--json", str(tmp_path / "outcome.json")]) == 0
        outcomes.append(json.loads((tmp_path / "outcome.json").read_text()))
    (plain,), (run,) = (outcome["runs"] for outcome in outcomes)
    assert "classes" not in plain and plain["requests_waiting_mean"] > 1
    assert outcomes[1]["setup"]["classes"]["chat"] == {"rank": 1, "level": None}
    assert sum(each["requests_finished"] for each in run["classes"].values()) == run["requests_finished"]
    first = {name: each["ttft_s"]["mean"] for name, each in run["classes"].items()}
    assert first["chat"] < first["default"] < first["batch"]
    finished = run["classes"]["chat"]["requests_finished"]
    assert f"class chat: {finished:,} requests, TTFT p99" in capsys.readouterr().out
