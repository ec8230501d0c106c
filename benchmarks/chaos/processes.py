"""The processes of a Mell on this machine: found beside a replica that `/mell/state` names, so that no other cluster
is ever struck.
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
        """Those whose title has `title` in it, the oldest first."""
        found = []
        for process in self._raylet.children():
            with contextlib.suppress(psutil.Error):
                if title in " ".join(process.cmdline()):
                    found.append((process.create_time(), process))
        return [process for _, process in sorted(found, key=lambda pair: pair[0])]

    def tree(self, pid: int) -> list[psutil.Process]:
        """A process and all below it: a replica, and the engine's own ones. None, if it is gone."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            return [process, *process.children(recursive=True)]
        return []

    def memory_mb(self) -> dict[str, float]:
        """Memory that is theirs alone (USS, MB), by what they are; of several of a kind, the sum."""
        used: dict[str, float] = {}
        for title in (ENGINE, SCHEDULER, CONTROLLER, "ServeReplica:mell:Ingress"):
            for process in self.titled(title):
                for part in self.tree(process.pid):
                    with contextlib.suppress(psutil.Error):
                        name = title if part == process else f"{title} {part.name()}"
                        used[name] = used.get(name, 0.0) + part.memory_full_info().uss / 1e6
        return used


def send(process: psutil.Process, number: signal.Signals) -> bool:
    """Send a signal; False if that very process is gone (its id may be another's by now)."""
    with contextlib.suppress(psutil.Error):
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            process.send_signal(number)
            return True
    return False
