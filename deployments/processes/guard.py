"""Ends a replica's process group with the replica's process, however and whenever that ends.

vLLM's engine core does not notice the death of the process that started it, and a worker only while it runs Python.
Ray ends them with a replica, unless the raylet is gone first: it is killed with the command that started the cluster,
and on SIGTERM that may be before it has ended its replicas. So each replica has a guard of its own:

- The replica leads a process group. The engine core, its workers, and whatever they start are members from their first
  instruction, also once their parents are gone: neither vLLM nor torch starts a process elsewhere.
- The guard is in a session of its own, out of reach of signals to that group, and no child of the replica: a Ray worker
  that ends kills its children first. The guard checks the replica a few times a second, and when the replica has ended,
  sends SIGKILL to all members, be they stopped, in a long call, or just being made.
- When Ray kills the group, resource tracker and all, named shared memory stays behind. So the guard remembers what the
  members have mapped, and removes it after them.
- Without its raylet, a replica ends within a moment. One that does not, since it is stopped or stuck, is ended, too; so
  is each where orphans are not handed to process 1, for that is how Ray's processes notice.
- A guard that is killed is replaced by the replica.
"""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from deployments.processes.ending import GUARD, end_all
from deployments.processes.table import (
    ProcessEntry,
    ProcessIdentity,
    entry_of,
    identity_of,
    is_running,
    members,
)

log = logging.getLogger("ray.serve")

POLL_S = 0.25
"""How long after the replica the rest of its group may live."""

LOOKS = 20
"""How often mappings are read after a name has appeared in shared memory: for five seconds."""

ORPHAN_S = 5.0
"""How long a replica may live after its raylet."""

_ROOT = Path(__file__).parents[2]
_SHARED_MEMORY = Path("/dev/shm")
_MAPPING = re.compile(rf" {_SHARED_MEMORY}/([^/\s]+)$", re.MULTILINE)
_NAMED = re.compile(r"(psm_|sem\.mp-).+")
"""What Python's multiprocessing names its shared memory and semaphores. Nothing else is removed: an engine has mappings
of other owners' memory as well."""


def start_guard() -> None:
    """Start the guard of this process, and keep one running as long as this process does.

    To be called before the first child is started: this process becomes the leader of its process group, if it is not.

    Raises:
        OSError: no process can be started.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    identities = [str(identity_of(pid)) for pid in (os.getpid(), os.getppid())]
    command = [sys.executable, "-P", "-S", "-m", GUARD, *identities]
    threading.Thread(target=_replace, args=(command, _start(command)), name="mell-guard", daemon=True).start()


def _start(command: list[str]) -> IO[bytes]:
    """Start a guard; returns a pipe that is at its end when the guard has ended. Raises OSError."""
    environment = os.environ | {"PYTHONPATH": str(_ROOT)}
    starter = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment, cwd="/", start_new_session=True
    )
    if (status := starter.wait()) != 0:  # the guard is a child of it
        raise OSError(f"the process that starts the guard ended with status {status}")
    assert starter.stdout is not None
    return starter.stdout


def _replace(command: list[str], guard: IO[bytes]) -> None:
    """Start another guard whenever one ends: at once, for the replica might be next."""
    while True:
        began = time.monotonic()
        with guard:
            guard.read()
        log.warning("the guard of this replica's processes ended; starting another")
        if time.monotonic() - began < 1.0:
            time.sleep(1.0)
        guard = _start_at_last(command)


def _start_at_last(command: list[str]) -> IO[bytes]:
    """Start a guard, however often that takes: a machine may be out of memory or processes for a while."""
    while True:
        try:
            return _start(command)
        except OSError as error:
            log.warning("no guard can be started: %s", error)
            time.sleep(1.0)


# --- in the guard's process ---------------------------------------------------------------------------


def main() -> None:
    """`python -m deployments.processes.guard OWNER PARENT`: guard a process whose parent is to live as well.

    Exits at once, and leaves the guard to process 1 or to who else adopts orphans.
    """
    if os.fork() > 0:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # an init system sends these to all at once
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("0")  # Ray's processes are the first to go, their guards are not
    owner, parent = map(ProcessIdentity.parse, sys.argv[1:])
    segments = SharedMemory(owner)
    _watch(owner, parent, segments)
    segments.note(anew=True)
    end_group(owner)
    segments.remove()


def _watch(owner: ProcessIdentity, parent: ProcessIdentity, segments: "SharedMemory") -> None:
    """Returns when the owner has ended, or has outlived its parent for too long."""
    deadline = float("inf")
    while is_running(owner) and time.monotonic() < deadline:
        if deadline == float("inf") and not is_running(parent):
            deadline = time.monotonic() + ORPHAN_S
        segments.note()
        time.sleep(POLL_S)


def end_group(leader: ProcessIdentity) -> None:
    """Kill the process group that the process led or leads; returns when no member runs any more."""
    found = entry_of(leader.pid)
    if found is None or found.identity == leader:  # else the id was given away, and the group has no members
        end_all(lambda: members(leader.pid))


class SharedMemory:
    """The named shared memory and semaphores that a process group has mapped."""

    def __init__(self, leader: ProcessIdentity) -> None:
        self._group = leader.pid
        self._seen: set[str] = set()
        self._looks = 0
        self._names: set[str] = set()

    def note(self, anew: bool = False) -> None:
        """Remember the names that are mapped now.

        Reading the mappings of a large process is not free. Unless it is to be done `anew`, it is done only after a
        name has appeared, and for a while from then on: on a busy machine its maker maps it late.
        """
        seen = {path.name for path in _SHARED_MEMORY.glob("*") if _NAMED.fullmatch(path.name)}
        if seen - self._seen:
            self._looks = LOOKS
        if self._looks or anew:
            self._names |= {name for name in _mapped(members(self._group)) if _NAMED.fullmatch(name)}
        self._seen, self._looks = seen, max(0, self._looks - 1)

    def remove(self) -> None:
        """Remove what still has one of the names."""
        for name in self._names:
            (_SHARED_MEMORY / name).unlink(missing_ok=True)


def _mapped(processes: Iterable[ProcessEntry]) -> Iterator[str]:
    """Names in shared memory that the processes have mapped."""
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended, or it is another user's
            yield from _MAPPING.findall(Path(f"/proc/{process.pid}/maps").read_text(errors="replace"))


if __name__ == "__main__":
    main()
