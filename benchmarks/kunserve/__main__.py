"""Repeats KunServe's evaluation in the simulator: `python -m benchmarks.kunserve [--seeds 1] [--traces DIR] [--page]`.

Prints the contenders in all windows, variants of pairs, and the paper's claims with their verdicts; `--page` also
writes them into docs/evaluation.md. The windows of traces are played if DIR has these.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.evaluation.page import fill
from benchmarks.evaluation.words import table, text_table
from benchmarks.kunserve.claims import main_cases, row, variant, varied_cases, verdicts
from benchmarks.kunserve.results import Outcomes, simulated
from benchmarks.kunserve.windows import TRACED, PairWindow
from simulator.command.runs import available_processors

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"
TRACED_LOADS = {"burstgpt-like": 1.5, "azure-code": 1.0}
"""Requests for each of the trace."""
_FIGURES = (
    *("TTFT p50, p90, p99, p99.9, s", "TPOT, ms", "gaps, ms", "late", "preempted", "moves", "groups", "refused"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate, print, and renew the page if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kunserve", description=__doc__)
    add = parser.add_argument
    add("--seeds", type=int, default=1, metavar="N", help="runs of each case (default: %(default)s)")
    add("--traces", type=Path, metavar="DIR", help=f"folder with {', '.join(TRACED.values())}")
    add("--processes", type=int, default=available_processors(), metavar="N", help="parallel simulations")
    add("--page", action="store_true", help="write the tables into docs/evaluation.md")
    given = parser.parse_args(argv)
    windows = traced_windows(given.traces)
    found = simulated([*main_cases(windows), *varied_cases()], given.seeds, given.processes)
    parts = tables(found, windows)
    print("\n\n".join(parts.values()))
    if given.page:
        PAGE.write_text(fill(PAGE.read_text(), parts))


def traced_windows(folder: Path | None) -> list[PairWindow]:
    """The windows of traces in a folder."""
    if folder is None:
        return []
    return [PairWindow(name, load, "its own", folder) for name, load in TRACED_LOADS.items()]


def tables(found: Outcomes, windows: Sequence[PairWindow]) -> dict[str, str]:
    """The parts of the page by name."""
    contenders = [
        [f"{case.window.name} {case.window.rate:g}, {case.window.lengths}", str(case.contender), *row(found, case)]
        for case in main_cases(windows)
    ]
    varied = [
        [f"{case.window.name} {case.window.rate:g}", f"{case.contender}: {variant(case)}", *row(found, case)]
        for case in dict.fromkeys(varied_cases())
        if variant(case)
    ]
    claims = [[claim.text, finding.cell] for claim, finding in verdicts(found)]
    return {
        "kunserve-claims": text_table(("claim", "here"), claims),
        "kunserve-contenders": table(("window", "contender", *_FIGURES), contenders),
        "kunserve-variants": table(("window", "variant", *_FIGURES), varied),
    }


if __name__ == "__main__":
    main()
