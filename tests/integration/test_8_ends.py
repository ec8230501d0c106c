"""Nothing outlives its owner: what is left of a Mell that was ended in one way or another.

`test_8_wheel` has one that ends by SIGTERM. MELL_TEST_LONG adds all of these.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deployments.processes.forkserver import FORK_SERVER
from deployments.processes.guard import ORPHAN_S
from deployments.processes.table import (
    ProcessEntry,
    ProcessIdentity,
    command_line,
    descendants,
    is_running,
    running,
)
from tests.counts import LONG_ONLY
from tests.integration.conftest import ROOT, START_LIMIT_S, Stage, free_port
from tests.integration.runs import (
    AGENTS,
    COMMANDS,
    ENVIRONMENT,
    LAUNCHER,
    SERVE_RUN,
    WITHIN_S,
    Left,
    Run,
    answers,
    called,
    wait_until,
)

pytestmark = LONG_ONLY

REPEATS = range(5)
KEY = {"Authorization": "Bearer secret"}

Start = Callable[[Callable[[Path, str], Run], str], Run]


@pytest.fixture
def start(tmp_path: Path, stage: Stage) -> Iterator[Start]:
    """Starts a run, where nothing else runs."""
    stage.clear()
    runs: list[Run] = []

    def started(make: Callable[[Path, str], Run], command: str) -> Run:
        runs.append(make(tmp_path, command))
        return runs[-1]

    yield started
    for run in runs:
        run.close()


def configured(folder: Path, command: str, **args: Any) -> Run:
    """A run of the shipped configuration, but for some arguments."""
    config = yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())
    settings = config["applications"][0]["args"] | args
    config["applications"][0]["args"] = settings | {"ingress": {"port": (port := free_port())}}
    path = folder / "serve_config.yaml"
    path.write_text(yaml.safe_dump(config))
    return Run([*COMMANDS[command], str(path)], port, folder)


def one_engine(folder: Path, command: str) -> Run:
    config = {"num_cpus": 0.1, "autoscaling_config": {"min_replicas": 1, "max_replicas": 1}}
    return configured(folder, command, deployment_config=config)


def with_standby(folder: Path, command: str) -> Run:
    config = {"num_cpus": 0.1, "autoscaling_config": {"min_replicas": 1, "max_replicas": 1}, "standby": True}
    return configured(folder, command, deployment_config=config)


def paced_engines(folder: Path, command: str) -> Run:
    settings = {"num_gpu_blocks_override": 256, "block_size": 16, "max_model_len": 4000, "startup_s": 0.5}
    config = {"num_cpus": 0.05, "autoscaling_config": {"min_replicas": 2, "max_replicas": 2}}
    return configured(
        folder, command, engine="paced", engine_kwargs=settings | {"decode_s": 0.02}, deployment_config=config
    )


class Stream(threading.Thread):
    """A completion that takes a few seconds."""

    def __init__(self, url: str, tokens: int, model: str = "mell-tiny") -> None:
        super().__init__()
        self._url = url
        self._body = {"model": model, "prompt": [5, 6, 7], "max_tokens": tokens, "stream": True}
        self.began = threading.Event()
        self.lines: list[str] = []

    def run(self) -> None:
        body = self._body | {"ignore_eos": True, "temperature": 0}
        with httpx.stream(
            "POST", f"{self._url}/v1/completions", json=body, headers=KEY, timeout=60, trust_env=False
        ) as response:
            for line in filter(None, response.iter_lines()):
                self.lines.append(line)
                self.began.set()

    @property
    def whole(self) -> bool:
        reasons = [json.loads(line[6:])["choices"][0]["finish_reason"] for line in self.lines[:-1] if "choices" in line]
        return "length" in reasons and self.lines[-1] == "data: [DONE]"


def ends_on_sigterm(run: Run, stream: Stream) -> None:
    """SIGTERM to the run's process group lets a stream end, and ends all processes."""
    assert run.has("VLLM::Worker")
    left = Left(run)
    assert left.memory()
    stream.start()
    assert stream.began.wait(30)
    run.signal_group(signal.SIGTERM)
    assert run.process.wait(60) == 0
    assert left.nothing()
    stream.join()
    assert stream.whole, stream.lines[-3:]
    assert not [word for word in ("Aborted", "SIGTERM received", "Traceback", "PC: @") if word in run.output]


@pytest.mark.parametrize("attempt", REPEATS)
def test_sigterm_to_the_group_of_make_serve_drains_and_ends_all(start: Start, attempt: int) -> None:
    run = start(one_engine, LAUNCHER)
    wait_until(run.healthy, START_LIMIT_S)
    ends_on_sigterm(run, Stream(run.url, 600))


