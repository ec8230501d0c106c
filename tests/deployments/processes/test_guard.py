"""None of an engine's processes outlives its replica, whatever ends in which order."""

import contextlib
import io
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from deployments.processes import guard
from deployments.processes.ending import GUARD
from deployments.processes.guard import ORPHAN_S, end_group
from deployments.processes.table import (
    ProcessIdentity,
    command_line,
    descendants,
    entry_of,
    identity_of,
    is_running,
    members,
    running,
)

ROOT = Path(__file__).parents[3]
START_S, WITHIN_S = 120.0, 15.0
NAMES = ("replica", "core", "worker0", "worker1")


class Tree:
    """The processes of `tests.deployments.processes.replica_tree` below a stand-in of the raylet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        command = [sys.executable, "-m", "tests.deployments.processes.replica_tree", str(folder), "2"]
        raylet = f"import subprocess; subprocess.Popen({command!r}, process_group=0).wait(); input()"
        self.raylet = subprocess.Popen([sys.executable, "-c", raylet], cwd=ROOT, stdin=subprocess.PIPE)
        try:
            wait_until(lambda: all((folder / name).exists() for name in NAMES), START_S)
        except BaseException:
            self.raylet.kill()
            self.raylet.communicate()
            raise
        self.pids = {name: int((folder / name).read_text()) for name in NAMES}
        self._replica = identity_of(self.pids["replica"])
        self.processes = [entry.identity for entry in descendants(self.raylet.pid)]
        self.memory = Path("/dev/shm") / (folder / "memory").read_text()

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.guard().pid if name == "guard" else self.pids[name], number)

    def guard(self) -> ProcessIdentity:
        """The guard that runs now."""
        (guard,) = self.guards()
        return guard

    def guards(self) -> list[ProcessIdentity]:
        return [e.identity for e in running() if f"{GUARD} {self._replica} " in command_line(e.pid)]

    def wait_for_look(self) -> None:
        """Wait for two more sleeps of the guard: between them it has looked at everything."""
        guard = self.guard()
        before = sleeps(guard.pid)
        wait_until(lambda: sleeps(guard.pid) >= before + 2)

    def is_gone(self) -> bool:
        return not any(map(is_running, self.processes)) and not members(self.pids["replica"]) and not self.guards()

    def clear(self) -> None:
        for process in [*(e.identity for e in descendants(self.raylet.pid)), *self.guards()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pids["replica"], signal.SIGKILL)
        self.raylet.kill()
        self.raylet.communicate()
        self.memory.unlink(missing_ok=True)  # a tree that is killed before its guard looks leaves it behind


def sleeps(pid: int) -> int:
    """The number of times that a process has gone to sleep."""
    (count,) = re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(count)


def ignored(pid: int) -> set[int]:
    (mask,) = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return {number for number in range(1, 64) if int(mask, 16) >> (number - 1) & 1}


def wait_until(condition: Callable[[], bool], within_s: float = WITHIN_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    made = Tree(tmp_path)
    yield made
    made.clear()


@pytest.mark.parametrize("order", [o[: o.index("replica") + 1] for o in itertools.permutations(NAMES)], ids="-".join)
def test_all_end_with_the_replica_in_any_order(tree: Tree, order: tuple[str, ...]) -> None:
    for name in order:
        tree.kill(name)
    wait_until(tree.is_gone)


@pytest.mark.parametrize("stopped", ["core", "worker0", "replica"])
def test_a_stopped_process_ends_too(tree: Tree, stopped: str) -> None:
    tree.kill(stopped, signal.SIGSTOP)
    tree.kill("replica")
    wait_until(tree.is_gone)


def test_a_process_without_descendants_has_no_time_to_start_an_engine_unseen(tmp_path: Path) -> None:
    """The replica ends right after it has started its guard and a child."""
    script = (
        "import os, time; from deployments.processes.guard import start_guard; start_guard()\n"
        "if os.fork() == 0: time.sleep(1000)\n"
        "os._exit(3)"
    )
    replica = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    assert replica.wait() == 3
    wait_until(lambda: not members(replica.pid))


def test_a_guard_that_is_killed_is_replaced(tree: Tree) -> None:
    first = tree.guard()
    tree.kill("guard")
    wait_until(lambda: not is_running(first))
    wait_until(lambda: len(tree.guards()) == 1)
    tree.kill("replica")
    wait_until(tree.is_gone)


def test_the_log_has_one_line_while_no_guard_can_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started = io.BytesIO()
    failures = iter([OSError("no memory"), OSError("no memory")])

    def start(command: list[str]) -> IO[bytes]:
        if error := next(failures, None):
            raise error
        return started

    monkeypatch.setattr(guard, "_start", start)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert guard._start_at_last([]) is started
    assert [record.getMessage() for record in caplog.records] == ["no guard can be started, retrying: no memory"]


def test_guard_ignores_the_signals_of_an_init_system(tree: Tree) -> None:
    guard = tree.guard()
    wait_until(lambda: ignored(guard.pid) >= {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        tree.kill("guard", number)
    tree.wait_for_look()
    assert tree.guard() == guard


def test_named_shared_memory_is_removed_even_if_the_whole_group_was_killed_by_another(tree: Tree) -> None:
    tree.wait_for_look()
    assert tree.memory.exists()
    os.killpg(tree.pids["replica"], signal.SIGKILL)
    wait_until(tree.is_gone)
    wait_until(lambda: not tree.memory.exists())


def test_named_shared_memory_is_removed_even_if_the_replica_kills_its_children_before_it_ends(tree: Tree) -> None:
    """Ray's workers do so, on SIGTERM for instance."""
    tree.wait_for_look()
    replica = tree.pids["replica"]
    tree.kill("replica", signal.SIGSTOP)  # it has no time to start another guard
    for child in [e for e in descendants(replica) if e.parent == replica]:
        os.kill(child.pid, signal.SIGKILL)
    os.killpg(replica, signal.SIGKILL)
    wait_until(tree.is_gone)
    wait_until(lambda: not tree.memory.exists())


