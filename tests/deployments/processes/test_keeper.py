"""Nothing that a launch command started outlives it, whichever of launcher, keeper and command ends by what."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.processes.keeper import LOOK_S
from deployments.processes.table import ProcessIdentity, descendants, is_running
from tests.deployments.processes.cluster_tree import TITLES
from tests.deployments.processes.test_guard import ROOT, START_S, WITHIN_S, wait_until

LAUNCH = "import sys; from app.serve import run_kept; sys.exit(run_kept(sys.argv[2:], drain_s=float(sys.argv[1])))"
DRAIN_S = "60"


class Launch:
    """A launcher, its keeper and a stand-in for `serve run` with what that has started."""

    def __init__(
        self, folder: Path, cluster: str = "own", drain_s: float = 0.0, within_s: float = 60.0, ignored: bool = False
    ) -> None:
        self._folder, self._output = folder, folder / "output"
        began = time.monotonic()
        stand_in = [sys.executable, "-m", "tests.deployments.processes.cluster_tree", str(folder), cluster]
        with self._output.open("w") as output:
            self.launcher = subprocess.Popen(
                [sys.executable, "-c", LAUNCH, str(within_s), *stand_in, str(drain_s)],
                cwd=ROOT,
                stdout=output,
                start_new_session=True,
                preexec_fn=_ignore_interrupts if ignored else _heed_signals,
            )
        replica = {"ServeReplica"} if cluster in TITLES else set()
        rest = set() if cluster == "other" else {"gcs_server", "raylet", "engine"}
        try:
            wait_until(lambda: all((folder / name).exists() for name in {"command"} | rest | replica), START_S)
        except BaseException:
            self.launcher.kill()  # the keeper ends the rest
            self.launcher.wait()
            raise
        self.took_s = time.monotonic() - began
        found = descendants(self.launcher.pid)
        self.keeper = found[0].pid
        self.processes: list[ProcessIdentity] = [entry.identity for entry in found]
        assert len(found) == 2 + len(rest) + 2 * len(replica)

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def drained(self) -> bool:
        return (self._folder / "drained").exists()

    def drain(self) -> None:
        """Send SIGTERM to the launcher, and wait until the command drains."""
        self.send("launcher", signal.SIGTERM)
        wait_until((self._folder / "draining").exists)

    def send(self, to: str, number: signal.Signals) -> None:
        ids = {"launcher": self.launcher.pid, "keeper": self.keeper}
        os.kill(ids[to] if to in ids else int((self._folder / to).read_text()), number)

    def is_gone(self) -> bool:
        return not any(map(is_running, self.processes))

    def clear(self) -> None:
        for process in self.processes:
            if is_running(process):
                os.kill(process.pid, signal.SIGKILL)
        self.launcher.kill()
        self.launcher.wait()


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _heed_signals() -> None:
    """The tests may have been started by nohup or in the background of a script, and the launcher heeds that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def launches() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def launch(tmp_path: Path, launches: contextlib.ExitStack) -> Launch:
    made = Launch(tmp_path)
    launches.callback(made.clear)
    return made


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("to", ["launcher", "keeper", "command"])
def test_all_ends_with_any_of_the_three(launch: Launch, to: str, number: signal.Signals) -> None:
    launch.send(to, number)
    wait_until(launch.is_gone)
    launch.launcher.wait(WITHIN_S)
    asked = number in (signal.SIGTERM, signal.SIGINT)
    assert launch.drained == (asked and (to, number) != ("command", signal.SIGTERM))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_to_the_process_group_drain_the_application(launch: Launch, number: signal.Signals) -> None:
    os.killpg(launch.launcher.pid, number)
    assert launch.launcher.wait(WITHIN_S) == 0
    assert launch.drained
    assert launch.is_gone()


def test_a_killed_process_group_leaves_nothing(launch: Launch) -> None:
    os.killpg(launch.launcher.pid, signal.SIGKILL)
    wait_until(launch.is_gone)


def test_two_that_are_killed_together_leave_nothing(launch: Launch) -> None:
    launch.send("command", signal.SIGKILL)
    launch.send("launcher", signal.SIGKILL)
    wait_until(launch.is_gone)


def test_a_stopped_command_ends_all_the_same(launch: Launch) -> None:
    launch.send("command", signal.SIGSTOP)
    launch.send("launcher", signal.SIGKILL)
    wait_until(launch.is_gone)


@pytest.mark.slow
def test_all_ends_with_the_raylet(launch: Launch) -> None:
    time.sleep(2 * LOOK_S + launch.took_s)  # the keeper, which looks ever less often, has found it
    launch.send("raylet", signal.SIGKILL)
    time.sleep(1.0)
    assert is_running(launch.processes[0])  # the command may be about to end, and to print the reason
    wait_until(launch.is_gone)
    assert launch.launcher.wait(WITHIN_S) == 128 + signal.SIGKILL
    assert "the raylet, process" in launch.output


