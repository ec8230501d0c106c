"""Repeats MemServe's evaluation in the simulator: `python -m benchmarks.memserve [--seeds 2] [--page]`.

Prints a table of all settings and the paper's claims with their verdicts; `--page` also writes both into
docs/evaluation.md. The times of the index are processor time on this machine; all else is virtual time.

`--live FILE` instead runs the settings of a pair of replicas on live paced engines, as far as FILE lacks these runs,
and prints them beside simulated ones; 20 minutes for each of `--seeds`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.evaluation.page import fill
from benchmarks.evaluation.words import share, table, text_table
from benchmarks.memserve import live
from benchmarks.memserve.case import RATES, SCHEDULED, SHARES, STEPS, TRIPLE, PaperCase
from benchmarks.memserve.claims import cases, scheduled, verdicts
from benchmarks.memserve.results import Figures, simulated
from policies.prefix.routing import Routing
from simulator.command.runs import available_processors

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate, print, and renew the page if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memserve", description=__doc__)
    add = parser.add_argument
    add("--seeds", type=int, default=2, metavar="N", help="runs of each case (default: %(default)s)")
    add("--processes", type=int, default=available_processors(), metavar="N", help="parallel simulations")
    add("--live", type=Path, metavar="FILE", help="file of live runs, to which missing ones are appended")
    add("--page", action="store_true", help="write the tables into docs/evaluation.md")
    given = parser.parse_args(argv)
    parts = (
        live.tables(live.measure(given.live, given.seeds))
        if given.live
        else tables(simulated(cases(), given.seeds, given.processes))
    )
    print("\n\n".join(parts.values()))
    if given.page:
        PAGE.write_text(fill(PAGE.read_text(), parts))


def tables(found: Figures) -> dict[str, str]:
    """The parts of the page by name."""
    header = ["workload", "requests/s", "setting", *("JCT, s", "TTFT, ms", "TPOT, ms", "hits", "MB/s moved")]
    rows = [
        [workload, f"{rate:g}", setting.name, *_cells(found, PaperCase(setting, workload, rate))]
        for workload, rates in RATES.items()
        for rate in rates
        for setting in TRIPLE
    ]
    rows += [
        ["sharegpt_like", f"{rate:g}", setting.name, *_cells(found, PaperCase(setting, "sharegpt_like", rate))]
        for rate in RATES["sharegpt_like"]
        for setting in STEPS
    ]
    studied = [
        ["loogle_like", f"share {ratio}", f"{SCHEDULED.name}, {routing}", *_cells(found, scheduled(ratio, routing))]
        for ratio in SHARES
        for routing in (Routing.SESSION, Routing.TREE)
    ]
    claims = [[claim.text, finding.cell] for claim, finding in verdicts(found)]
    return {
        "memserve-settings": table(header, [*rows, *studied]),
        "memserve-claims": text_table(("claim", "here"), claims),
    }


def _cells(found: Figures, case: PaperCase) -> list[str]:
    figures = found[case]
    return [
        f"{figures.jct:.2f}, {figures.jct_p99:.1f}",
        f"{figures.ttft * 1e3:.0f}, {figures.ttft_p99 * 1e3:.0f}",
        f"{figures.tpot * 1e3:.1f}, {figures.tpot_p99 * 1e3:.0f}",
        share(figures.hits, 0) if case.setting.cached else "",
        f"{figures.moved / 1e6:,.0f}" if case.setting.prefills else "",
    ]


if __name__ == "__main__":
    main()
