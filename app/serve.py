"""Starts Mell as `serve run` does, and has it end as a service must.

    python -m app.serve [OPTIONS OF serve run] CONFIG

SIGTERM, SIGINT and SIGHUP drain the application: nothing new is taken, streams have the grace period to end, then all
that was started ends. A second one ends it at once, and so does the death of this process, of the command or of the
keeper between them (`deployments.processes.keeper`), by whatever cause.

An application that cannot start ends the command, with status 1: `serve run` itself would wait for ever.

On a cluster that was there before (`ray start`, RAY_ADDRESS), the application outlives this command, unless that is
ended by SIGINT (Ctrl-C), which takes it down.

Everything that the command and its cluster write goes to a file; what a user can act on is shown (`app.console`).
"""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO

from app.configuration.documents import unusable
from app.console import Console
from app.tinymodel import cache_root
from deployments.processes.keeper import DRAIN_S, end_descendants, exit_status, keep
from deployments.processes.table import adopt_orphans, end_with_parent

_WITH_PARENT = "--with-parent"
"""First of the arguments: have the kernel send SIGTERM when the process that started this one ends, as make may."""

IDLE = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
    "RAY_task_events_report_interval_ms": "10000",
    "REPORTER_UPDATE_INTERVAL_MS": "15000",
    "METRICS_RECORD_INTERVAL_S": "30",
    "LOG_NAME_UPDATE_INTERVAL_S": "2",
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
}
"""Ray's and Serve's intervals, where their defaults cost processor time without a request (docs/operations.md "Idle").
Variables that are set stay."""

_KEPT = 9
"""The number of files of earlier starts that are kept."""

_MAX_BYTES = 64 << 20
"""The size of a file after which another one is begun; one earlier one is kept."""

_ERRORS_S = 1.0
"""The time for the lines that follow the error that ends a start."""

_STOPPING = "stopping: running answers have time to end; a second signal stops at once"

_TAIL = 30
"""The number of last hidden lines that are shown after an end that nobody requested."""


def main() -> None:
    """Exits with the status of `serve run`; 0 if it was ended on request."""
    arguments = sys.argv[1:]
    if arguments and (error := unusable(arguments[-1])) is not None:
        sys.exit(error)
    if arguments[:1] == [_WITH_PARENT]:
        arguments.pop(0)
        end_with_parent()
    sys.exit(run_kept(["serve", "run", *arguments]))


def run_kept(command: Sequence[str], drain_s: float = DRAIN_S) -> int:
    """Run the command until all its descendants have ended. Returns its exit status, or 1 if Serve gave its start up.

    Meanwhile, signals are forwarded to its keeper, and orphans become this process's children.
    """
    adopt_orphans()

    def give_up() -> None:
        output.end("the application could not start; the first error above is the reason")
        keeper.send_signal(signal.SIGTERM)

    output = CommandOutput(_folder(), threading.Timer(_ERRORS_S, give_up).start)
    read_end, write_end = os.pipe()
    # Ray would hold lines that it takes for repetitions back for seconds.
    keeper = keep(command, drain_s, IDLE | os.environ | {"RAY_DEDUP_LOGS": "0"}, write_end)
    os.close(write_end)

    def forward(number: int, frame: object) -> None:
        output.end()
        keeper.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or the background of a script
            signal.signal(number, forward)
    lines = os.fdopen(read_end, errors="replace", newline="\n")  # A progress bar is one line.
    reader = threading.Thread(target=output.read, args=(lines,), name="mell-output")
    reader.start()
    status = keeper.wait()
    end_descendants()
    reader.join()  # the processes that wrote have ended
    output.close(exit_status(status))
    return 1 if output.has_failed else exit_status(status)


def _folder() -> Path:
    """The folder of outputs: in the cache or, if that cannot be written, a temporary one."""
    folder = cache_root() / "logs"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix="mell-logs-"))


class CommandOutput:
    """The lines of the command and its cluster: all in a file, the chosen ones on the terminal.

    `on_failure` is called once Serve has given up the start of the application.
    """

    def __init__(self, folder: Path, on_failure: Callable[[], None]) -> None:
        """Raises OSError if there can be no file in the folder."""
        for old in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)[:-_KEPT]:
            old.unlink(missing_ok=True)
        self.path = folder / f"serve-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        self._file = RotatingFileHandler(self.path, maxBytes=_MAX_BYTES, backupCount=1, encoding="utf-8")
        self._console = Console()
        self._hidden: deque[str] = deque(maxlen=_TAIL)
        self._is_open = True
        self._on_failure = on_failure
        self._show(f"starting; all output goes to {self.path}")

    @property
    def has_failed(self) -> bool:
        """True once Serve has given up the start of the application."""
        return self._console.has_failed

    def read(self, lines: IO[str]) -> None:
        """Handle all lines until the last process that writes has ended."""
        with lines:
            for line in lines:
                self._file.emit(logging.makeLogRecord({"msg": line.rstrip("\n")}))
                had_failed = self.has_failed
                chosen = list(self._console.choose(line))
                for each in chosen:
                    self._show(each)
                if not chosen:
                    self._hidden.append(line)
                if self.has_failed and not had_failed:
                    self._on_failure()

    def end(self, why: str = _STOPPING) -> None:
        """Called when an end is requested, with the line to show."""
        if not self._console.ends:
            self._console.ends = True
            self._show(why)

    def close(self, status: int) -> None:
        """Show how it ended, with the last lines if nobody requested it."""
        if self._console.ends:
            self._show("stopped")
        elif status:
            self._show(f"ended with status {status}; the last other lines in {self.path}:")
            for line in self._hidden:
                self._show(f"  {line.rstrip()}")
        self._file.close()

    def _show(self, line: str) -> None:
        """Print a line, as long as there is a terminal."""
        try:
            if self._is_open:
                print(f"mell: {line}" if line[:1].strip() else line, flush=True)
        except OSError:
            self._is_open = False


if __name__ == "__main__":
    main()
