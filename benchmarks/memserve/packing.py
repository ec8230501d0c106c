"""The number of replicas if requests that share blocks count them once, against sizes in full.

    python -m benchmarks.memserve.packing                    simulated GPUs
    python -m benchmarks.memserve.packing --live FILE        paced replicas under Ray Serve; runs are appended to FILE
    python -m benchmarks.memserve.packing --report FILE      the table of these runs

Every run is made twice, with `scheduler.sizes: blind` and `marginal`, by the policy `pack` and with moves within the
live limits. What is kept free differs:

    live     the largest recent rise within a start-up, by default; an empty replica lingers for a start-up
    slack    one replica
    nothing  new replicas open only once something waits

The bound is the least number of replicas that the workload's requests need at a time, with shared blocks once.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from app.client.documents import StateDocument, parse_state
from benchmarks.instruments.runs import append_runs, read_runs, simulate_all
from benchmarks.load import percentile
from benchmarks.routing.case import RoutedRequest, with_answers
from benchmarks.routing.live import PORT, RoutedAnswer, ask_mell, send
from benchmarks.servers import mell
from deployments.engine.pace import Pace
from policies.decision.limits import Limits, Sizes, Terms
from policies.model import Tokens
from simulator.command.runs import SimulationRun, available_processors
from simulator.costs.costs import read_costs
from simulator.outcome.metrics import Window
from simulator.replay.client import connect
from simulator.workload.sessions import SHAPES, sessions
from simulator.workload.workload import Poisson, Recipe, draw
from simulator.world.setup import Setup

STARTUP_S = 10.0
COOLDOWN_S = 5.0
BLOCK = 16
CAPACITY = Tokens(13_698)
"""The simulator's default."""
COSTS = "a100-40g-13b-pcie"
WINDOW = Window(120.0, 420.0)
RATES: Mapping[str, float] = {"react_like": 4.0, "loogle_at_once": 6.0, "loogle_like": 6.0, "sharegpt_like": 3.0}
"""Sessions per second in simulations."""
KEPT: Mapping[str, Limits] = {
    "live": Limits(cooldown_s=COOLDOWN_S, foresight_s=STARTUP_S, linger_s=STARTUP_S),
    "slack": Limits(cooldown_s=COOLDOWN_S, slack=1.0),
    "nothing": Limits(cooldown_s=COOLDOWN_S),
}

LIVE_WORKLOAD = "react_like"
LIVE_RATE = 1.5
"""Sessions per second on live replicas."""
PACE = Pace(
    num_gpu_blocks_override=256,
    block_size=BLOCK,
    max_model_len=4000,
    max_num_seqs=64,
    max_num_batched_tokens=1024,
    decode_s=0.02,
    decode_s_per_seq=1 / 4000,
    prefill_tokens_per_s=2500.0,
    startup_s=2.0,
)
"""Engines with room for 4,096 tokens: their memory is scarce, and not their speed."""
MOST_REPLICAS = 10
WARMUP_S = 30.0
ENDS_S = 90.0
"""Live sessions begin until then; replicas and requests count from the warm-up's end."""
LOOK_S = 0.5


# --- simulated ----------------------------------------------------------------------------------------


def simulated(workload: str, kept: str, sizes: Sizes | None, seed: int) -> SimulationRun:
    """A simulation; without `sizes` that of the lower bound."""
    jobs = draw(
        Recipe(Poisson(RATES[workload], SHAPES[workload]), None, WINDOW.horizon_s, CAPACITY, block_tokens=BLOCK), seed
    )
    setup = Setup(
        CAPACITY,
        horizon_s=WINDOW.horizon_s,
        min_replicas=1,
        limits=KEPT[kept],
        moves_at_once=Terms().moves_at_once,
        moves_per_replica=Terms().moves_per_replica,
        block_tokens=BLOCK,
        sizes=sizes or Sizes.MARGINAL,
    )
    costs = replace(read_costs(COSTS), startup_s=STARTUP_S)
    return SimulationRun("pack" if sizes else None, seed, jobs.jobs, setup, WINDOW, costs)


def show_simulated(workloads: Sequence[str], kept: Sequence[str], seeds: Sequence[int], processes: int) -> None:
    """Simulate, and print a line for each workload and reserve: medians and ranges of the seeds' ratios, means of all
    else.
    """
    print(
        f"{'workload':15} {'kept free':9} {'bound':>5} {'GPUs':>14} {'ratio':>20} {'preempted/1000':>15}"
        f" {'TTFT p99, s':>13} {'gap p99, ms':>13} {'whole, s':>13} {'moves/s':>13}"
    )
    for name in workloads:
        for reserve in kept:
            runs = [
                simulated(name, reserve, sizes, seed) for sizes in (None, Sizes.BLIND, Sizes.MARGINAL) for seed in seeds
            ]
            results = simulate_all(runs, processes, f"{name}, {reserve}")
            bounds, blind, marginal = (
                results[first : first + len(seeds)] for first in range(0, len(results), len(seeds))
            )
            ratios = sorted(m["gpus_mean"] / b["gpus_mean"] for b, m in zip(blind, marginal, strict=True))
            pairs = (
                _pair(blind, marginal, value, form)
                for value, form in (
                    (lambda run: 1000 * run["preemptions_per_s"] / run["requests_finished_per_s"], ".1f"),
                    (lambda run: run["ttft_s"]["p99"], ".2f"),
                    (lambda run: 1e3 * run["itl_s"]["p99"], ".0f"),
                    (lambda run: run["completion_s"]["mean"], ".2f"),
                    (lambda run: run["migrations_per_s"], ".2f"),
                )
            )
            preempted, *others = (f"{each:>13}" for each in pairs)
            print(
                f"{name:15} {reserve:9} {statistics.mean(run['mean'] for run in bounds):5.2f}"
                f" {_pair(blind, marginal, lambda run: run['gpus_mean'], '.2f'):>14}"
                f" {statistics.median(ratios):6.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]"
                f"   {preempted} {' '.join(others)}",
                flush=True,
            )


