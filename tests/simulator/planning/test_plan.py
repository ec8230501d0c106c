"""A whole plan of a small workload."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from simulator.command.options import plan_options
from simulator.command.order import read_order
from simulator.planning.__main__ import main
from simulator.planning.cases import LEVEL, ONE_BY_ONE, TITLES, Contender
from simulator.planning.report import plan
from simulator.planning.text import render_plan
from tests.simulator.planning.make_example import PATH as EXAMPLE
from tests.simulator.planning.make_example import lines
from tests.simulator.replay.make_small_trace import PATH

SMALL = (str(PATH), "--capacity-tokens", "9000", "--warmup", "10", "--processes", "1", "--quiet")
EASY = ("--ttft-p99", "60", "--itl-p99", "300")


@pytest.fixture(autouse=True)
def small_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few settings of every contender."""
    monkeypatch.setattr("simulator.planning.cases.SLACKS", (0.0, 0.5))
    monkeypatch.setattr("simulator.planning.cases.STEPS", (2.0,))
    monkeypatch.setattr("simulator.planning.cases.FILLS", (0.25, 0.6, 0.85))
    monkeypatch.setattr("simulator.planning.cases.ONE_BY_ONE", ONE_BY_ONE[:2])
    monkeypatch.setattr("simulator.planning.perform.CUTS_S", (1.0,))


@cache
def planned(*options: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(plan(read_order(plan_options([*SMALL, *options])), quiet=True)))
    return found


def members(found: dict[str, Any], contender: Contender) -> list[dict[str, Any]]:
    return [case for case in found["cases"] if case["contender"] == contender]


@pytest.mark.slow
def test_a_plan_names_the_fewest_gpus_that_keep_the_level() -> None:
    found = planned(*EASY)
    used = [case["gpu_seconds"] for case in found["cases"]]
    assert used == sorted(used)
    kept = [case["name"] for case in found["cases"] if case["keeps_level"] and not case["hypothetical"]]
    assert found["fewest"] == kept[0]
    assert (found["setup"]["ttft_p99_s"], found["workload"]["trace"]) == (60, PATH.name)
    level = next(case for case in found["cases"] if case["name"] == LEVEL)
    serve = next(each for each in found["comparisons"] if each["contender"] == Contender.SERVE)["at_level"]
    best = min(case["gpu_seconds"] for case in members(found, Contender.SERVE) if case["keeps_level"])
    assert serve["gpu_seconds"] == best
    assert serve["saved_by_mell"] == pytest.approx(1 - level["gpu_seconds"] / best)


def test_the_oracle_is_between_the_least_work_and_mell() -> None:
    oracle = planned(*EASY)["oracle"]
    assert 0 < oracle["least_work_gpu_seconds"] <= oracle["gpu_seconds"]
    assert oracle["mell_to_oracle"] >= 1
    found = planned(*EASY)
    assert oracle["gpu_seconds"] <= min(case["gpu_seconds"] for case in found["cases"] if case["keeps_level"])
    assert len(oracle["plans"]) == 1
    assert oracle["parts_kept"] <= oracle["parts_planned"] == oracle["parts_possible"] == oracle["parts"] == 1


def test_every_case_is_bounded_by_the_cheapest_one_with_its_service() -> None:
    for case in planned(*EASY)["cases"]:
        bound = case["oracle_gpu_seconds"]
        assert bound is None if case["hypothetical"] else bound <= case["gpu_seconds"]


@pytest.mark.slow
def test_a_level_that_no_case_keeps() -> None:
    found = planned("--ttft-p99", "0.1")
    assert found["fewest"] is None
    assert not any(case["keeps_level"] for case in found["cases"])
    assert (found["oracle"]["gpu_seconds"], found["oracle"]["parts_possible"]) == (None, 0)
    text = render_plan(found)
    assert "misses the level" in text and text.endswith("No case keeps the level.")


def test_the_answer_is_a_table_and_sentences() -> None:
    head, table, answer = render_plan(planned(*EASY)).split("\n\n")
    assert head.startswith(f"{PATH.name}: 40 requests in ")
    assert head.splitlines()[1:] == [
        "read as Mell (arrival_s, prompt_tokens, output_tokens), times in seconds",
        "GPU assumed: Llama 2 13B on an NVIDIA A100 with 40 GB, links by PCIe (--costs a100-40g-13b-pcie), 9,000 "
        "tokens of KV cache (--capacity-tokens), 30 s to start (--startup)",
        "level: TTFT p99 60 s, ITL p99 300 ms",
    ]
    lines = table.splitlines()
    assert len({len(line) for line in lines[:2]}) <= 2 and lines[1].startswith("Mell at the level ")
    assert sum(line.startswith("Ray Serve's autoscaler: ") for line in lines) in (1, 2)
    assert answer.startswith("Mell with this level keeps the level on ")
    assert "An oracle that knows the trace takes " in answer
    for contender in Contender:
        assert contender is Contender.MELL or any(line.startswith(f"{TITLES[contender]}: ") for line in lines)


