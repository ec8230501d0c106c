"""A stand-in for `serve run`, without Ray.

    python -m tests.deployments.processes.cluster_tree FOLDER CLUSTER DRAIN_S

With CLUSTER `own` it starts a GCS and a raylet with a replica in a session of its own; with `starting` the same with a
replica that has not started yet; with `empty` without a replica; with `other` nothing, for the cluster was there
before. On SIGINT it writes `draining`, drains for DRAIN_S or until there is a file `empty`, writes `drained` and ends.
"""

import os
import signal
import sys
import time
from pathlib import Path

from setproctitle import setproctitle

TITLES = {
    "own": "ray::ServeReplica:mell:Engine",
    "starting": "ray::ServeReplica:mell:Engine.initialize_and_get_metadata",
}
"""The titles of the replica, as Ray sets them."""


def main() -> None:
    """Run until SIGINT."""
    folder, cluster, drain_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if cluster != "other":
        _start(folder, "gcs_server")
        if os.fork() == 0:
            if cluster in TITLES:
                _start(folder, "ServeReplica", TITLES[cluster])
            _stay(folder, "raylet")
    try:
        _note(folder, "command")
        time.sleep(1000)
    except KeyboardInterrupt:
        _note(folder, "draining")
        drained_at = time.monotonic() + drain_s
        while time.monotonic() < drained_at and not (folder / "empty").exists():
            time.sleep(0.02)
        (folder / "drained").touch()


def _start(folder: Path, name: str, title: str | None = None) -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            _stay(folder, "engine")
        _stay(folder, name, title)


def _stay(folder: Path, name: str, title: str | None = None) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    Path("/proc/self/comm").write_text(name)
    if title is not None:
        setproctitle(title)
    _note(folder, name)
    while True:
        time.sleep(1000)


def _note(folder: Path, name: str) -> None:
    made = folder / f".{name}.{os.getpid()}"
    made.write_text(str(os.getpid()))
    made.rename(folder / name)


if __name__ == "__main__":
    main()
