"""Windows of six kinds of traffic, served by Mell with its default settings and by constant numbers of replicas.

    python -m benchmarks.windows [--kinds steady,wave] [--seeds 1 2 3] [--autoscalers] [--processes 2] [--json FILE]
    python -m benchmarks.windows --write DIR [--kinds steady,wave] [--seeds 1 2 3]

Requests arrive by a Poisson process of a rate that may vary, with lengths from log-normal distributions: half an hour,
after ten minutes of warm-up. Constant numbers are those of the simulated fleet behind a router that knows every
replica's KV cache at each arrival, without delay. Of these the table has the smallest that keeps the level; none if
none up to `MOST` does. All runs of a window serve the same requests.

With `--autoscalers`, Ray Serve's rule, one by KV utilisation, and one that knows the load one start ahead serve the
windows, too, behind the same router and at every one of `SETTINGS`. A target of Serve's rule is a share of the requests
that fill a replica in the mean of the window, so that one setting means the same in small and in large caches.

With `--write`, the windows with their warm-ups are written as traces `KIND_SEED.csv.gz` instead, for `mell plan` and
`benchmarks.economics`.
"""

import argparse
import csv
import gzip
import json
import sys
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import accumulate, product
from math import cos, log, pi
from pathlib import Path
from random import Random

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from policies.cost.service import ServiceLevel
from policies.decision.limits import Limits
from policies.model import RequestId, Tokens
from simulator.autoscaling.rule import FleetRouter, LoadMeasure, ScalingRule
from simulator.command.order import LIVE_COOLDOWN_S
from simulator.costs.costs import Costs, read_costs
from simulator.outcome.metrics import Window
from simulator.outcome.service import PlannedLevels, ServiceOutcome
from simulator.planning.cases import (
    DEFAULT,
    SHORT,
    SHORTEST,
    TITLES,
    Contender,
    Delays,
    autoscaler_case,
    look_ahead_case,
    targets_of,
)
from simulator.planning.perform import PlanRun
from simulator.workload.workload import Job
from simulator.world.setup import Setup

LEVEL = ServiceLevel(ttft_p99_s=3.0, itl_p99_s=0.2)
COSTS = "a100-40g-13b-pcie"
STARTUP_S = 20.0
WARMUP_S, LENGTH_S = 600.0, 1800.0
MOST = 16
"""The largest constant number of replicas that is tried."""
CONSTANT = ScalingRule(LoadMeasure.KV, 1e9, 0.0, 1e9, 10.0, 2.0, router=FleetRouter.LEAST_KV)
"""A rule that never changes the number of replicas."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of an autoscaler: its target, as a share of a full replica, and its delays."""

    contender: Contender
    fill: float
    delays: Delays

    def __str__(self) -> str:
        return f"{self.fill:.0%}, {self.delays}"


