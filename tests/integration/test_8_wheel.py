"""Mell from its wheel, in a folder with an `app.py` of the user's: `serve run`, an answer, and nothing left.

MELL_TEST_LONG adds real engines, and a move between them.
"""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy.wheel_backend import NAME, PACKAGES
from deployments.processes.ending import GUARD
from deployments.processes.table import command_line, running
from tests.counts import LONG_ONLY
from tests.integration.conftest import ROOT, START_LIMIT_S, Stage, free_port
from tests.integration.runs import Left, Run, wait_until
from tests.packaging.environments import add_everything, build_wheel, install

PACED = {
    "engine": "paced",
    "engine_kwargs": {"num_gpu_blocks_override": 256, "block_size": 16, "max_model_len": 4000, "decode_s": 0.02},
    "deployment_config": {"num_cpus": 0.05, "autoscaling_config": {"min_replicas": 2, "max_replicas": 2}},
}
REAL = {
    "engine_kwargs": {"max_model_len": 1024, "max_num_seqs": 8, "num_gpu_blocks_override": 128},
    "deployment_config": {"num_cpus": 0.1, "autoscaling_config": {"min_replicas": 2, "max_replicas": 2}},
}
BODY = {"model": "mell-tiny", "prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True}

Serve = Callable[[dict[str, Any]], Run]


@pytest.fixture
def serve(tmp_path: Path, stage: Stage) -> Iterator[Serve]:
    """Starts Mell by `serve run` from an environment with the wheel, in a folder with modules of the tree's names."""
    stage.clear()
    programs = install(build_wheel(tmp_path), tmp_path / "venv")
    add_everything(programs)
    (folder := tmp_path / "user").mkdir()
    for name in PACKAGES:
        (folder / f"{name}.py").write_text(f"raise SystemExit('the wrong {name}')\n")
    runs: list[Run] = []

    def started(args: dict[str, Any]) -> Run:
        config = yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())
        (application,) = config["applications"]
        assert application["import_path"] == "mell:build_app"
        application["args"] |= {**args, "ingress": {"port": (port := free_port())}}
        (folder / "serve_config.yaml").write_text(yaml.safe_dump(config))
        environment = {"PYTHONPATH": "", "PATH": f"{programs}:/usr/bin:/bin", "VIRTUAL_ENV": str(programs.parent)}
        runs.append(Run([str(programs / "serve"), "run", "serve_config.yaml"], port, tmp_path, folder, environment))
        wait_until(runs[0].healthy, START_LIMIT_S, lambda: runs[0].output[-4000:])
        return runs[0]

    yield started
    for run in runs:
        run.close()


def ends(run: Run) -> None:
    """Ctrl-C ends everything that was started."""
    left = Left(run)
    run.signal_group(signal.SIGINT)
    run.process.wait(60)
    left.wait()


def test_an_application_answers_from_a_folder_with_modules_of_the_same_names(serve: Serve) -> None:
    run = serve(PACED)
    answer = httpx.post(f"{run.url}/v1/completions", json=BODY | {"max_tokens": 8}, timeout=60, trust_env=False)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8, answer.text
    page = httpx.get(f"{run.url}/mell/", timeout=60, trust_env=False)
    assert page.status_code == 200 and "<html" in page.text
    guards = [line for entry in running() if GUARD in (line := command_line(entry.pid))]
    assert guards and all(f" {NAME}.{GUARD} " in line for line in guards), guards
    ends(run)


@LONG_ONLY
def test_requests_of_real_engines_move(serve: Serve) -> None:
    run = serve(REAL)
    body = BODY | {"max_tokens": 600, "stream": True}
    with (
        httpx.Client(base_url=run.url, timeout=120, trust_env=False) as client,
        client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "moved"}) as stream,
    ):
        lines = filter(None, stream.iter_lines())
        next(lines)
        order = client.post("/mell/migrations", json={"request_id": "moved", "path": "kv"})
        assert order.status_code == 202, order.text
        assert list(lines)[-1] == "data: [DONE]"
        (record,) = client.get("/mell/migrations").json()["migrations"]
    assert (record["outcome"], record["path"]) == ("committed", "kv"), record
    ends(run)
