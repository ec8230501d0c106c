"""GPU-seconds and service quality of variants of the application on real traces.

    python -m benchmarks.economics --traces DIR      carry out the runs missing in --out, and print the tables
    python -m benchmarks.economics --report FILE     print the tables of a file of runs
    python -m benchmarks.economics --predict FILE    simulate the runs of a file, and compare
    python -m benchmarks.economics --foretell DIR    simulate the runs without carrying them out, --repeat seeds each
        --against FILE                               and compare their means with the ranges of the runs of a file
    python -m benchmarks.economics --frontier DIR    plan the windows: all contenders' settings, simulated

Variants: `mell` packs, migrates, opens and closes replicas with a fixed slack; `mell_slo` does so for a service level
(`--slo`), from which its reserve follows; `load_balance` migrates from the highest load to the lowest, and off the
least loaded replica where the others have room for its requests; `worst_fit` places where there is most room, opens and
closes, and never migrates; `pack_unmoved` packs arrivals, and never migrates; `constant` keeps `--constant` replicas,
places where there is most room, and never migrates; `serve` leaves the number of replicas to Serve, and `serve_quick`
does so with shorter delays; `kv` and `kv_quick` leave it to an autoscaler by KV utilisation with the same delays.
Replicas are paced (no GPU, no model). A run starts the application anew, and takes its warm-up and its window plus
about a minute; variants run in turns. Runs that are already in the file are not repeated.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from benchmarks.economics.case import (
    BASELINE,
    FOLLOWS_LEVEL,
    SCHEDULERS,
    Conditions,
    LiveCase,
    default_pace,
    read_level,
    read_window,
    turns,
)
from benchmarks.economics.figures import figures
from benchmarks.economics.frontier import print_frontier
from benchmarks.economics.measure import arrivals, perform
from benchmarks.economics.observed import LiveRun, missing
from benchmarks.economics.predict import calibration, costs_of, foretell, is_predictable, predict, predictable
from benchmarks.economics.report import RunFigures, compare, judge, render
from benchmarks.instruments.runs import append_runs, read_runs
from deployments.config import ServiceLevelSettings
from simulator.errors import BadInput
from simulator.replay.measurements import ReplaySample

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, report or predict; the exit status."""
    given = _parser().parse_args(argv)
    try:
        if given.foretell:
            print(_foretold(_cases(given, given.foretell), given.foretell, given.baseline, given.against))
        elif given.frontier:
            windows = {case.window: case for case in _cases(given, given.frontier)}
            for case in windows.values():
                print_frontier(case, arrivals(case, given.frontier))
        elif given.predict:
            print(_predicted(read_runs(given.predict, LiveRun)))
        elif given.report:
            print(_tables(read_runs(given.report, LiveRun), given.baseline))
        else:
            cases = _cases(given, given.traces)
            _measure(cases, given.traces, given.out, given.record, given.at_most)
            print(_tables([run for run in read_runs(given.out, LiveRun) if run.case in set(cases)], given.baseline))
    except BadInput as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("Interrupted; the runs that have ended are in the file.", file=sys.stderr)
        return INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.economics",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    usual = Conditions()
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--traces", type=Path, metavar="DIR", help="folder of the traces: run the missing cases")
    what.add_argument("--report", type=Path, metavar="FILE", help="print the tables of these runs")
    what.add_argument("--predict", type=Path, metavar="FILE", help="simulate these runs, and compare")
    what.add_argument("--foretell", type=Path, metavar="DIR", help="folder of the traces: simulate the cases")
    what.add_argument("--frontier", type=Path, metavar="DIR", help="folder of the traces: plan the windows")
    add = parser.add_argument
    add("--out", type=Path, default=Path("economics.jsonl"), help="file of runs (default: %(default)s)")
    add("--record", type=Path, metavar="DIR", help="folder for recordings of the scheduler's epochs, one file a run")
    add("--against", type=Path, metavar="FILE", help="runs whose ranges the means of --foretell are compared with")
    add("--variants", nargs="+", choices=SCHEDULERS, default=["mell", "worst_fit", "serve"])
    add(
        "--windows",
        nargs="+",
        default=["azure2023_conv:5:3", "azure2023_conv:28:3", "burstgpt_like_1400s:11:2"],
        metavar="TRACE:MINUTE[:SCALE]",
        help="traces, each with the minute of its warm-up's begin and a factor on its times (default: %(default)s)",
    )
    add("--repeat", type=int, default=3, help="runs of each variant and window (default: %(default)s)")
    add("--at-most", type=int, metavar="N", help="carry out no more than N of the missing runs (default: all)")
    add("--seconds", type=float, default=usual.seconds, help="length of a window (default: %(default)s)")
    add("--warmup", type=float, default=usual.warmup_s, help="seconds before it (default: %(default)s)")
    add("--token-scale", type=float, default=1.0, help="factor on lengths (default: %(default)s)")
    add("--max-replicas", type=int, default=usual.max_replicas, help="default: %(default)s")
    add(
        "--startup",
        type=float,
        default=usual.pace.startup_s,
        help="start-up time of an engine in seconds (default: %(default)s)",
    )
    add("--slack", type=float, default=usual.slack, help="free capacity, in replicas (default: %(default)s)")
    add(
        "--foresight",
        type=float,
        default=usual.foresight_s,
        help="seconds: keep the largest rise in demand within this time free (default: %(default)s)",
    )
    add(
        "--ongoing",
        type=int,
        default=usual.ongoing,
        help="target requests per replica of `serve` (default: %(default)s)",
    )
    add(
        "--kv-target",
        type=float,
        default=usual.kv_target,
        help="target of `kv`: KV cache in use, as a share (default: %(default)s)",
    )
    add(
        "--constant",
        type=int,
        default=usual.constant,
        metavar="N",
        help="replicas of `constant` (default: %(default)s)",
    )
    add(
        "--delays",
        type=float,
        nargs=2,
        metavar=("UP", "DOWN"),
        default=(usual.upscale_s, usual.downscale_s),
        help="delays of `serve_quick` and `kv_quick` in seconds (default: %(default)s)",
    )
    add(
        "--slo",
        metavar="LEVEL",
        help="service level of `mell_slo`: ttft_p99_s=S, itl_p99_ms=MS or both, separated by a comma",
    )
    add("--baseline", choices=SCHEDULERS, default=BASELINE, help="reference of the ratios (default: %(default)s)")
    return parser


