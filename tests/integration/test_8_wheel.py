"""Mell from its wheel, in a folder with modules of the user's that have the names of the tree's packages.

MELL_TEST_LONG adds a file, served by `serve run`, and a move between real engines.
"""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from app.tinymodel import ensure_tiny_model
from deploy.wheel_backend import NAME, PACKAGES
from deployments.processes.ending import GUARD
from deployments.processes.table import command_line, running
from tests.counts import LONG_ONLY
from tests.integration.conftest import ROOT, START_LIMIT_S, Stage, free_port
from tests.integration.runs import Left, Run, wait_until
from tests.integration.test_8_ends import KEY, Stream, ends_on_sigterm
from tests.packaging.environments import add_everything, build_wheel, install

PACED = {
    "engine": "paced",
    "engine_kwargs": {"num_gpu_blocks_override": 256, "block_size": 16, "max_model_len": 4000, "decode_s": 0.02},
    "deployment_config": {"num_cpus": 0.05, "autoscaling_config": {"min_replicas": 2, "max_replicas": 2}},
}
FLAGS = (
    "--max_model_len 700 --num-gpu-blocks-override 64 --max-num-seqs 4 --uvicorn-log-level warning "
    "--fingerprint-mode custom --fingerprint-value mine"
)
TWO = "--max-model-len 1024 --max-num-seqs 8 --num-gpu-blocks-override 128 --min-replicas 2 --max-replicas 2"
BODY = {"prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True}

Start = Callable[..., Run]


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """The user's folder."""
    (folder := tmp_path / "user").mkdir()
    for name in PACKAGES:
        (folder / f"{name}.py").write_text(f"raise SystemExit('the wrong {name}')\n")
    return folder


@pytest.fixture
def start(tmp_path: Path, user: Path, stage: Stage) -> Iterator[Start]:
    """Starts Mell at a port by a command of an environment that has the wheel."""
    stage.clear()
    programs = install(build_wheel(tmp_path), tmp_path / "venv")
    add_everything(programs)
    runs: list[Run] = []

    def started(port: int, command: list[str], **more: str) -> Run:
        program, *options = command
        environment = {"PYTHONPATH": "", "PATH": f"{programs}:/usr/bin:/bin", "VIRTUAL_ENV": str(programs.parent)}
        runs.append(run := Run([str(programs / program), *options], port, tmp_path, user, environment | more))
        wait_until(run.healthy, START_LIMIT_S, lambda: run.output[-4000:])
        guards = [line for entry in running() if GUARD in (line := command_line(entry.pid))]
        assert guards and all(f" {NAME}.{GUARD} " in line for line in guards), guards
        return run

    yield started
    for run in runs:
        run.close()


def ends(run: Run) -> None:
    """Ctrl-C ends everything that was started."""
    left = Left(run)
    run.signal_group(signal.SIGINT)
    run.process.wait(60)
    left.wait()


def test_a_model_is_served_by_the_flags_of_vllm_until_sigterm(start: Start, user: Path) -> None:
    """`mell serve` becomes the launcher of `make serve`."""
    (user / "model").symlink_to(ensure_tiny_model())
    command = ["mell", "serve", "./model", *FLAGS.split(), "--port", str(port := free_port())]
    run = start(port, command, VLLM_API_KEY="secret")
    body = {"model": "./model", "prompt": "Blocks move", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with httpx.Client(base_url=run.url, trust_env=False, timeout=60) as client:
        answer = client.post("/v1/completions", json=body, headers=KEY)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8
        assert answer.json()["system_fingerprint"] == "mine"
        too_long = client.post("/v1/completions", json=body | {"max_tokens": 800}, headers=KEY)
        assert too_long.status_code == 400 and "700" in too_long.text
        (replica,) = client.get("/mell/state").json()["replicas"]
        assert replica["capacity_tokens"] == 63 * 32
        assert client.post("/v1/completions", json=body).status_code == 401
    ends_on_sigterm(run, Stream(run.url, 600, "./model"))
    assert "--uvicorn-log-level has no effect" in run.output and "secret" not in run.output


@LONG_ONLY
def test_a_file_is_served(start: Start, user: Path) -> None:
    config = yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())
    (application,) = config["applications"]
    assert application["import_path"] == "mell:build_app"
    application["args"] |= {**PACED, "ingress": {"port": (port := free_port())}}
    (user / "serve_config.yaml").write_text(yaml.safe_dump(config))
    run = start(port, ["serve", "run", "serve_config.yaml"])
    answer = httpx.post(f"{run.url}/v1/completions", json=BODY | {"max_tokens": 8}, timeout=60, trust_env=False)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8, answer.text
    page = httpx.get(f"{run.url}/mell/", timeout=60, trust_env=False)
    assert page.status_code == 200 and "<html" in page.text
    ends(run)


@LONG_ONLY
def test_a_model_is_served_and_its_requests_move(start: Start, user: Path) -> None:
    (user / "model").symlink_to(ensure_tiny_model())
    run = start(port := free_port(), ["mell", "serve", "./model", *TWO.split(), "--port", str(port)])
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
