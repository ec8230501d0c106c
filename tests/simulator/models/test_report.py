"""`mell plan --models`: the whole command, and its errors."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from policies.model import RequestId, Tokens
from simulator.__main__ import main as simulate
from simulator.models.picture import memory_samples
from simulator.planning.__main__ import main
from simulator.workload.workload import Job
from tests.simulator.models.small import options, small_plan, write_models, write_trace

ROWS = [(0.0, "a"), (30.0, "b"), (60.0, "c"), (90.0, "a"), (300.0, "b")]


@pytest.mark.slow
def test_a_plan_has_every_contender_and_every_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, models = write_trace(tmp_path, ROWS), write_models(tmp_path, {"a": {}, "b": {}, "c": {"weight": 2.0}})
    assert main(options(trace, models, "--ttft-p99", "2", "--json", str(tmp_path / "plan.json"))) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    found = {row["contender"]: row for row in plan["contenders"]}
    assert (found["a GPU per model"]["gpus_mean"], found["static shares"]["gpus_mean"]) == (3.0, 2.0)
    assert (found["Mell"]["gpus_mean"], found["Mell"]["kept"], found["Mell"]["starts"]) == (1.0, True, 0)
    assert {name: model["requests"] for name, model in found["Mell"]["models"].items()} == {"a": 2, "b": 2, "c": 1}
    assert not plan["impossible"]
    text = capsys.readouterr().out
    assert "5 requests for 3 models" in text and "Mell takes 3.00 times fewer GPU-seconds than a GPU per model." in text


@pytest.mark.slow
def test_a_level_of_its_own_counts_for_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, models = write_trace(tmp_path, ROWS), write_models(tmp_path, {name: {"ttft_p99_s": 0.5} for name in "abc"})
    assert main(options(trace, models, "--json", str(tmp_path / "plan.json"))) == 0
    (mell,) = [
        each for each in json.loads((tmp_path / "plan.json").read_text())["contenders"] if each["name"][0] == "M"
    ]
    assert not mell["kept"] and mell["whole"]["late"] == 3, "the first request of each model wakes it"
    assert "Mell misses the level" in capsys.readouterr().out


@pytest.mark.slow
def test_a_picture_has_the_memory_of_every_device(tmp_path: Path) -> None:
    trace, models = write_trace(tmp_path, ROWS), write_models(tmp_path, {"a": {}, "b": {}, "c": {}})
    picture = tmp_path / "memory.svg"
    assert main(options(trace, models, "--ttft-p99", "2", "--picture", str(picture))) == 0
    assert picture.read_bytes().count(b'id="axes_') == 2, "what arrives, and one device"


def test_samples_follow_the_division_within_the_budget(tmp_path: Path) -> None:
    plan = small_plan(tmp_path, {"a": (Job(RequestId("a"), 50.0, Tokens(100), Tokens(100)),), "b": ()})
    samples = memory_samples(plan, devices=1, homes=1)
    assert all(sum(each.kv + each.rest for each in sample.held) <= plan.budget for sample in samples)
    awake = [{each.pool for each in sample.held if each.kv} for sample in samples]
    assert awake[0] == set() and awake[-1] == {"a"} and samples[1].at_s >= 50.0


@pytest.mark.parametrize(
    ("models", "top", "others", "message"),
    [
        ({"a": {}, "b": {"name": "a"}}, {}, [], "there are several with the name a"),
        ({"a": {"weight": 0}}, {}, [], "models.0.weight: Input should be greater than 0"),
        ({"a": {"weigth": 1}}, {}, [], "models.0.weigth"),
        ({"a": {}}, {"budget_mib": 10}, [], r"a needs 10 MiB at its floor .* more than budget_mib 10"),
        (
            {name: {"min_replicas": 1} for name in "abc"},
            {},
            ["--max-gpus", "1"],
            "The floors of all min_replicas are 30 MiB in all, more than 1 devices of 25 MiB have: 25 MiB",
        ),
        ({"a": {"min_replicas": 2, "max_replicas": 1}}, {}, [], "a: max_replicas 1 is below min_replicas 2"),
        ({"a": {"asleep_mib": 20}}, {}, [], "a: asleep_mib is more than it needs awake"),
        ({"a": {"costs": "ideal"}}, {}, [], "a: the costs ideal have no step times"),
        ({"a": {}}, {}, [], "requests for b, which is no model in"),
        ({"a": {}, "b": {}, "c": {}}, {}, ["--costs", "ideal"], "--costs does not go with --models"),
        ({"a": {}, "b": {}, "c": {}}, {}, ["--max-gpus", "0"], "must be 1 or more"),
        ({"a": {}, "b": {}, "c": {}}, {}, ["--picture", "/nowhere/a.svg"], "/nowhere/a.svg cannot be written"),
        (
            {name: {} for name in "abcdefghijk"},
            {},
            ["--picture", "p.svg"],
            "colours for 10 models, and the plan has 11",
        ),
    ],
)
def test_bad_input_is_one_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    models: dict[str, Any],
    top: dict[str, Any],
    others: list[str],
    message: str,
) -> None:
    file = write_models(tmp_path, models, **top)
    assert main(options(write_trace(tmp_path, ROWS), file, "--ttft-p99", "2", *others)) == 2
    assert re.search(message, capsys.readouterr().err)


def test_models_without_a_level_and_requests_without_a_model_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = write_models(tmp_path, {"a": {}, "b": {}, "c": {}})
    assert main(options(write_trace(tmp_path, ROWS), models)) == 2
    assert "a has no level" in capsys.readouterr().err
    assert main(options(write_trace(tmp_path, [(0.0, "")]), models, "--ttft-p99", "2")) == 2
    assert "a request without a model" in capsys.readouterr().err
    assert main(options(write_trace(tmp_path, ROWS), tmp_path / "none.yaml", "--ttft-p99", "2")) == 2
    assert "Cannot read the models" in capsys.readouterr().err
    assert simulate(["--trace", *options(write_trace(tmp_path, ROWS), models)]) == 2
    assert "--models FILE needs --plan" in capsys.readouterr().err
