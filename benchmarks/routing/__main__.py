"""Routing by content.

    python -m benchmarks.routing                     the processor time of placements, by size of the cluster
    python -m benchmarks.routing --live FILE         sessions on live paced replicas, once per system and seed, as far
                                                     as FILE lacks them, and tables of all runs
    python -m benchmarks.routing --report FILE       the tables of a file of runs
    python -m benchmarks.routing --predict [FILE]    the simulator on the same sessions, beside the runs of a file

`--workloads mooncake --traces DIR` adds four minutes of Mooncake's trace, with lengths divided by 16, in a third of the
time.

Systems are Mell's routings, and routers of Ray in a plain Serve application over the same engines, without an HTTP
server: the client calls it by a handle. A system takes four minutes for three workloads.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.instruments.runs import append_runs, read_runs
from benchmarks.routing.case import MOONCAKE, PACE, RATES, ROOMY, WORKLOADS, System, case
from benchmarks.routing.live import RoutingRun, perform
from benchmarks.routing.placing import show_placements
from benchmarks.routing.predict import predict
from benchmarks.routing.report import compare, render
from simulator.errors import BAD_INPUT, BadInput


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, report or predict; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.routing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--replicas", type=int, nargs="+", default=[10, 100], metavar="N", help="cluster sizes for placements")
    add("--arrivals", type=int, default=3000, metavar="N", help="placements per size (default: %(default)s)")
    add("--live", type=Path, metavar="FILE", help="file of runs, which are appended to it")
    add("--report", type=Path, metavar="FILE", help="print the tables of these runs")
    add("--predict", type=Path, nargs="?", const=Path(), metavar="FILE", help="simulate, and compare with these runs")
    add("--systems", nargs="+", choices=[*System], default=[*System], type=System, help="default: all")
    add("--workloads", nargs="+", choices=WORKLOADS, default=list(RATES), help="default: all sessions")
    add("--traces", type=Path, metavar="DIR", help=f"folder of the trace for {MOONCAKE}")
    add("--seeds", type=int, nargs="+", default=[0], metavar="N", help="default: 0")
    add("--at-most", type=int, metavar="N", help="start no more than N systems (default: all)")
    given = parser.parse_args(argv)
    try:
        if given.live:
            _measure(given.live, given.systems, given.workloads, given.seeds, given.traces, given.at_most)
        if given.live or given.report:
            print(render(read_runs(given.live or given.report, RoutingRun), System.TREE))
        elif given.predict is not None:
            _predict(given.predict, given.systems, given.workloads, given.seeds, given.traces)
        else:
            show_placements(given.replicas, given.arrivals)
    except BadInput as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    return 0


def _measure(
    path: Path,
    systems: Sequence[System],
    workloads: Sequence[str],
    seeds: Sequence[int],
    traces: Path | None,
    at_most: int | None,
) -> None:
    """Carry out the missing runs: all systems in turn, seed by seed, workloads on equal engines together."""
    started = 0
    for seed in seeds:
        cases = [case(workload, seed, traces) for workload in workloads]
        for system in systems:
            done = {(run.system, run.workload, run.seed) for run in read_runs(path, RoutingRun)}
            missing = [each for each in cases if (system, each.workload, seed) not in done]
            for same in ([each for each in missing if each.pace == pace] for pace in (PACE, ROOMY)):
                if same and (at_most is None or started < at_most):
                    started += 1
                    append_runs(path, *perform(system, same))


def _predict(
    path: Path, systems: Sequence[System], workloads: Sequence[str], seeds: Sequence[int], traces: Path | None
) -> None:
    measured = read_runs(path, RoutingRun) if path.is_file() else []
    simulated = [
        predict(system, each)
        for each in [case(workload, seed, traces) for workload in workloads for seed in seeds]
        for system in systems
        if system.routing is not None
    ]
    print(render(simulated, System.TREE))
    if measured:
        print("\n" + compare(measured, simulated))


if __name__ == "__main__":
    sys.exit(main())