@pytest.mark.parametrize("attempt", REPEATS)
@pytest.mark.parametrize(
    ("command", "end"),
    [
        pytest.param(command, end, id=name)
        for command, end, name in (
            (SERVE_RUN, lambda run: run.signal_group(signal.SIGTERM), "serve run, SIGTERM to the group"),
            (SERVE_RUN, lambda run: run.process.kill(), "serve run, killed"),
            (SERVE_RUN, lambda run: run.kill("raylet/raylet", "serve run"), "serve run, killed after its raylet"),
            (SERVE_RUN, lambda run: run.kill("ServeRepli", "serve run"), "serve run, killed after its replicas"),
            (LAUNCHER, lambda run: run.kill("bin/serve run"), "make serve, serve run is killed"),
            (LAUNCHER, lambda run: run.kill("raylet/raylet"), "make serve, the raylet is killed"),
            (LAUNCHER, lambda run: run.process.kill(), "make serve, killed"),
            (LAUNCHER, lambda run: run.kill("processes.keeper"), "make serve, keeper is killed"),
            (LAUNCHER, lambda run: run.signal_group(signal.SIGKILL), "make serve, SIGKILL to the group"),
        )
    ],
)
def test_nothing_is_left(start: Start, command: str, end: Callable[[Run], None], attempt: int) -> None:
    run = start(one_engine, command)
    wait_until(run.healthy, START_LIMIT_S)
    left = Left(run)
    assert left.memory()
    end(run)
    run.process.wait(WITHIN_S)
    left.wait(except_for=AGENTS if command == SERVE_RUN else ())


@pytest.mark.parametrize("after_s", [0.0, 1.0, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("command", [SERVE_RUN, LAUNCHER])
def test_an_engine_that_starts_ends_too(start: Start, command: str, after_s: float) -> None:
    run = start(one_engine, command)
    wait_until(lambda: run.has(FORK_SERVER) or run.has("VLLM::"), START_LIMIT_S)
    time.sleep(after_s)
    left = Left(run)
    run.signal_group(signal.SIGKILL)
    run.process.wait()
    left.wait()


@pytest.mark.parametrize("attempt", REPEATS)
def test_engine_ends_with_its_replica_and_another_starts(start: Start, attempt: int) -> None:
    """Worker and engine core are stopped: they notice nothing."""
    run = start(one_engine, LAUNCHER)
    wait_until(run.healthy, START_LIMIT_S)
    (replica,) = run.replicas()
    old: list[ProcessIdentity] = [entry.identity for entry in descendants(replica["pids"][0])]
    for pid in replica["pids"][1:]:
        os.kill(pid, signal.SIGSTOP)
    os.kill(replica["pids"][0], signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, old)), WITHIN_S)
    wait_until(run.healthy, START_LIMIT_S)
    left = Left(run)
    run.signal_group(signal.SIGINT)
    assert run.process.wait(60) == 0
    assert left.nothing()


def test_a_standby_becomes_the_next_replica_and_ends_with_the_rest(start: Start) -> None:
    run = start(with_standby, LAUNCHER)
    wait_until(run.healthy, START_LIMIT_S)
    (first,) = run.replicas()
    wait_until(lambda: run.standby() is not None, START_LIMIT_S)
    standby = run.standby()
    assert standby is not None
    os.kill(first["pids"][0], signal.SIGKILL)
    wait_until(lambda: any(r["id"] != first["id"] and r["pids"] for r in run.replicas()), START_LIMIT_S)
    (second,) = [r for r in run.replicas() if r["id"] != first["id"]]
    assert second["pids"][0] == standby.pid
    wait_until(lambda: run.standby() not in (None, standby), START_LIMIT_S)
    left = Left(run)
    run.signal_group(signal.SIGINT)
    assert run.process.wait(60) == 0
    left.wait()


@pytest.fixture
def standing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[ProcessEntry]]]:
    """The processes with a name of a cluster that was there before, and will be when the command has ended."""
    stage.clear()
    port = free_port()
    # Sockets want a short path. Ray leaves the cluster's address in its folder, and every later start would join that.
    folder = tempfile.mkdtemp(prefix="ray")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    command = ["ray", "start", "--head", f"--port={port}", "--num-cpus=4", "--include-dashboard=false"]
    subprocess.run(command, env=os.environ | ENVIRONMENT, check=True, stdout=subprocess.DEVNULL, timeout=60)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")

    def named(name: str) -> list[ProcessEntry]:
        roots = [e for e in running() if str(port) in (line := command_line(e.pid)) and "/ray/" in line]
        return [e for root in roots for e in (root, *descendants(root.pid)) if called(e, name)]

    yield named
    for entry in named(""):
        with contextlib.suppress(ProcessLookupError):
            os.kill(entry.pid, signal.SIGKILL)
    shutil.rmtree(folder)


def test_on_a_standing_cluster_the_application_outlives_its_command(
    start: Start, standing: Callable[[str], list[ProcessEntry]]
) -> None:
    def goes_on() -> bool:
        time.sleep(ORPHAN_S + 1.0)
        return answers(run.url)

    run = start(paced_engines, LAUNCHER)
    wait_until(run.healthy, START_LIMIT_S)
    run.signal_group(signal.SIGTERM)
    assert run.process.wait(WITHIN_S) == 0
    assert goes_on()
    (gcs,) = [entry for entry in standing("gcs_server") if entry.name == "gcs_server"]
    replicas = [entry.identity for entry in standing("ServeRepli")]
    os.kill(gcs.pid, signal.SIGSTOP)
    assert goes_on()
    os.kill(gcs.pid, signal.SIGCONT)
    assert goes_on()
    assert [entry.identity for entry in standing("ServeRepli")] == replicas
    run.start()
    wait_until(lambda: "Submitted" in run.output, START_LIMIT_S)
    run.signal_group(signal.SIGKILL)
    run.process.wait()
    assert goes_on()
    assert [entry.identity for entry in standing("ServeRepli")] == replicas
