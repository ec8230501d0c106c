"""The command line of the simulator: `python -m simulator --trace FILE --policy NAME`.

Exit status: 0 on success; 1 if the replay of a recording gives other plans; 2 for bad input; 130 on an interrupt.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from simulator.command.document import Document, document
from simulator.command.estimate import require_affordable
from simulator.command.listing import render_policies
from simulator.command.options import parser
from simulator.command.order import SimulationOrder, read_order
from simulator.command.replay import render_replay, replay
from simulator.command.runs import SimulationRun, perform_all
from simulator.command.text import render
from simulator.errors import BadInput, status_of
from simulator.models.report import report_sharing
from simulator.planning.report import report
from simulator.workload.workload import Job, Workload, draw

DIFFERENT = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and report. Returns the exit status."""
    given = parser().parse_args(argv)
    if given.list_policies:
        print(render_policies())
        return 0
    return status_of(lambda: perform(given))


def perform(given: Namespace) -> int:
    """Replay, plan or simulate as the parsed command line demands, and report. Returns the exit status.

    Raises:
        BadInput: input cannot be used.
    """
    if given.recording is not None:
        played = replay(given.recording)
        print(render_replay(played))
        return DIFFERENT if played.different else 0
    if given.models is not None:
        if not given.plan:
            raise BadInput("--models FILE needs --plan.")
        report_sharing(given)
        return 0
    order = read_order(given)
    if given.plan:
        report(order, given.quiet)
        return 0
    outcome = simulate(order, given.quiet)
    if order.json is not None:
        order.json.write_text(json.dumps(outcome, indent=1) + "\n")
    print(render(outcome))
    return 0


def simulate(order: SimulationOrder, quiet: bool) -> Document:
    """Perform all runs of an order, with a progress bar over their virtual seconds unless `quiet`."""
    require_affordable(order, (1 + len(order.policies)) * len(order.seeds), _sample_runs)
    workloads = [draw(order.recipe, seed) for seed in order.seeds]
    runs = order.runs(workloads)
    # A single run is not worth the start of a process.
    processes = min(order.processes, len(runs) - len(workloads))
    total_s = round(len(runs) * order.setup.horizon_s)
    with tqdm(total=total_s, unit=" virtual s", desc="simulated", disable=quiet) as bar:
        results = perform_all(runs, processes, lambda done_s: _show(bar, done_s))
    return document(order, workloads, results[: len(workloads)], results[len(workloads) :])


def _sample_runs(jobs: tuple[Job, ...], order: SimulationOrder) -> list[tuple[int, SimulationRun]]:
    """A run of every policy, for all seeds."""
    return [(len(order.seeds), run) for run in order.runs([Workload(order.seeds[0], jobs, 0)])]


def _show(bar: "tqdm[None]", done_s: float) -> None:
    bar.update(round(done_s) - bar.n)


if __name__ == "__main__":
    sys.exit(main())
