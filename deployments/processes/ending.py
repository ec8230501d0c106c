"""Ends processes by SIGKILL, and leaves those that clean up after them the time to do so."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence

from deployments.processes.table import ProcessEntry, command_line

CLEANUP_S = 5.0
"""Time limit, in seconds, for processes that clean up after others."""

GUARD = "deployments.processes.guard"
_CLEANERS = (f"-m {GUARD} ", "multiprocessing.resource_tracker")


def end_all(find: Callable[[], Sequence[ProcessEntry]]) -> None:
    """Send SIGKILL to the processes that `find` returns, until it returns none.

    `find` must return all running processes of a tree: new ones can only come from running ones, so the first empty
    list means that none are left. Guards and Python's resource trackers first remove the files and the shared memory of
    the others, and then end by themselves: they are killed only after `CLEANUP_S`.
    """
    deadline = time.monotonic() + CLEANUP_S
    while found := find():
        late = time.monotonic() > deadline
        for entry in found:
            if late or not _cleans_up(entry):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(entry.pid, signal.SIGKILL)
        time.sleep(0.02)


def _cleans_up(entry: ProcessEntry) -> bool:
    line = command_line(entry.pid)
    return any(cleaner in line for cleaner in _CLEANERS)
