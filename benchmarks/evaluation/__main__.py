"""Renews the tables and figures of the evaluation page: `python -m benchmarks.evaluation --traces DIR`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.evaluation.page import cases, write
from benchmarks.evaluation.runs.case import Case
from benchmarks.evaluation.runs.scale import FAST, FULL
from benchmarks.evaluation.runs.store import FailedRun, Store, carry_out
from benchmarks.evaluation.style import Pictures
from policies.rules.registry import policy
from simulator.command.runs import available_processors
from simulator.errors import BadInput

ROOT = Path(__file__).parents[2]
KEPT = ROOT / ".figures"
MOST_PROCESSES = 2
IMPOSSIBLE, FAILED, INTERRUPTED = 2, 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out the missing runs and renew the page; the exit status."""
    given = _parser().parse_args(argv)
    scale = FAST if given.fast else FULL
    folder = KEPT / "fast" if given.fast else ROOT / "docs"
    wanted = cases(scale)
    try:
        _check(wanted, given.traces)
        _keep_out_of_git()
        results = carry_out(Store(KEPT / "runs", given.traces), wanted, given.processes)
    except (BadInput, FailedRun) as error:
        print(error, file=sys.stderr)
        return IMPOSSIBLE if isinstance(error, BadInput) else FAILED
    except KeyboardInterrupt:
        print("Interrupted; the runs that have ended are kept.", file=sys.stderr)
        return INTERRUPTED
    kept, page = ROOT / "docs" / "evaluation.md", folder / "evaluation.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(write(kept.read_text(), results, scale, Pictures(folder / "evaluation", "evaluation")))
    print(f"{page}: from {len(wanted)} runs that took {sum(results.cpu_s.values()):,.0f} s of processor time")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evaluation", description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR", help="folder of the traces and lengths")
    parser.add_argument("--fast", action="store_true", help="fewer seeds and shorter runs, written to .figures/fast")
    parser.add_argument(
        "--processes",
        type=int,
        default=min(MOST_PROCESSES, available_processors()),
        metavar="N",
        help="concurrent runs (default: %(default)s)",
    )
    return parser


def _check(wanted: Sequence[Case], traces: Path) -> None:
    """Raise `BadInput` for missing files and unknown policies, before the first run."""
    missing = sorted({file for case in wanted for file in case.files if not (traces / file).is_file()})
    if missing:
        raise BadInput(f"{traces} does not have {', '.join(missing)}.")
    for spec in dict.fromkeys(case.policy for case in wanted):
        try:
            policy(spec)
        except ValueError as error:
            raise BadInput(f"The report needs the policy {spec}: {error}.") from None


def _keep_out_of_git() -> None:
    KEPT.mkdir(exist_ok=True)
    (KEPT / ".gitignore").write_text("*\n")


if __name__ == "__main__":
    sys.exit(main())