def test_draining_takes_its_time(tmp_path: Path, launches: contextlib.ExitStack) -> None:
    launch = Launch(tmp_path, drain_s=1000.0)
    launches.callback(launch.clear)
    launch.drain()
    time.sleep(0.7)
    assert all(map(is_running, launch.processes))
    (tmp_path / "empty").touch()
    assert launch.launcher.wait(WITHIN_S) == 0
    assert launch.drained


def test_a_second_signal_ends_it_at_once(tmp_path: Path, launches: contextlib.ExitStack) -> None:
    launch = Launch(tmp_path, drain_s=1000.0)
    launches.callback(launch.clear)
    launch.drain()
    launch.send("launcher", signal.SIGTERM)
    assert launch.launcher.wait(WITHIN_S) == 0
    assert not launch.drained
    assert launch.is_gone()


def test_draining_is_bounded(tmp_path: Path, launches: contextlib.ExitStack) -> None:
    launch = Launch(tmp_path, drain_s=1000.0, within_s=1.0)
    launches.callback(launch.clear)
    launch.send("launcher", signal.SIGTERM)
    assert launch.launcher.wait(WITHIN_S) == 0
    assert not launch.drained
    assert launch.is_gone()


@pytest.mark.parametrize("cluster", ["empty", "starting"])
def test_before_the_first_replica_has_started_there_is_nothing_to_drain(
    tmp_path: Path, launches: contextlib.ExitStack, cluster: str
) -> None:
    launch = Launch(tmp_path, cluster, drain_s=1000.0)
    launches.callback(launch.clear)
    launch.send("launcher", signal.SIGTERM)
    assert launch.launcher.wait(WITHIN_S) == 0
    assert launch.is_gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_on_a_standing_cluster_the_command_ends_silently(
    tmp_path: Path, launches: contextlib.ExitStack, number: signal.Signals
) -> None:
    """The command takes the application down when it is interrupted: it must not notice."""
    launch = Launch(tmp_path, "other")
    launches.callback(launch.clear)
    launch.send("launcher", number)
    wait_until(launch.is_gone)
    assert launch.launcher.wait(WITHIN_S) == (-signal.SIGKILL if number == signal.SIGKILL else 0)
    assert not launch.drained


def test_on_a_cluster_of_others_an_interrupt_is_the_commands(tmp_path: Path, launches: contextlib.ExitStack) -> None:
    launch = Launch(tmp_path, "other")
    launches.callback(launch.clear)
    launch.send("launcher", signal.SIGINT)
    assert launch.launcher.wait(WITHIN_S) == 0
    assert launch.drained


def test_a_launcher_in_the_background_of_a_script_ignores_interrupts(
    tmp_path: Path, launches: contextlib.ExitStack
) -> None:
    launch = Launch(tmp_path, ignored=True)
    launches.callback(launch.clear)
    launch.send("launcher", signal.SIGINT)
    time.sleep(0.5)
    assert all(map(is_running, launch.processes))
    launch.send("launcher", signal.SIGTERM)  # which is an interrupt to the command, that does not ignore it
    assert launch.launcher.wait(WITHIN_S) == 0
    assert launch.drained


def test_the_end_of_make_ends_all(tmp_path: Path) -> None:
    """Which may be killed, and sends no signal then."""
    arguments = ["tests.deployments.processes.cluster_tree", str(tmp_path), "own", "0"]
    launch = f"from deployments.processes.table import end_with_parent; end_with_parent(); {LAUNCH}"
    launcher = [sys.executable, "-c", launch, DRAIN_S, sys.executable, "-m", *arguments]
    make = f"import subprocess; subprocess.run({launcher!r})"
    process = subprocess.Popen([sys.executable, "-c", make], cwd=ROOT)
    names = ("command", "gcs_server", "raylet", "ServeReplica", "engine")
    wait_until(lambda: all((tmp_path / name).exists() for name in names), 30.0)
    started = [entry.identity for entry in descendants(process.pid)]
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(is_running, started)))
    assert (tmp_path / "drained").exists()


@pytest.mark.parametrize(("command", "status"), [("exit 3", 3), ("kill -KILL $$", 137), ("exit 0", 0)])
def test_status_is_the_commands(command: str, status: int) -> None:
    launched = subprocess.run([sys.executable, "-c", LAUNCH, DRAIN_S, "/bin/sh", "-c", command], cwd=ROOT, timeout=30)
    assert launched.returncode == status
