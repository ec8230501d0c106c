"""A Mell that is started as a user does it, and its leftovers once it has ended."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from deployments.processes.ending import GUARD
from deployments.processes.forkserver import FORK_SERVER
from deployments.processes.table import ProcessEntry, ProcessIdentity, command_line, descendants, entry_of, running
from tests.integration.conftest import ROOT

WITHIN_S = 15.0
LAUNCHER, SERVE_RUN = "make serve", "serve run"
COMMANDS = {
    LAUNCHER: [sys.executable, "-m", "app.serve", "--with-parent"],
    SERVE_RUN: [str(Path(sys.executable).parent / "serve"), "run"],
}
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

    def close(self) -> None:
        """Nothing of it is left."""
        left = Left(self)
        self.process.kill()
        left.clear()
        self.process.wait()

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
