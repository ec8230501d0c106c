"""Ends processes for good, and what they would leave behind with them."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence

from deployments.processes.table import ProcessEntry, command_line

CLEANUP_S = 5.0
"""How long those may take that clean up after others."""

GUARD = "deployments.processes.guard"
_CLEANERS = (f"-m {GUARD} ", "multiprocessing.resource_tracker")


def end_all(find: Callable[[], Sequence[ProcessEntry]]) -> None:
    """Send SIGKILL to the processes that `find` returns, until it returns none.

    A process that none has started can only be found the next time, so one empty answer means that there are none.
    Guards and Python's resource trackers end by themselves once they have removed what the others leave behind: they
    get the time to.
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