@pytest.mark.slow
def test_a_replica_that_is_stuck_ends_with_its_raylet_but_not_at_once(tree: Tree) -> None:
    tree.kill("replica", signal.SIGSTOP)
    tree.raylet.kill()
    began = time.monotonic()
    wait_until(tree.is_gone)
    assert time.monotonic() - began > ORPHAN_S / 2


def test_all_goes_on_while_replica_and_raylet_run(tree: Tree) -> None:
    tree.wait_for_look()
    assert all(map(is_running, tree.processes))


def test_a_group_that_is_led_by_another_process_by_now_is_spared() -> None:
    with subprocess.Popen(["sleep", "1000"], process_group=0) as other:
        identity = identity_of(other.pid)
        end_group(ProcessIdentity(identity.pid, identity.started - 1))
        assert is_running(identity)
        end_group(identity)
        assert not is_running(identity)


# --- the table of processes ---------------------------------------------------------------------------


def test_an_identity_is_of_one_process_only() -> None:
    process = subprocess.Popen(["sleep", "1000"])
    identity = identity_of(process.pid)
    assert ProcessIdentity.parse(str(identity)) == identity
    assert is_running(identity)
    assert not is_running(ProcessIdentity(identity.pid, identity.started + 1))
    process.kill()
    wait_until(lambda: not is_running(identity))  # a zombie has ended
    assert entry_of(process.pid) is not None
    process.wait()
    assert entry_of(process.pid) is None
    assert command_line(process.pid) == ""
    with pytest.raises(ProcessLookupError):
        identity_of(process.pid)


def test_a_name_may_look_like_the_rest_of_the_row(tmp_path: Path) -> None:
    script = "from pathlib import Path; Path('/proc/self/comm').write_text('a) Z 1 (b'); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
        wait_until(lambda: (entry := entry_of(process.pid)) is not None and entry.name == "a) Z 1 (b")
        entry = entry_of(process.pid)
        assert entry is not None
        assert (entry.zombie, entry.parent) == (False, os.getpid())
        assert entry in descendants(os.getpid())
        process.communicate(b"\n")