def _pair(
    blind: Sequence[Mapping[str, Any]], marginal: Sequence[Mapping[str, Any]], value: Callable[[Any], float], form: str
) -> str:
    """The means with both sizes."""
    return ", ".join(f"{statistics.mean(map(value, runs)):{form}}" for runs in (blind, marginal))


# --- live ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PackingLook:
    """One look at the cluster, `at_s` seconds after the begin: its replicas, and all their preemptions until then."""

    at_s: float
    replicas: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class PackingRun:
    """A live run, with the answers to the requests in the order of their sessions."""

    sizes: Sizes
    seed: int
    looks: tuple[PackingLook, ...]
    answers: tuple[RoutedAnswer, ...]

    @property
    def replicas(self) -> float:
        """The mean number of replicas, starting ones included, from the warm-up to the end of new sessions."""
        counted = [look.replicas for look in self.looks if WARMUP_S <= look.at_s < ENDS_S]
        return statistics.mean(counted)


def live_requests(seed: int) -> list[RoutedRequest]:
    """The requests of a live run, session by session."""
    chance, at_s = Random(f"{LIVE_WORKLOAD}-{seed}"), 0.0
    begins: list[float] = []
    while (at_s := at_s + chance.expovariate(LIVE_RATE)) < ENDS_S:
        begins.append(at_s)
    return with_answers(list(sessions(SHAPES[LIVE_WORKLOAD], begins, seed)), LIVE_WORKLOAD, seed)


def perform(sizes: Sizes, seed: int) -> PackingRun:
    """Carry out a live run. Raises RuntimeError if the application does not start or an answer is incomplete."""
    settings: dict[str, Any] = {
        "engine": "paced",
        "engine_kwargs": PACE.model_dump(),
        "scheduler": {"policy": "pack", "mode": "act", "sizes": str(sizes)},
        "deployment_config": {
            "num_cpus": 0.05,
            "autoscaling_config": {"min_replicas": 1, "initial_replicas": 1, "max_replicas": MOST_REPLICAS},
        },
        "ingress": {"frontend_kwargs": {"enable_prompt_tokens_details": True}},
    }
    with mell(PORT, 1, **settings):
        return asyncio.run(_perform(sizes, seed))


async def _perform(sizes: Sizes, seed: int) -> PackingRun:
    looks: list[PackingLook] = []
    watching = asyncio.create_task(_watch(looks))
    answers = await send(live_requests(seed), ask_mell)
    watching.cancel()
    return PackingRun(sizes, seed, tuple(looks), tuple(answers))


async def _watch(looks: list[PackingLook]) -> None:
    seen: dict[str, int] = {}
    began = time.perf_counter()
    async with connect(f"http://127.0.0.1:{PORT}") as api:
        while True:
            state: StateDocument = parse_state(await api.state())
            seen.update((replica.id, replica.preemptions) for replica in state.replicas)
            up = sum(replica.state != "STOPPED" for replica in state.replicas)
            looks.append(PackingLook(time.perf_counter() - began, up, sum(seen.values())))
            await asyncio.sleep(LOOK_S)


def show_live(runs: Iterable[PackingRun]) -> None:
    """Print a line for each run."""
    print(
        f"{'sizes':9} {'seed':>4} {'replicas':>8} {'requests':>8} {'preempted':>9} {'cached':>7} {'TTFT p50':>9}"
        f" {'p99, s':>7} {'whole, s':>9}"
    )
    for run in sorted(runs, key=lambda run: (run.seed, run.sizes)):
        first = [answer.first_s for answer in run.answers]
        cached = sum(answer.cached for answer in run.answers) / sum(answer.prompt for answer in run.answers)
        whole_s = statistics.mean(answer.whole_s for answer in run.answers)
        print(
            f"{run.sizes:9} {run.seed:4} {run.replicas:8.2f} {len(first):8} {run.looks[-1].preemptions:9} {cached:7.1%}"
            f" {statistics.median(first):9.3f} {percentile(first, 0.99):7.2f} {whole_s:9.2f}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memserve.packing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--workloads", nargs="+", choices=list(RATES), default=list(RATES), help="of simulations (default: all)")
    add("--kept", nargs="+", choices=list(KEPT), default=list(KEPT), help="of simulations (default: all)")
    add("--seeds", type=int, nargs="+", metavar="N", help="default: 0 to 4 simulated, 0 live")
    add("--processes", type=int, default=available_processors(), metavar="N", help="parallel simulations")
    add("--live", type=Path, metavar="FILE", help="make the runs that the file lacks")
    add("--report", type=Path, metavar="FILE", help="print the table of these runs")
    given = parser.parse_args(argv)
    if not (given.live or given.report):
        show_simulated(given.workloads, given.kept, given.seeds or range(5), given.processes)
        return
    if given.live:
        done = {(run.sizes, run.seed) for run in read_runs(given.live, PackingRun)}
        for seed in given.seeds or [0]:
            for sizes in Sizes:
                if (sizes, seed) not in done:
                    append_runs(given.live, perform(sizes, seed))
    show_live(read_runs(given.live or given.report, PackingRun))


if __name__ == "__main__":
    main()
