"""Starts Mell as `serve run` does, and has it end as a service must.

    python -m app.serve [OPTIONS OF serve run] CONFIG

SIGTERM, SIGINT and SIGHUP drain the application: nothing new is taken, streams have the grace period to end, then all
that was started ends. A second one ends it at once, and so does the death of this process, of the command or of the
keeper between them (`deployments.processes.keeper`), by whatever cause.

On a cluster that was there before (`ray start`, RAY_ADDRESS), the application outlives this command, unless that is
ended by SIGINT (Ctrl-C), which takes it down.
"""

import signal
import sys
from collections.abc import Sequence

from app.configuration.documents import unusable
from deployments.processes.keeper import DRAIN_S, end_descendants, exit_status, keep
from deployments.processes.table import adopt_orphans, end_with_parent

_WITH_PARENT = "--with-parent"
"""First of the arguments: have the kernel send SIGTERM when the process that started this one ends, as make may."""


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
    """Run the command until all its descendants have ended. Returns its exit status.

    Meanwhile, signals are forwarded to its keeper, and orphans become this process's children.
    """
    adopt_orphans()
    keeper = keep(command, drain_s)

    def forward(number: int, frame: object) -> None:
        keeper.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or the background of a script
            signal.signal(number, forward)
    status = keeper.wait()
    end_descendants()
    return exit_status(status)


if __name__ == "__main__":
    main()
