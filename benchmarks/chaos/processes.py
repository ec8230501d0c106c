"""The processes of a Mell cluster on this machine, found as siblings of a replica process in `/mell/state`, so that
faults never hit another cluster.
"""

import contextlib
import signal
from pathlib import Path

import psutil

from policies.model import SOLE_POOL

DEPLOYMENT = "ServeReplica:mell:"
ENGINE = f"{DEPLOYMENT}{SOLE_POOL}"
SCHEDULER = f"{DEPLOYMENT}Scheduler"
INGRESS = f"{DEPLOYMENT}Ingress"
CONTROLLER = "ServeController"

_KINDS = {"anonymous": "Pss_Anon", "shared": "Pss_Shmem", "file": "Pss_File"}
"""Kinds of memory, by their rows in smaps_rollup."""


class Processes:
    """The worker processes of the Ray node that runs the process `replica`. Raises psutil.NoSuchProcess."""

    def __init__(self, replica: int) -> None:
        self._raylet = psutil.Process(replica).parent()

    def titled(self, title: str) -> list[psutil.Process]:
        """The processes whose title contains `title`, the oldest first."""
        found = []
        for process in self._raylet.children():
            with contextlib.suppress(psutil.Error):
                if title in " ".join(process.cmdline()):
                    found.append((process.create_time(), process))
        return [process for _, process in sorted(found, key=lambda pair: pair[0])]

    def tree(self, pid: int) -> list[psutil.Process]:
        """A process and its descendants, as a replica with its engine's; empty if it has ended."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            return [process, *process.children(recursive=True)]
        return []

    def memory_mb(self) -> dict[str, dict[str, float]]:
        """Memory in MB by process and by kind.

        Processes are named by their deployment and its count, those below by their own name in addition. Kinds are
        `anonymous` (heap, KV cache), `shared` (memory files, as staging slots) and `file` (code and other files). Pages
        of several processes count in equal parts (PSS).
        """
        used: dict[str, dict[str, float]] = {}
        for title in (ENGINE, SCHEDULER, CONTROLLER, INGRESS):
            for number, process in enumerate(self.titled(title), 1):
                for part in self.tree(process.pid):
                    with contextlib.suppress(psutil.Error, OSError):
                        own = f"{title.removeprefix(DEPLOYMENT)} {number}"
                        name = own if part == process else f"{own} {part.name()}"
                        used[name] = memory_mb(part.pid)
        return used


def memory_mb(pid: int) -> dict[str, float]:
    """Memory of one process in MB by kind: see `Processes.memory_mb`. Raises OSError if it has ended."""
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    kilobytes = {words[0].rstrip(":"): int(words[1]) for words in lines}
    return {kind: kilobytes[row] * 1024 / 1e6 for kind, row in _KINDS.items()}


def send(process: psutil.Process, number: signal.Signals) -> bool:
    """Send a signal; False if the process has ended, even if its id is in use again."""
    with contextlib.suppress(psutil.Error):
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            process.send_signal(number)
            return True
    return False