FILLS = 0.5, 0.7, 0.85
SETTINGS = (
    *(
        Setting(*each)
        for each in product((Contender.SERVE, Contender.KV), FILLS, (SHORT, replace(SHORT, down_s=120.0), DEFAULT))
    ),
    *(Setting(Contender.LOOK_AHEAD, fill, SHORTEST) for fill in FILLS),
)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal distribution of lengths in tokens, cut off at `most`."""

    median: int
    sigma: float
    most: int

    def draw(self, rng: Random) -> int:
        """One length, at least 1."""
        return max(1, min(self.most, round(rng.lognormvariate(log(self.median), self.sigma))))


@dataclass(frozen=True, slots=True)
class WindowKind:
    """A kind of window: requests per second by time and seed, the largest such rate, lengths, and tokens of KV per
    replica.
    """

    rate: Callable[[float, int], float]
    peak: float
    prompts: LogNormal
    outputs: LogNormal
    capacity: Tokens = Tokens(13_698)


_CHAT = LogNormal(200, 1.2, 6000), LogNormal(200, 1.0, 4000)


@cache
def _switches(seed: int) -> Sequence[float]:
    """Times at which irregular bursts begin and end in turn: 70 s without and 50 s with requests in the mean."""
    rng = Random(f"{seed}-switches")
    return tuple(accumulate(rng.expovariate(1 / (50 if index % 2 else 70)) for index in range(1000)))


KINDS = {
    "steady": WindowKind(lambda t, seed: 4.0, 4.0, *_CHAT),
    "onoff": WindowKind(lambda t, seed: 6.0 if t % 120 < 50 else 0.02, 6.0, *_CHAT),
    "irregular": WindowKind(lambda t, seed: 6.0 if bisect(_switches(seed), t) % 2 else 0.02, 6.0, *_CHAT),
    "wave": WindowKind(lambda t, seed: 5.3 - 5.0 * cos(2 * pi * t / 1800), 10.3, *_CHAT),
    "decode": WindowKind(
        lambda t, seed: 3.0 if t % 300 < 60 else 0.5, 3.0, LogNormal(80, 0.8, 1000), LogNormal(700, 0.7, 6000)
    ),
    "tiny": WindowKind(lambda t, seed: 9.0, 9.0, LogNormal(24, 0.6, 200), LogNormal(30, 0.6, 200), Tokens(700)),
}
"""Even arrivals, 50 s of every 120 s, the same without a period, a day in half an hour, bursts of long answers, tiny
requests."""


@dataclass(frozen=True, slots=True)
class Served:
    """One run in its window; times are 99th percentiles. `moves` are by the values of their reasons."""

    name: str
    gpu_seconds: float
    ttft_s: float
    itl_s: float
    moves: Mapping[str, int]
    preemptions: int
    keeps: bool

    @property
    def moved(self) -> int:
        """The number of moves."""
        return sum(self.moves.values())


@dataclass(frozen=True, slots=True)
class WindowResult:
    """One window: its kind and seed, Mell, and the least constant number that keeps the level, if any does.

    `autoscalers` are those of `SETTINGS`, in their order, or none.
    """

    kind: str
    seed: int
    mell: Served
    constant: Served | None
    autoscalers: Sequence[Served] = ()

    @property
    def ratio(self) -> float | None:
        """Mell's GPU-seconds as a multiple of the constant number's."""
        return None if self.constant is None else self.mell.gpu_seconds / self.constant.gpu_seconds

    @property
    def saved(self) -> float:
        """The GPU-seconds that Mell saves against the constant number; below zero if it takes more."""
        return 0.0 if self.constant is None else self.constant.gpu_seconds - self.mell.gpu_seconds


def jobs_of(kind: WindowKind, seed: int, until_s: float) -> tuple[Job, ...]:
    """The requests of a window, by arrival. No prompt takes more than half a KV cache, and each request fits in one."""
    rng, arrivals = Random(f"{seed}-lengths"), _arrivals(kind, seed, until_s)
    jobs = []
    for index, at in enumerate(arrivals):
        prompt = min(kind.prompts.draw(rng), kind.capacity // 2)
        output = min(kind.outputs.draw(rng), kind.capacity - prompt)
        jobs.append(Job(RequestId(f"r{index}"), at, Tokens(prompt), Tokens(output)))
    return tuple(jobs)


def _arrivals(kind: WindowKind, seed: int, until_s: float) -> Iterator[float]:
    """The times of a Poisson process of varying rate, by thinning one of the largest rate."""
    rng = Random(f"{seed}-arrivals")
    now = rng.expovariate(kind.peak)
    while now < until_s:
        if rng.random() * kind.peak < kind.rate(now, seed):
            yield now
        now += rng.expovariate(kind.peak)


def write_trace(path: Path, jobs: Sequence[Job]) -> None:
    """Write requests as a trace: times in seconds, lengths in tokens."""
    with gzip.open(path, "wt", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("arrival_s", "prompt_tokens", "output_tokens"))
        rows.writerows((f"{job.arrival_s:.3f}", job.prompt, job.output) for job in jobs)


def serve(name: str, seed: int, window: Window, costs: Costs, settings: Sequence[Setting] = ()) -> WindowResult:
    """Serve one window by Mell, by autoscalers, and by constant numbers from one upwards until the level is kept."""
    kind = KINDS[name]
    jobs = jobs_of(kind, seed, window.horizon_s)
    setup = Setup(
        kind.capacity,
        horizon_s=window.horizon_s,
        service=LEVEL,
        limits=Limits(cooldown_s=LIVE_COOLDOWN_S),
        moves_at_once=32,
        moves_per_replica=4,
    )
    run = PlanRun("pack", seed, jobs, setup, window, costs)
    mell = _served("mell", run)
    autoscalers = [_served(str(setting), _autoscaled(setting, run)) for setting in settings]
    for number in range(1, MOST + 1):
        fixed = replace(setup, min_replicas=number, max_gpus=number, service=None)
        constant = _served(f"constant {number}", replace(run, rule=CONSTANT, setup=fixed))
        if constant.keeps:
            return WindowResult(name, seed, mell, constant, autoscalers)
    return WindowResult(name, seed, mell, None, autoscalers)


def _autoscaled(setting: Setting, run: PlanRun) -> PlanRun:
    """The run under an autoscaler."""
    if setting.contender is Contender.LOOK_AHEAD:
        case = look_ahead_case(run.setup, run.costs, setting.fill)
        return replace(run, rule=case.rule, setup=case.setup)
    full = targets_of(setting.contender, run.setup, run.jobs, (setting.fill,))
    case = autoscaler_case(run.setup, run.costs, setting.contender, full[0], setting.delays, FleetRouter.LEAST_KV)
    return replace(run, rule=case.rule, setup=case.setup)


def _served(name: str, run: PlanRun) -> Served:
    found: ServiceOutcome = run.perform(lambda now: None).whole
    keeps = found.keeps(PlannedLevels(LEVEL))
    itl_s = found.itl_p99_s or 0.0
    moves = {reason.value: count for reason, count in sorted(found.moves_by_reason.items())}
    return Served(name, found.gpu_seconds, found.ttft_p99_s or 0.0, itl_s, moves, found.preemptions, keeps)


def render(results: Sequence[WindowResult]) -> str:
    """A table of the windows, below it what they come to, the moves by reason, and the autoscalers' best settings."""
    rows = [
        "kind      seed  Mell GPU-s  TTFT p99  ITL p99  moves  level   constant  GPU-s  TTFT p99  ratio  moves/saved"
    ]
    for each in results:
        mell, constant = each.mell, each.constant
        row = (
            f"{each.kind:<8}  {each.seed:>4}  {mell.gpu_seconds:>10,.0f}  {mell.ttft_s:>6.2f} s  "
            f"{mell.itl_s * 1e3:>4.0f} ms  {mell.moved:>5}  {'kept' if mell.keeps else 'missed':<6}"
        )
        if constant is None:
            row += f"  none up to {MOST} keeps the level"
        else:
            number = constant.name.removeprefix("constant ")
            row += f"  {number:>8}  {constant.gpu_seconds:>5,.0f}  {constant.ttft_s:>6.2f} s  {each.ratio:>5.2f}"
            row += f"  {mell.moved / each.saved:>11.2f}" if each.saved > 0 else f"  {'-':>11}"
        rows.append(row)
    pairs = [(each.mell, each.constant) for each in results if each.constant is not None]
    if pairs:
        kept = sum(mell.keeps for mell, _ in pairs)
        ratio = sum(mell.gpu_seconds for mell, _ in pairs) / sum(constant.gpu_seconds for _, constant in pairs)
        rows.append(
            f"Mell keeps the level in {kept} of {len(pairs)} windows in which a constant number keeps it, "
            f"with {ratio:.2f} of the GPU-seconds of each window's best constant number."
        )
        if (saved := sum(each.saved for each in results)) > 0:
            moves = sum(mell.moved for mell, _ in pairs)
            rows.append(f"It makes {moves:,} moves, {moves / saved:.2f} for each GPU-second that it saves.")
    return "\n".join([*rows, *_reasons(results), *_autoscalers(results)])


