"""Ends a replica's process group with the replica's process, whatever way that process ends.

vLLM's engine core does not notice the death of its parent process, and a worker does so only while it runs Python. Ray
ends both with a replica, unless the raylet is gone first: the raylet is killed with the command that started the
cluster, and on SIGTERM that may be before it has ended its replicas. So each replica has a guard:

- The replica leads a process group. The engine core, its workers and all their descendants are members from their first
  instruction, even after the death of their parents: neither vLLM nor torch starts a process outside of the group.
- The guard has its own session, so that signals to the group do not reach it, and it is no child of the replica, since
  a Ray worker that ends kills its children first. The guard waits for the replica's end, and then sends SIGKILL to all
  members, which also ends stopped, busy and just forked processes.
- If Ray kills the whole group, resource tracker included, named shared memory is left. So the guard notes the names
  that the members have mapped, and removes that memory after their end.
- Without its raylet, a replica ends by itself almost at once. The guard ends a replica that does not, since it is
  stopped or stuck. It also does so on systems where orphans are not adopted by process 1, since Ray's processes
  recognise the death of the raylet by that.
- The replica replaces a guard that is killed.
"""

import contextlib
import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

from deployments.processes.ending import GUARD, end_all
from deployments.processes.importing import ROOT
from deployments.processes.table import (
    ProcessEntry,
    ProcessIdentity,
    entry_of,
    identity_of,
    is_running,
    members,
)

log = logging.getLogger("ray.serve")

LOOK_S = 1.0
"""Seconds between two looks at the parent and at shared memory."""

POLL_S = 0.25
"""Seconds between two looks while mappings are read, and between two checks of the replica on a kernel before 5.3."""

LOOKS = 20
"""The number of times that mappings are read after a new name in shared memory: for five seconds."""

ORPHAN_S = 5.0
"""Seconds after which a replica without its raylet is ended."""

_SHARED_MEMORY = Path("/dev/shm")
_MAPPING = re.compile(rf" {_SHARED_MEMORY}/([^/\s]+)$", re.MULTILINE)
_NAMED = re.compile(r"(psm_|sem\.mp-).+")
"""Names of shared memory and semaphores of Python's multiprocessing. Only these are removed, since an engine also maps
memory of other owners."""


def start_guard() -> None:
    """Start the guard of this process, and replace it whenever it ends.

    Must be called before the first child starts: this process becomes the leader of its process group, if it is not.

    Raises:
        OSError: no process can be started.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    identities = [str(identity_of(pid)) for pid in (os.getpid(), os.getppid())]
    command = [sys.executable, "-P", "-S", "-m", GUARD, *identities]
    threading.Thread(target=_replace, args=(command, _start(command)), name="mell-guard", daemon=True).start()


def _start(command: list[str]) -> IO[bytes]:
    """Start a guard. Returns a pipe that reaches its end with the end of the guard. Raises OSError."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # -S: without site-packages
    starter = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment, cwd="/", start_new_session=True
    )
    if (status := starter.wait()) != 0:  # the starter has forked the guard
        raise OSError(f"the process that starts the guard ended with status {status}")
    assert starter.stdout is not None
    return starter.stdout


def _replace(command: list[str], guard: IO[bytes]) -> None:
    """Start another guard whenever one ends, at once, since the replica may end next."""
    while True:
        began = time.monotonic()
        with guard:
            guard.read()
        log.warning("the guard of this replica's processes ended; starting another")
        if time.monotonic() - began < 1.0:
            time.sleep(1.0)
        guard = _start_at_last(command)


def _start_at_last(command: list[str]) -> IO[bytes]:
    """Start a guard, with retries, since a machine may be out of memory or processes for a while."""
    failing = False
    while True:
        try:
            return _start(command)
        except OSError as error:
            if not failing:
                log.warning("no guard can be started, retrying: %s", error)
            failing = True
            time.sleep(1.0)


# --- in the guard's process ---------------------------------------------------------------------------


