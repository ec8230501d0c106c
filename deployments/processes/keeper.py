"""Runs a command and, when the command ends or the launcher wants it to, ends everything below it.

The launcher (`app.serve`) starts the keeper in a process group of its own, and the keeper starts `serve run`:

    launcher     in the terminal's or init system's process group; forwards signals
      keeper     adopts orphans, so that every process started below it stays below it
        serve run
          raylet, GCS, dashboard, ...
            replicas, controller, ...
              engine cores, workers, guards

Whichever of launcher, keeper and command ends first, another one ends the rest: the keeper watches the other two, and
the launcher, which adopts orphans as well, watches the keeper. The end of the raylet ends everything, too.

The processes of a standing cluster are no descendants, so they are never ended: there, the command is only a client.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from deployments.processes.ending import end_all
from deployments.processes.importing import importing
from deployments.processes.table import (
    ProcessEntry,
    ProcessIdentity,
    adopt_orphans,
    command_line,
    descendants,
    identity_of,
    is_running,
)

POLL_S = 0.25
LOOK_S = 1.0
"""The shortest time between two searches for the raylet, in seconds."""

DRAIN_S = 60.0
"""Time limit of the command for draining and ending, in seconds. Serve waits 30 s for streams, and then ends Ray."""

ORPHAN_S = 5.0
"""Time limit of the command after the end of its raylet, in seconds. The command itself would wait for ever."""

_SIGNALS = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM}
_MODULE = "deployments.processes.keeper"
_GCS = "gcs_server"
_RAYLET = "raylet"
_SESSION = re.compile(r"--session_dir=(\S+)")
_SERVES = re.compile(r"ray::ServeReplica:[^:]+:(?!Ingress\b|Scheduler\b)\w+(?!\w|\.initialize_and_get_metadata)")
"""The title of a replica that has started, unless it needs another one to answer requests."""


class Keeper:
    """Runs `command` as long as `owner`, the launcher, runs."""

    def __init__(self, owner: ProcessIdentity, command: Sequence[str], drain_s: float) -> None:
        self._owner = owner
        self._drain_s = drain_s
        self._raylet: ProcessIdentity | None = None
        self._raylet_logs = "in Ray's session folder"
        self._began = self._look_at = time.monotonic()
        self._ends_by = float("inf")
        self._ends_on_request = False
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # `run` waits for them by sigtimedwait
        # Linux sends SIGHUP to a process group that loses its parent while one of its processes is stopped.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        adopt_orphans()
        self._command = subprocess.Popen(command, preexec_fn=_default_signals)

    def run(self) -> int:
        """Wait for the end, and end all descendants. Returns the command's exit status, 0 if killed on request."""
        while self._command.poll() is None and is_running(self._owner) and (now := time.monotonic()) < self._ends_by:
            self._follow_raylet(now)
            received = signal.sigtimedwait(_SIGNALS, POLL_S)
            if received is None:
                continue
            if received.si_signo == signal.SIGCHLD:
                self._reap()
            elif self._ends_on_request or not self._request_end(received.si_signo):
                break
        self._command.kill()
        status = self._command.wait()
        end_descendants()
        return 0 if status == -signal.SIGKILL and self._ends_on_request else status

    def _follow_raylet(self, now: float) -> None:
        """Find the raylet once it runs, and limit the command's time after the raylet's end.

        On a standing cluster there is no raylet below this process, so the searches become less and less frequent.
        """
        if self._raylet is not None:
            if not is_running(self._raylet):
                if self._ends_by == float("inf"):
                    print(
                        f"the raylet, process {self._raylet.pid}, has ended; its logs: {self._raylet_logs}", flush=True
                    )
                self._ends_by = min(self._ends_by, now + ORPHAN_S)
        elif now >= self._look_at:
            self._look_at = now + max(LOOK_S, (now - self._began) / 2)
            found = (entry.identity for entry in descendants(os.getpid()) if entry.name == _RAYLET)
            self._raylet = next(found, None)
            if self._raylet is not None and (session := _SESSION.search(command_line(self._raylet.pid))):
                self._raylet_logs = f"{session[1]}/logs/raylet.err and raylet.out"

    def _request_end(self, by: int) -> bool:
        """Have the command drain and end. False if it has nothing to drain, so that it may be killed at once."""
        self._ends_on_request = True
        self._ends_by = time.monotonic() + self._drain_s
        below = descendants(os.getpid())
        has_cluster = any(entry.name == _GCS for entry in below)
        # On a standing cluster the application outlives SIGTERM; Ctrl-C takes it down, as `serve run` promises.
        serves = has_cluster and any(_SERVES.match(command_line(entry.pid)) for entry in below)
        drains = serves if has_cluster else by == signal.SIGINT
        if drains:
            self._command.send_signal(signal.SIGINT)
        return drains

    def _reap(self) -> None:
        """Reap adopted orphans that have ended: nobody else collects their exit status."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid == self._command.pid:
                    return
                os.waitpid(ended.si_pid, 0)


def end_descendants() -> None:
    """Kill all descendants of this process, which adopts orphans. Returns when none is left."""

    def left() -> list[ProcessEntry]:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        return descendants(os.getpid())

    end_all(left)


def keep(
    command: Sequence[str],
    drain_s: float = DRAIN_S,
    environment: Mapping[str, str] = os.environ,
    output: IO[str] | int | None = None,
) -> "subprocess.Popen[bytes]":
    """Start a keeper for this process that runs `command`, with this Python and this project first in its paths.

    On SIGTERM the keeper gives the command `drain_s` seconds to end, and then ends everything. After the end of this
    process it ends everything at once. The keeper stays in this process's session: Linux divides processor time between
    sessions first (autogroups), so a busy server in a session of its own would starve a client.
    """
    keeper = [sys.executable, "-P", "-m", _MODULE, str(identity_of(os.getpid())), str(drain_s), *command]
    # Ray starts `python` by name in places.
    path = os.pathsep.join([str(Path(sys.executable).parent), *filter(None, [environment.get("PATH")])])
    with_path = {**importing(environment), "PATH": path}
    return subprocess.Popen(keeper, env=with_path, stdout=output, stderr=output, process_group=0)


def exit_status(returncode: int) -> int:
    """The exit status by a shell's convention: 128 plus the number of the signal that ended the process."""
    return returncode if returncode >= 0 else 128 - returncode


def _default_signals() -> None:
    """Restore default signals before the command runs. A shell starts background processes with SIGINT ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def main() -> None:
    """`python -m deployments.processes.keeper OWNER DRAIN_S COMMAND...`: exits with the command's status."""
    owner, drain_s, *command = sys.argv[1:]
    sys.exit(exit_status(Keeper(ProcessIdentity.parse(owner), command, float(drain_s)).run()))


if __name__ == "__main__":
    main()
