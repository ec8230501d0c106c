"""The GPUs of each contender by level: `python -m benchmarks.sharing [NAME ...] [--folder DIR]`.

Prints two Markdown tables per workload: the fewest GPUs by level, and the service at one of the levels. With a folder,
the traces, the files of models and the outcomes are written there.

`python -m benchmarks.sharing --day FILE` draws a day of two models on one device instead, as PNG or SVG.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

from benchmarks.sharing.workloads import DAY, WORKLOADS, SharingWorkload
from simulator.command.options import plan_options
from simulator.models.cases import SharingCase, SharingContender, SharingPlan, perform_case, sharing_cases
from simulator.models.files import read_models
from simulator.models.outcome import SharedOutcome
from simulator.models.picture import draw_sharing
from simulator.models.report import read_sharing
from simulator.models.search import FoundDevices, best_cases

LEVELS_S = (0.25, 2.0, 5.0)
"""Levels of TTFT p99 over all requests, in seconds."""
SHOWN_S = 2.0
"""The level at which the service is shown."""
WARMUP_S = 300.0


def found_by_level(workload: SharingWorkload, folder: Path) -> dict[float, list[FoundDevices]]:
    """The best setting of each contender at each level."""
    plan = read_workload(workload, folder, WARMUP_S)

    @cache
    def perform(case: SharingCase, devices: int) -> SharedOutcome | None:
        outcome = perform_case(plan, case, devices, lambda now: None)
        ttft_s = None if outcome is None else outcome.whole.ttft_p99_s
        print(f"{workload.name}: {case.name}, {devices} GPUs: TTFT p99 {ttft_s}", file=sys.stderr, flush=True)
        return outcome

    def keeps(outcome: SharedOutcome, level_s: float) -> bool:
        return outcome.whole.ttft_p99_s is not None and outcome.whole.ttft_p99_s <= level_s

    most = len(workload.rates)
    return {
        level_s: best_cases(sharing_cases(), most, perform, lambda outcome, s=level_s: keeps(outcome, s))  # type: ignore[misc]
        for level_s in LEVELS_S
    }


def read_workload(workload: SharingWorkload, folder: Path, warmup_s: float) -> SharingPlan:
    """Write a workload to a folder, and read it as `mell plan` does."""
    trace, models = workload.write(folder)
    options = ["--models", str(models), "--ttft-p99", "1", "--warmup", str(warmup_s)]
    given = plan_options([str(trace), *options, "--horizon", str(workload.horizon_s)])
    plan, _ = read_sharing(given, read_models(models))
    return plan


def levels_table(found: dict[float, list[FoundDevices]]) -> Iterator[str]:
    """The mean number of GPUs of each contender by level, and that of a GPU per model as its multiple."""
    yield "| GPUs at TTFT p99 of at most | " + " | ".join(f"{level_s:g} s" for level_s in found) + " |"
    yield "|---" * (1 + len(found)) + "|"
    for contender in SharingContender:
        rows = [_of(each, contender) for each in found.values()]
        cells = (f"{row.outcome.gpus_mean:.1f}" if row is not None and row.kept else "-" for row in rows)
        yield f"| {contender} | " + " | ".join(cells) + " |"


def service_table(found: Sequence[FoundDevices]) -> Iterator[str]:
    """The service of each contender at one level."""
    yield "| | GPUs | GPU-seconds | TTFT p50, p99 | ITL p99 | Lost | Wakes, starts |"
    yield "|---|---|---|---|---|---|---|"
    for each in found:
        outcome, whole = each.outcome, each.outcome.whole
        kept = "" if each.kept else ", misses the level"
        ttft = f"{whole.ttft_p50_s or 0.0:.2f}, {whole.ttft_p99_s or 0.0:.2f} s"
        yield (
            f"| {each.case.name}{kept} | {outcome.gpus_mean:.1f} | {outcome.gpu_seconds:,.0f} | {ttft} | "
            f"{1e3 * (outcome.itl_p99_s or 0.0):.0f} ms | {whole.lost} | {outcome.wakes}, {outcome.starts} |"
        )


def _of(found: Sequence[FoundDevices], contender: SharingContender) -> FoundDevices | None:
    return next((each for each in found if each.case.contender is contender), None)


def main() -> None:
    """Perform and print."""
    parser = argparse.ArgumentParser(description="GPUs for several models, by contender and level.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="workloads (default: all)")
    parser.add_argument("--folder", type=Path, help="keep traces, files of models and outcomes here")
    parser.add_argument("--day", type=Path, metavar="FILE", help="only draw a day of two models on a device")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        if given.day is not None:
            draw_sharing(given.day, read_workload(DAY, folder, 0.0), devices=1, homes=1)
            return
        for workload in WORKLOADS:
            if given.names and workload.name not in given.names:
                continue
            found = found_by_level(workload, folder)
            kept = {f"{level_s:g}": [asdict(each) for each in rows] for level_s, rows in found.items()}
            (folder / f"{workload.name}.json").write_text(json.dumps(kept, indent=1) + "\n")
            print(f"\n{workload.name}\n")
            print("\n".join([*levels_table(found), "", *service_table(found[SHOWN_S])]), flush=True)


if __name__ == "__main__":
    main()