def main() -> None:
    """`python -m deployments.processes.guard OWNER PARENT`: guard a process, and end it soon after its parent.

    Forks the guard and exits at once, so that process 1, or another process that adopts orphans, adopts the guard.
    """
    if os.fork() > 0:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # an init system sends these to all at once
    with contextlib.suppress(OSError):
        # Ray has its processes killed first when memory runs out; a guard must survive them.
        Path("/proc/self/oom_score_adj").write_text("0")
    owner, parent = map(ProcessIdentity.parse, sys.argv[1:])
    segments = SharedMemory(owner)
    _watch(owner, parent, segments)
    segments.note(anew=True)
    end_group(owner)
    segments.remove()


def _watch(owner: ProcessIdentity, parent: ProcessIdentity, segments: "SharedMemory") -> None:
    """Return when the owner has ended, or has outlived its parent by ORPHAN_S."""
    deadline = float("inf")
    wait = _waits_for_end(owner)
    while is_running(owner) and time.monotonic() < deadline:
        if deadline == float("inf") and not is_running(parent):
            deadline = time.monotonic() + ORPHAN_S
        segments.note()
        wait(POLL_S if segments.reads_mappings else LOOK_S)


def _waits_for_end(process: ProcessIdentity) -> Callable[[float], object]:
    """A function that waits for the end of a process within a limit in seconds, and may return before either."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:  # an old kernel; or the process has ended
        return lambda limit_s: time.sleep(min(limit_s, POLL_S))
    ends = select.poll()
    ends.register(descriptor, select.POLLIN)
    return lambda limit_s: ends.poll(1000 * limit_s)


def end_group(leader: ProcessIdentity) -> None:
    """Kill the process group of its present or former leader. Returns when no member runs any more."""
    found = entry_of(leader.pid)
    if found is None or found.identity == leader:  # otherwise the id is reused, so the group has no members
        end_all(lambda: members(leader.pid))


class SharedMemory:
    """The named shared memory and semaphores that a process group has mapped."""

    def __init__(self, leader: ProcessIdentity) -> None:
        self._group = leader.pid
        self._seen: set[str] = set()
        self._changed_ns = 0
        self._looks = 0
        self._names: set[str] = set()

    @property
    def reads_mappings(self) -> bool:
        """True if the next `note` reads the mappings of all processes."""
        return self._looks > 0

    def note(self, anew: bool = False) -> None:
        """Add the currently mapped names.

        Reading the mappings of a large process costs time. So they are read only for a while after a new name has
        appeared, since its owner may map it late on a busy machine; with `anew` they are always read. Names are read
        only if the folder has changed.
        """
        if not (self._has_changed() or self.reads_mappings or anew):
            return
        seen = {path.name for path in _SHARED_MEMORY.glob("*") if _NAMED.fullmatch(path.name)}
        if seen - self._seen:
            self._looks = LOOKS
        self._names &= seen
        if self._looks or anew:
            self._names |= {name for name in _mapped(members(self._group)) if _NAMED.fullmatch(name)}
        self._seen, self._looks = seen, max(0, self._looks - 1)

    def _has_changed(self) -> bool:
        """True if the folder has changed since the last call, or within a second: the times of files are coarse."""
        changed_ns = _SHARED_MEMORY.stat().st_mtime_ns
        before, self._changed_ns = self._changed_ns, changed_ns
        return changed_ns != before or time.time_ns() - changed_ns < 1e9

    def remove(self) -> None:
        """Remove all shared memory and semaphores with the noted names."""
        for name in self._names:
            (_SHARED_MEMORY / name).unlink(missing_ok=True)


def _mapped(processes: Iterable[ProcessEntry]) -> Iterator[str]:
    """The names of the shared memory that the processes have mapped."""
    for process in processes:
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            yield from _MAPPING.findall(Path(f"/proc/{process.pid}/maps").read_text(errors="replace"))


if __name__ == "__main__":
    main()
