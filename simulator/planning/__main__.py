"""The command line of plans: `python -m simulator.planning TRACE --ttft-p99 S`; `mell plan` runs it.

Exit status: 0 on success; 2 for bad input; 130 on an interrupt.
"""

import sys
from collections.abc import Sequence

from simulator.command.options import plan_options
from simulator.command.order import read_order
from simulator.errors import status_of
from simulator.models.report import report_sharing
from simulator.planning.report import report


def main(argv: Sequence[str] | None = None) -> int:
    """Plan and report. Returns the exit status."""
    given = plan_options(argv)

    def plan() -> int:
        if given.models is None:
            report(read_order(given), given.quiet)
        else:
            report_sharing(given)
        return 0

    return status_of(plan)


if __name__ == "__main__":
    sys.exit(main())
