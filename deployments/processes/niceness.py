"""The niceness of serving processes.

Ray starts its worker processes with niceness 15 (`RAY_worker_niceness`), so that tasks that compute leave the node's
cores to Ray itself. What they start inherits it. A serving process would then wait for any other program of its node
that has work, and an engine could lose its cores to its own clients. So a process that serves takes its raylet's
niceness, and an engine's processes do so once it has started. During its start it still gives way to those that serve.
"""

import logging
import os
from collections.abc import Iterable

log = logging.getLogger("ray.serve")


def take_niceness_of_parent(children: Iterable[int] = ()) -> None:
    """Lower the niceness of this process and of `children`, process ids, to that of its parent.

    Linux has a niceness for each thread; a new one has that of the thread that starts it. Without the right to lower
    it (root's, or CAP_SYS_NICE), it stays, with a line in the log.
    """
    wanted = os.getpriority(os.PRIO_PROCESS, os.getppid())
    try:
        for process in {os.getpid(), *children}:
            while _lower(process, wanted):
                pass  # A thread that had not been reached yet may have started others.
    except PermissionError:
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        log.warning(
            "process %d has niceness %d and waits for all others of its node that have %d: for lower latency,"
            " start Ray with RAY_worker_niceness=%d in its environment",
            *(os.getpid(), niceness, wanted, wanted),
        )


def _lower(process: int, niceness: int) -> bool:
    """Lower that of all threads. Returns True if there were some with a higher one. Raises PermissionError."""
    lowered = False
    try:
        for thread in map(int, os.listdir(f"/proc/{process}/task")):
            if os.getpriority(os.PRIO_PROCESS, thread) > niceness:
                os.setpriority(os.PRIO_PROCESS, thread, niceness)
                lowered = True
    except (FileNotFoundError, ProcessLookupError):
        return os.path.exists(f"/proc/{process}")
    return lowered
