"""Nothing outlives its owner: what is left of a Mell that was ended in one way or another.

MELL_TEST_LONG adds ways, a standby and a standing cluster, and repeats each.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from app.tinymodel import ensure_tiny_model
from deployments.processes.ending import GUARD
from deployments.processes.forkserver import FORK_SERVER
from deployments.processes.guard import ORPHAN_S
from deployments.processes.table import (
    ProcessEntry,
    ProcessIdentity,
    command_line,
    descendants,
    entry_of,
    is_running,
    running,
)
from tests.counts import LONG
from tests.integration.conftest import ROOT, START_LIMIT_S, Stage, free_port

WITHIN_S = 15.0
REPEATS = range(5 if LONG else 1)
LAUNCHER, SERVE_RUN, MELL_SERVE = "make serve", "serve run", "mell serve"
COMMANDS = {
    LAUNCHER: [sys.executable, "-m", "app.serve", "--with-parent"],
    SERVE_RUN: [str(Path(sys.executable).parent / "serve"), "run"],
    MELL_SERVE: [sys.executable, "-P", "-m", "app.cli", "serve"],
}
FLAGS = (
    "--max_model_len 700 --num-gpu-blocks-override 64 --max-num-seqs 4 --uvicorn-log-level warning "
    "--fingerprint-mode custom --fingerprint-value mine"
)
KEY = {"Authorization": "Bearer secret"}
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Ray's agents, which first report the death of their raylet: they give up after a minute if the GCS is dead, too."""
ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
}