def _reasons(results: Sequence[WindowResult]) -> Iterator[str]:
    """A table of Mell's moves by reason, with the preemptions that were left."""
    total: Counter[str] = Counter()
    for each in results:
        total.update(each.mell.moves)
    yield ""
    yield "kind      seed" + "".join(f"  {reason:>9}" for reason in total) + "  preempted"
    for each in results:
        counts = "".join(f"  {each.mell.moves.get(reason, 0):>9,}" for reason in total)
        yield f"{each.kind:<8}  {each.seed:>4}{counts}  {each.mell.preemptions:>9,}"
    counts = "".join(f"  {count:>9,}" for count in total.values())
    yield f"{'all':<14}{counts}  {sum(each.mell.preemptions for each in results):>9,}"


def _autoscalers(results: Sequence[WindowResult]) -> Iterator[str]:
    """For every autoscaler, its best setting for all windows together, and the best one of each window."""
    for contender in (Contender.SERVE, Contender.KV, Contender.LOOK_AHEAD):
        runs = {
            setting: [each.autoscalers[index] for each in results]
            for index, setting in enumerate(SETTINGS)
            if setting.contender is contender and all(each.autoscalers for each in results)
        }
        if not runs:
            return
        best = min(runs, key=lambda setting: (-_kept(runs[setting]), _used(runs[setting])))
        mell = _used([each.mell for each in results])
        yield ""
        yield (
            f"{TITLES[contender]}, best single setting ({best}): level kept in {_kept(runs[best])} of {len(results)} "
            f"windows, Mell takes {mell / _used(runs[best]):.2f} of its GPU-seconds."
        )
        for each, row in zip(results, zip(*runs.values(), strict=True), strict=True):
            kept = [served for served in row if served.keeps]
            text = "no setting keeps the level"
            if kept:
                own = min(kept, key=lambda served: served.gpu_seconds)
                ratio = each.mell.gpu_seconds / own.gpu_seconds
                text = f"{own.gpu_seconds:>6,.0f} GPU-s, TTFT p99 {own.ttft_s:.2f} s with {own.name}; ratio {ratio:.2f}"
            yield f"{each.kind:<8}  {each.seed:>4}  {text}"