@pytest.mark.slow
def test_machine_seconds_stand_beside_gpu_seconds_of_every_contender() -> None:
    found = planned(*EASY, "--gpus-per-machine", "2")
    for case in found["cases"]:
        assert case["gpu_seconds"] / 2 <= case["machine_seconds"] <= case["gpu_seconds"]
    head, table, _ = render_plan(found).split("\n\n")
    assert "machines of 2 GPUs (--gpus-per-machine)" in head.splitlines()
    assert "GPU-seconds  machine-seconds  GPUs mean" in table.splitlines()[0]
    assert all("machine_seconds" not in case for case in planned(*EASY)["cases"])


@pytest.mark.slow
def test_a_plan_of_service_classes_reports_each_with_its_level() -> None:
    classes = ("--class", "chat:rank=1,share=0.4,ttft_p99=40", "--class", "batch:rank=-1,share=0.4,ttft_p99=0.05")
    found = planned(*EASY, *classes)
    level = next(case for case in found["cases"] if case["name"] == LEVEL)
    assert level["kept_by_class"] == {"batch": False, "chat": True, "default": True} and not level["keeps_level"]
    assert set(level["ttft_p99_by_class_s"]) == {"batch", "chat", "default"} and found["fewest"] is None
    by_class = render_plan(found).split("\n\n")[2].splitlines()
    assert by_class[0].split() == ["Mell,", "by", "class", "TTFT", "p99", "s", "target", "s", "level"]
    assert [(line.split()[0], *line.split()[2:]) for line in by_class[1:]] == [
        ("batch", "0.05", "missed"),
        ("chat", "40", "kept"),
        ("default", "60", "kept"),
    ]


def test_a_level_that_only_others_keep() -> None:
    found = json.loads(json.dumps(planned(*EASY)))
    compared = {each["contender"]: each for each in found["comparisons"]}
    serve, kv, worst = (compared[name] for name in (Contender.SERVE, Contender.KV, Contender.WORST_FIT))
    for case in found["cases"]:
        case["keeps_level"] = case["contender"] == Contender.SERVE
    found["fewest"] = serve["at_level"]["case"]
    serve["at_equal_service"] = kv["at_level"] = kv["at_equal_service"] = None
    worst["at_equal_service"] = {"case": "worst_fit, slack 0", "gpu_seconds": 10.0, "saved_by_mell": -0.25}
    _, _, answer = render_plan(found).split("\n\n")
    assert "Ray Serve's autoscaler: one setting or more keeps the level, with " in answer
    assert "KV utilisation: no setting keeps the level; no setting has both p99 of Mell." in answer
    assert "Mell takes 25% more GPU-seconds at equal or better p99." in answer
    worst["at_equal_service"]["saved_by_mell"] = 0.001
    assert "Mell takes about as many GPU-seconds at equal or better p99." in render_plan(found)


def test_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(*EASY)

    def instead(order: Any, quiet: bool) -> dict[str, Any]:
        return found

    monkeypatch.setattr("simulator.planning.report.plan", instead)
    picture, document = tmp_path / "plan.png", tmp_path / "plan.json"
    assert main([*SMALL, *EASY, "--picture", str(picture), "--json", str(document)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(document.read_text()) == found
    assert capsys.readouterr().out == render_plan(found) + "\n"


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ((), "A plan needs a service level"),
        (("--ttft-p99", "2", "--costs", "ideal"), "A service level needs --costs with the times of decoding"),
        (("--ttft-p99", "2", "--picture", "/nowhere/plan.png"), "/nowhere/plan.png cannot be written"),
        (("--ttft-p99", "2", "--start", "1e6"), "No request arrives after 1e+06 s"),
    ],
)
def test_bad_input_is_one_sentence(argv: Sequence[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *argv]) == 2
    assert problem in capsys.readouterr().err


def test_the_example_matches_its_script() -> None:
    assert EXAMPLE.read_text().split() == lines()