class Run:
    """A Mell that is started as a user does it, in a process group of its own."""

    def __init__(
        self, command: Sequence[str], port: int, folder: Path, cwd: Path = ROOT, environment: Mapping[str, str] = {}
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command, self._log, self._cwd = command, folder / "serve.log", cwd
        self._environment = {**os.environ, **ENVIRONMENT, **environment}
        self.start()

    def start(self) -> None:
        with self._log.open("w") as output:
            self.process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._cwd,
                process_group=0,
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def healthy(self) -> bool:
        assert self.process.poll() is None, self.output
        return answers(self.url)

    def replicas(self) -> list[dict[str, Any]]:
        """The engine replicas in its state."""
        state: dict[str, Any] = httpx.get(f"{self.url}/mell/state", trust_env=False).json()
        return list(state["replicas"])

    def standby(self) -> ProcessIdentity | None:
        """Its idle Ray worker with a fork server, if there is one."""
        idle = {entry.pid: entry.identity for entry in self.below() if command_line(entry.pid).startswith("ray::IDLE")}
        servers = (entry for entry in self.below() if FORK_SERVER in command_line(entry.pid))
        return next((idle[entry.parent] for entry in servers if entry.parent in idle), None)

    def signal_group(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def below(self) -> list[ProcessEntry]:
        """All that was started and has not lost its parent."""
        return descendants(self.process.pid)

    def has(self, name: str) -> bool:
        return any(called(entry, name) for entry in self.below())

    def kill(self, *names: str) -> None:
        """SIGKILL to those of its processes, as quickly as can be."""
        itself = filter(None, [entry_of(self.process.pid)])
        below = [*self.below(), *itself]
        for entry in [e for name in names for e in below if called(e, name)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(entry.pid, signal.SIGKILL)


class Left:
    """The leftovers of a run since this was made: processes, also those in the same process groups, and memory."""

    def __init__(self, run: Run) -> None:
        below = run.below()
        guards = (
            entry for entry in running() if any(f"{GUARD} {e.identity} " in command_line(entry.pid) for e in below)
        )
        self._processes = {entry.identity for entry in (*below, *guards)}
        self._groups = {entry.pid for entry in below if entry.pid == entry.group} | {run.process.pid}
        maps = [line for entry in below for line in mappings(entry.pid)]
        self._memory = {Path(line.split(maxsplit=5)[5]) for line in maps if " /dev/shm/" in line}

    def processes(self) -> list[ProcessEntry]:
        return [e for e in running() if e.identity in self._processes or e.group in self._groups]

    def nothing(self, except_for: Sequence[str] = ()) -> bool:
        return not self.memory() and all(command_line(e.pid).strip() in except_for for e in self.processes())

    def memory(self) -> list[Path]:
        return [path for path in self._memory if path.exists()]

    def clear(self) -> None:
        for entry in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(entry.pid, signal.SIGKILL)

    def wait(self, except_for: Sequence[str] = ()) -> None:
        try:
            wait_until(
                lambda: self.nothing(except_for),
                WITHIN_S,
                lambda: (list(map(shown, self.processes())), self.memory()),
            )
        finally:
            self.clear()


def mappings(pid: int) -> list[str]:
    """The lines of a process's memory map; none if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/maps").read_text().splitlines()
    return []


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=2, trust_env=False).status_code == 200
    return False


def called(entry: ProcessEntry, name: str) -> bool:
    return name in entry.name or name in command_line(entry.pid)


def shown(entry: ProcessEntry) -> str:
    return f"{entry.pid} {command_line(entry.pid)[:80]}"


def wait_until(condition: Callable[[], bool], within_s: float, about: Callable[[], object] = str) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, about()
        time.sleep(0.1)


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
        left = Left(run)
        run.process.kill()
        left.clear()
        run.process.wait()


def configured(folder: Path, command: str, **args: Any) -> Run:
    """A run of the shipped configuration, but for some arguments."""
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
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


def by_flags(folder: Path, command: str) -> Run:
    """One engine with the model in a folder beside the user, a key, and vLLM's flags."""
    (folder / "model").symlink_to(ensure_tiny_model())
    line = [*COMMANDS[command], "./model", *FLAGS.split(), "--port", str(port := free_port())]
    return Run(line, port, folder, cwd=folder, environment={"VLLM_API_KEY": "secret"})


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


def test_a_model_is_served_by_the_flags_of_vllm_until_sigterm(start: Start) -> None:
    """`mell serve` becomes the launcher of `make serve`."""
    run = start(by_flags, MELL_SERVE)
    wait_until(run.healthy, START_LIMIT_S)
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


@pytest.mark.skipif(not LONG, reason="MELL_TEST_LONG adds it")
@pytest.mark.parametrize("attempt", REPEATS)
def test_sigterm_to_the_group_of_make_serve_drains_and_ends_all(start: Start, attempt: int) -> None:
    run = start(one_engine, LAUNCHER)
    wait_until(run.healthy, START_LIMIT_S)
    ends_on_sigterm(run, Stream(run.url, 600))


@pytest.mark.parametrize("attempt", REPEATS)
@pytest.mark.parametrize(
    ("command", "end"),
    [
        pytest.param(SERVE_RUN, lambda run: run.signal_group(signal.SIGTERM), id="serve run, SIGTERM to the group"),
        *[
            pytest.param(command, end, id=name, marks=pytest.mark.skipif(not LONG, reason="MELL_TEST_LONG adds it"))
            for command, end, name in (
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


@pytest.mark.parametrize("after_s", [0.0, 1.0, 2.0, 4.0, 8.0] if LONG else [4.0])
@pytest.mark.parametrize("command", [SERVE_RUN, LAUNCHER] if LONG else [SERVE_RUN])
def test_an_engine_that_starts_ends_too(start: Start, command: str, after_s: float) -> None:
    run = start(one_engine, command)
    wait_until(lambda: run.has(FORK_SERVER) or run.has("VLLM::"), START_LIMIT_S)
    time.sleep(after_s)
    left = Left(run)
    run.signal_group(signal.SIGKILL)
    run.process.wait()
    left.wait()


@pytest.mark.skipif(not LONG, reason="MELL_TEST_LONG adds it")
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


@pytest.mark.skipif(not LONG, reason="MELL_TEST_LONG adds it")
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


@pytest.mark.skipif(not LONG, reason="MELL_TEST_LONG adds it")
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
