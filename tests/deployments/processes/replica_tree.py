"""A stand-in for a replica's processes, without Ray and vLLM.

    python -m tests.deployments.processes.replica_tree FOLDER WORKERS

The replica starts its guard and an engine core, which starts workers. Each writes its id to a file of its name in
FOLDER, and then does nothing for good that it would end by itself: it ignores every signal that can be ignored, sees no
end of its parent, and one worker holds the interpreter in a C call.
"""

import ctypes
import os
import signal
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from deployments.processes.guard import start_guard


def main() -> None:
    """Become the replica."""
    folder, workers = Path(sys.argv[1]), int(sys.argv[2])
    start_guard()
    if os.fork() == 0:
        _engine_core(folder, workers)
    _stay(folder, "replica")


def _engine_core(folder: Path, workers: int) -> None:
    for i in range(workers):
        if os.fork() == 0:
            _worker(folder, i)
    _stay(folder, "core")


def _worker(folder: Path, rank: int) -> None:
    if rank == 0:
        memory = SharedMemory(create=True, size=64)  # starts a resource tracker
        (folder / "memory").write_text(memory.name)
    else:
        _note(folder, f"worker{rank}")
        ctypes.PyDLL(None).sleep(1000)  # with the interpreter's lock
    _stay(folder, f"worker{rank}")


def _stay(folder: Path, name: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _note(folder, name)
    while True:
        time.sleep(1000)


def _note(folder: Path, name: str) -> None:
    made = folder / f".{name}"
    made.write_text(str(os.getpid()))
    made.rename(folder / name)


if __name__ == "__main__":
    main()
