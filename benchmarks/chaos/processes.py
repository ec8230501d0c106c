"""The processes of a Mell cluster on this machine, found as siblings of a replica process in `/mell/state`, so that
faults never hit another cluster.
"""

import contextlib
import signal

import psutil

ENGINE = "ServeReplica:mell:Engine"
SCHEDULER = "ServeReplica:mell:Scheduler"
CONTROLLER = "ServeController"


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

    def memory_mb(self) -> dict[str, float]:
        """Unshared memory (USS) in MB, summed by kind of process."""
        used: dict[str, float] = {}
        for title in (ENGINE, SCHEDULER, CONTROLLER, "ServeReplica:mell:Ingress"):
            for process in self.titled(title):
                for part in self.tree(process.pid):
                    with contextlib.suppress(psutil.Error):
                        name = title if part == process else f"{title} {part.name()}"
                        used[name] = used.get(name, 0.0) + part.memory_full_info().uss / 1e6
        return used


def send(process: psutil.Process, number: signal.Signals) -> bool:
    """Send a signal; False if the process has ended, even if its id is in use again."""
    with contextlib.suppress(psutil.Error):
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            process.send_signal(number)
            return True
    return False
