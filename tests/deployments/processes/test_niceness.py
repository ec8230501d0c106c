"""Serving processes have the niceness of what started them, and not that of Ray's tasks."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from deployments.processes.niceness import take_niceness_of_parent
from tests.niceness import lowers_niceness

_CHILD = """
import os, threading
os.setpriority(os.PRIO_PROCESS, 0, 15)
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("started", flush=True)
threading.Event().wait()
"""
"""A process with two threads of niceness 15."""


@pytest.fixture
def child() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", _CHILD], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield process.pid
        process.kill()


def _niceness(process: int) -> list[int]:
    return [os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir(f"/proc/{process}/task")]


@lowers_niceness
def test_all_threads_of_a_process_and_its_children_have_the_parents_niceness(child: int) -> None:
    assert _niceness(child) == [15, 15]
    take_niceness_of_parent([child])
    parents = os.getpriority(os.PRIO_PROCESS, os.getppid())
    assert set(_niceness(child)) == set(_niceness(os.getpid())) == {parents}


def test_without_the_right_niceness_stays_and_the_log_has_the_remedy(
    child: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(kind: int, process: int, niceness: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    with caplog.at_level(logging.WARNING, "ray.serve"):
        take_niceness_of_parent([child])
    assert _niceness(child) == [15, 15] and "RAY_worker_niceness=" in caplog.text


def test_a_process_that_has_ended_is_no_error(child: int) -> None:
    os.kill(child, 9)
    os.waitpid(child, 0)
    take_niceness_of_parent([child])