def _cases(given: argparse.Namespace, traces: Path) -> list[LiveCase]:
    """The runs asked for. Raises `BadInput` now for a missing window, since its run may be days away."""
    level = read_level(given.slo) if given.slo else ServiceLevelSettings()
    if level.level is None and set(given.variants) & set(FOLLOWS_LEVEL):
        raise BadInput("mell_slo needs a service level: give --slo.")
    upscale_s, downscale_s = given.delays
    conditions = Conditions(
        warmup_s=given.warmup,
        seconds=given.seconds,
        max_replicas=given.max_replicas,
        slack=given.slack,
        foresight_s=given.foresight,
        ongoing=given.ongoing,
        kv_target=given.kv_target,
        constant=given.constant,
        upscale_s=upscale_s,
        downscale_s=downscale_s,
        ttft_p99_s=level.ttft_p99_s,
        itl_p99_ms=level.itl_p99_ms,
        pace=default_pace().model_copy(update={"startup_s": given.startup}),
    )
    windows = [read_window(text, given.token_scale) for text in given.windows]
    cases = turns(given.variants, windows, given.repeat, conditions)
    for window in windows:
        arrivals(next(case for case in cases if case.window == window), traces)
    return cases


def _measure(cases: Sequence[LiveCase], traces: Path, out: Path, record: Path | None, at_most: int | None) -> None:
    left = missing(cases, read_runs(out, LiveRun))
    with tqdm(total=len(cases), initial=len(cases) - len(left), unit="run", desc="economics") as bar:

        def show(now: ReplaySample) -> None:
            bar.set_postfix(at_s=round(now.at_s), running=now.running, done=now.finished, errors=now.errors)

        for case in left[:at_most]:
            bar.set_description(f"{case.variant} on {case.window.name}")
            append_runs(out, perform(case, traces, show, record))
            bar.update()


def _tables(runs: Sequence[LiveRun], baseline: str) -> str:
    """The tables of runs, separately for each set of conditions."""
    parts = []
    for conditions, members in _by_conditions(runs):
        results = [RunFigures(run.case, figures(run.observed, conditions)) for run in members]
        parts += [conditions.name, render(results, baseline)]
    return "\n\n".join(parts)


def _predicted(runs: Sequence[LiveRun]) -> str:
    known = predictable(runs)
    if not known:
        raise BadInput("There are no runs to simulate.")
    parts = []
    with tqdm(total=len(known), unit="run", desc="simulated") as bar:
        for conditions, members in _by_conditions(known):
            costs, results = costs_of(conditions.pace, members), []
            for run in members:
                results.append(RunFigures(run.case, figures(run.observed, conditions), predict(run, costs)))
                bar.update()
            parts += [conditions.name, calibration(costs), compare(results)]
    return "\n\n".join(parts)


def _foretold(cases: Sequence[LiveCase], traces: Path, baseline: str, against: Path | None) -> str:
    """The tables of simulated runs; the seed is the number of the repetition."""
    known = [case for case in cases if is_predictable(case)]
    results = [RunFigures(case, foretell(case, arrivals(case, traces), case.repeat)) for case in known]
    parts = [cases[0].conditions.name, render(results, baseline)]
    if against is not None:
        made = [RunFigures(run.case, figures(run.observed, run.case.conditions)) for run in read_runs(against, LiveRun)]
        parts.append(judge(made, results))
    return "\n\n".join(parts)


def _by_conditions(runs: Sequence[LiveRun]) -> list[tuple[Conditions, list[LiveRun]]]:
    found: dict[Conditions, list[LiveRun]] = {}
    for run in runs:
        found.setdefault(run.case.conditions, []).append(run)
    return list(found.items())


if __name__ == "__main__":
    sys.exit(main())