def _kept(runs: Sequence[Served]) -> int:
    return sum(served.keeps for served in runs)


def _used(runs: Sequence[Served]) -> float:
    return sum(served.gpu_seconds for served in runs)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the windows and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.windows", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of windows (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="one window of each kind per seed")
    parser.add_argument("--startup-s", type=float, default=STARTUP_S, help="seconds of a start (default: %(default)g)")
    parser.add_argument("--length-s", type=float, default=LENGTH_S, help="seconds of a window (default: %(default)g)")
    parser.add_argument("--warmup-s", type=float, default=WARMUP_S, help="seconds before it (default: %(default)g)")
    parser.add_argument("--autoscalers", action="store_true", help="serve the windows by autoscalers, too")
    parser.add_argument("--processes", type=int, default=2, help="runs at the same time (default: %(default)s)")
    parser.add_argument("--write", type=Path, metavar="DIR", help="write the windows as traces to this folder instead")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    given = parser.parse_args(argv)
    kinds = given.kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"there is no kind {unknown[0]!r}: the kinds are {', '.join(KINDS)}")
    window = Window(given.warmup_s, given.warmup_s + given.length_s)
    windows = [(kind, seed) for kind in kinds for seed in given.seeds]
    if given.write is not None:
        for kind, seed in windows:
            write_trace(given.write / f"{kind}_{seed}.csv.gz", jobs_of(KINDS[kind], seed, window.horizon_s))
        return 0
    costs = replace(read_costs(COSTS), startup_s=given.startup_s)
    settings = SETTINGS if given.autoscalers else ()
    with ProcessPoolExecutor(given.processes) as pool:
        results = list(
            tqdm(pool.map(partial(_serve_pair, window, costs, settings), windows), total=len(windows), unit="window")
        )
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")
    print(render(results))
    return 0


def _serve_pair(window: Window, costs: Costs, settings: Sequence[Setting], pair: tuple[str, int]) -> WindowResult:
    return serve(*pair, window, costs, settings)


if __name__ == "__main__":
    sys.exit(main())
