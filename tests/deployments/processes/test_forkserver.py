"""Processes of the `spawn` context, forked off a fork server that runs for real."""

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from deployments.processes import forkserver
from deployments.processes.forkserver import start_fork_server
from deployments.processes.table import entry_of, identity_of, is_running
from tests.deployments.processes.test_guard import wait_until

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> "Iterator[subprocess.Popen[bytes]]":
    """A fork server of this process that has imported `decimal`."""
    monkeypatch.setattr(forkserver, "_access", None)
    monkeypatch.setattr(SPAWN, "Process", SPAWN.Process)
    started = start_fork_server(["decimal"])
    yield started
    stop(started)


def stop(server: "subprocess.Popen[bytes]") -> int:
    """Close the connections to this process's present fork server and to `server`; the exit status of that."""
    if forkserver._access is not None:
        forkserver._access.socket.close()
    assert server.stdin is not None
    server.stdin.close()
    return server.wait(10)


def describe(pipe: Connection) -> None:
    """The target of the forks: send what this process is, then wait for the answer to end with it."""
    pipe.send(
        {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "starter": getattr(multiprocessing.parent_process(), "pid", None),
            "name": multiprocessing.current_process().name,
            "imported": "decimal" in sys.modules,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "group": os.getpgrp(),
            "threads": threading.active_count(),
        }
    )
    sys.exit(pipe.recv())


def rename(pipe: Connection) -> None:
    """Take a title as engine processes do, and send what others see of it."""
    importlib.import_module("setproctitle").setproctitle("A::Title")
    pipe.send(
        {"name": Path("/proc/self/comm").read_text().strip(), "command": Path("/proc/self/cmdline").read_text()[:8]}
    )
    sys.exit(pipe.recv())


def nest(pipe: Connection) -> None:
    """Start `describe` from a fork, and exit as it does."""
    process = multiprocessing.get_context("spawn").Process(target=describe, args=(pipe,))
    process.start()
    process.join()
    sys.exit(process.exitcode)


def start(target: Any = describe) -> tuple[Any, Connection, dict[str, Any]]:
    """A started process, the pipe to it, and what it says of itself."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(theirs,), name="the fork")
    process.start()
    theirs.close()
    return process, ours, ours.recv()


def end(process: Any, pipe: Connection, status: int = 0) -> int | None:
    """End the process with this status; its status as its starter sees it."""
    pipe.send(status)
    process.join(120)
    exitcode: int | None = process.exitcode
    return exitcode


def test_a_process_is_a_fork_with_the_imports_and_none_of_the_state(
    server: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("A_VARIABLE", "of the starter")
    monkeypatch.chdir(tmp_path)
    process, pipe, seen = start()
    assert seen["parent"] == server.pid
    assert seen["pid"] == process.pid
    assert seen["starter"] == os.getpid()
    assert seen["name"] == "the fork"
    assert seen["imported"]
    assert seen["environment"]["A_VARIABLE"] == "of the starter"
    assert seen["folder"] == str(tmp_path)
    assert seen["group"] == os.getpgrp()
    assert seen["threads"] == 1
    assert process.is_alive()
    assert end(process, pipe, 7) == 7


def test_a_fork_takes_a_title(server: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("setproctitle")
    monkeypatch.setenv("A_VARIABLE", "x" * 1000)
    process, pipe, seen = start(rename)
    assert seen == {"name": "A::Title", "command": "A::Title"}
    assert end(process, pipe) == 0


def test_a_fork_has_others_forked(server: "subprocess.Popen[bytes]") -> None:
    process, pipe, seen = start(nest)
    assert seen["parent"] == server.pid
    assert seen["starter"] == process.pid
    assert end(process, pipe, 5) == 5


@pytest.mark.slow
def test_forks_run_beside_each_other_and_end_on_their_own(server: "subprocess.Popen[bytes]") -> None:
    first, second = start(), start()
    assert end(first[0], first[1], 3) == 3
    assert second[0].is_alive()
    second[0].terminate()
    second[0].join(10)
    assert second[0].exitcode == -signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LD_LIBRARY_PATH", "OMP_PROC_BIND"])
def test_a_process_with_other_variables_of_native_libraries_is_spawned(
    name: str, server: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "false")
    process, pipe, seen = start()
    assert seen["parent"] == os.getpid()
    assert end(process, pipe) == 0


def test_another_number_of_threads_is_no_reason_to_spawn(
    server: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    process, pipe, seen = start()
    assert seen["parent"] == server.pid
    assert end(process, pipe) == 0


@pytest.mark.slow
def test_without_a_fork_server_processes_are_spawned_and_its_forks_count_as_ended(
    server: "subprocess.Popen[bytes]",
) -> None:
    process, pipe, _ = start()
    server.kill()
    server.wait(10)
    process.join(120)
    assert process.exitcode == 255
    os.kill(process.pid, signal.SIGKILL)
    process, pipe, seen = start()
    assert seen["parent"] == os.getpid()
    assert end(process, pipe) == 0


def test_a_failed_import_ends_the_fork_server_and_processes_are_spawned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forkserver, "_access", None)
    monkeypatch.setattr(SPAWN, "Process", SPAWN.Process)
    failing = start_fork_server(["no_such_module"])
    process, pipe, seen = start()
    assert seen["parent"] == os.getpid()
    assert end(process, pipe) == 0
    assert stop(failing) != 0


@pytest.mark.parametrize(("bad", "status"), [(True, 0), (False, None)])
def test_forks_that_could_not_use_cuda_are_not_made(
    bad: bool, status: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(
        "import types\n"
        f"cuda = types.SimpleNamespace(_is_in_bad_fork=lambda: {bad})\n"
        "def set_num_threads(number): pass\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(forkserver, "_access", None)
    monkeypatch.setattr(SPAWN, "Process", SPAWN.Process)
    server = start_fork_server(["torch"])
    process, pipe, seen = start()
    assert seen["parent"] == (os.getpid() if bad else server.pid)
    assert end(process, pipe) == 0
    assert server.poll() == status
    stop(server)


def test_the_fork_server_ends_with_its_starter_however_that_ends() -> None:
    starter = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time; from deployments.processes.forkserver import start_fork_server as start\n"
            "print(start(['decimal']).pid, flush=True); time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
    )
    assert starter.stdout is not None
    server = identity_of(int(starter.stdout.readline()))
    assert entry_of(server.pid) is not None
    starter.kill()
    starter.communicate()
    wait_until(lambda: not is_running(server))
