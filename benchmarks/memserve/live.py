"""The paper's settings on live paced engines, and on simulated ones: a pair of replicas, with made-up sessions.

Every run starts the whole application, with scheduler, placements and hand-overs; the simulator then plays the same
sessions by the same decisions. Runs are lines of JSON in a file, to which missing ones are appended.
"""

import asyncio
import re
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from benchmarks.economics.predict import TAIL_S
from benchmarks.evaluation.words import table
from benchmarks.instruments.runs import append_runs, read_runs
from benchmarks.load import percentile
from benchmarks.routing.case import BEGIN_S, PACE, POLICY, RoutedRequest, session_requests, with_answers
from benchmarks.routing.live import PORT, SETTLE_S, ask_mell, send
from benchmarks.routing.predict import paced_costs
from benchmarks.servers import mell
from policies.decision.limits import Limits, Terms
from policies.model import Tokens
from policies.rules.registry import policy
from simulator.outcome.recorder import EventRecorder
from simulator.workload.workload import ArrivalTrace, Recipe, draw, made_up
from simulator.world.setup import Setup
from simulator.world.world import simulate

REPLICAS = 2
FASTER = PACE.model_copy(update={"num_gpu_blocks_override": 2048, "prefill_tokens_per_s": 8000.0})
"""Engines with room for 32,768 tokens: a prompt of 1,000 tokens takes 0.13 s, a step of decoding 20 ms."""
RATES: Mapping[str, float] = {"sharegpt_like": 2.3, "loogle_like": 1.3, "react_like": 0.75}
"""Sessions per second: without caches, one prefill replica is busy for nine tenths of its time."""
COLOCATED, AUTO = "off", "auto"
SYSTEMS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    COLOCATED: ({"mode": "off"}, "both replicas do both"),
    "none": ({"mode": "static", "caching": "none"}, "1P1D, PD-Basic"),
    "prefill": ({"mode": "static", "caching": "prefill"}, "1P1D, PD-Caching-1"),
    "decode": ({"mode": "static", "caching": "decode"}, "1P1D, PD-Caching-2"),
    "full": ({"mode": "static", "caching": "full"}, "1P1D, PD-Caching-3"),
    AUTO: ({"mode": "auto"}, "as many prefill as pay"),
}
"""The settings `disaggregation` by name, and what they are."""
_OUTCOME = re.compile(
    r'^mell_migrations_total\{(?=.*reason="disaggregate")(?=.*outcome="(\w+)").*\} (\S+)$', re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class PairAnswer:
    """A request: seconds from its sending to its first and last token, and the tokens of its prompt and its answer.

    The engine of its prefill had `cached` of the former.
    """

    first_s: float
    whole_s: float
    prompt: int
    cached: int
    output: int


@dataclass(frozen=True, slots=True)
class PairRun:
    """One workload on one system, live or simulated, and its hand-overs by outcome."""

    system: str
    workload: str
    seed: int
    answers: tuple[PairAnswer, ...]
    handed_over: Mapping[str, int]

    @property
    def key(self) -> tuple[str, str, int]:
        """Its system, workload and seed."""
        return self.system, self.workload, self.seed


# --- live ---------------------------------------------------------------------------------------------


def measure(path: Path, seeds: int) -> list[PairRun]:
    """Carry out the runs that the file lacks, and append them to it; all of its runs.

    Raises RuntimeError if a system does not start or an answer is incomplete.
    """
    wanted = [(system, workload, seed) for seed in range(seeds) for system in SYSTEMS for workload in RATES]
    for system, seed in tqdm(dict.fromkeys((system, seed) for system, _, seed in wanted), unit="system"):
        done = {run.key for run in read_runs(path, PairRun)}
        missing = [w for s, w, number in wanted if (s, number) == (system, seed) and (s, w, number) not in done]
        if missing:
            _perform(path, system, missing, seed)
    return read_runs(path, PairRun)


def _perform(path: Path, system: str, workloads: Sequence[str], seed: int) -> None:
    settings: dict[str, Any] = {
        "engine": "paced",
        "engine_kwargs": FASTER.model_dump(),
        "scheduler": {"policy": POLICY, "mode": "act", "epoch_s": 1.0},
        "deployment_config": {"num_cpus": 0.05},
        "ingress": {"frontend_kwargs": {"enable_prompt_tokens_details": True}},
        "cache": {"copies": "off"},  # the simulator plays no copies
        "disaggregation": dict(SYSTEMS[system][0]),
    }
    with mell(PORT, REPLICAS, **settings):
        for workload in workloads:
            append_runs(path, asyncio.run(_run(system, workload, seed)))


async def _run(system: str, workload: str, seed: int) -> PairRun:
    requests = with_answers(session_requests(workload, seed, RATES), workload, seed)
    before = await asyncio.to_thread(_handed_over)
    answers = await send(requests, _ask)
    await asyncio.sleep(SETTLE_S)
    after = await asyncio.to_thread(_handed_over)
    return PairRun(system, workload, seed, tuple(answers), {o: n - before.get(o, 0) for o, n in after.items()})


async def _ask(request: RoutedRequest) -> PairAnswer:
    return PairAnswer(**asdict(await ask_mell(request)), output=request.output)


def _handed_over() -> dict[str, int]:
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=10) as answer:
        return counted(answer.read().decode())


def counted(metrics: str) -> dict[str, int]:
    """The ended hand-overs by outcome, in Mell's metrics."""
    found: dict[str, int] = {}
    for outcome, count in _OUTCOME.findall(metrics):
        found[outcome] = found.get(outcome, 0) + round(float(count))
    return found


# --- simulated ----------------------------------------------------------------------------------------


def predict(system: str, workload: str, seed: int) -> PairRun | None:
    """The simulated run; None for `prefill`, which the simulator does not play."""
    settings, _ = SYSTEMS[system]
    caching = settings.get("caching", "full")
    if caching == "prefill":
        return None
    capacity, block = Tokens(FASTER.num_gpu_blocks_override * FASTER.block_size), FASTER.block_size
    rows = tuple(made_up(session_requests(workload, seed, RATES), seed, block))
    blocks = 0 if caching == "none" else block
    jobs = draw(Recipe(ArrivalTrace(rows), None, BEGIN_S, capacity, block_tokens=block), seed).jobs
    setup = Setup(
        capacity,
        gpus_per_node=REPLICAS,
        horizon_s=BEGIN_S + TAIL_S,
        min_replicas=REPLICAS,
        max_gpus=REPLICAS,
        limits=Limits(cooldown_s=5.0),
        moves_at_once=Terms().moves_at_once,
        moves_per_replica=Terms().moves_per_replica,
        block_tokens=blocks,
        prefill_gpus=0 if settings["mode"] == "off" else 1,
        auto_prefills=settings["mode"] == "auto",
        returns=caching == "full",
    )
    recorder = EventRecorder(lambda now: None)
    simulate(jobs, policy(POLICY), setup, paced_costs(FASTER), recorder)
    answers = [
        PairAnswer(
            life.first_token_s - life.job.arrival_s,
            life.finished_s - life.job.arrival_s,
            life.job.prompt,
            life.cached,
            life.job.output,
        )
        for life in recorder.lives
    ]
    return PairRun(system, workload, seed, tuple(answers), {})


# --- the table ----------------------------------------------------------------------------------------


def tables(runs: Sequence[PairRun]) -> dict[str, str]:
    """The part of the page: means over seeds, beside the simulated completion times of the same sessions."""
    header = ["workload", "caching", "JCT, s", "simulated", "TTFT, ms", "TPOT, ms", "hits", "handed over"]
    rows = []
    for workload in RATES:
        for system in SYSTEMS:
            if found := [run for run in runs if (run.system, run.workload) == (system, workload)]:
                simulated = [predict(*run.key) for run in found]
                rows.append([workload, system, *_cells(found, [run for run in simulated if run is not None])])
    return {"memserve-live": table(header, rows)}


def _cells(runs: Sequence[PairRun], simulated: Sequence[PairRun]) -> list[str]:
    answers = [answer for run in runs for answer in run.answers]
    ended = sum(run.handed_over.get("committed", 0) for run in runs)
    failed = sum(sum(run.handed_over.values()) for run in runs) - ended
    return [
        _times([a.whole_s for a in answers], 1.0, 2),
        _times([a.whole_s for run in simulated for a in run.answers], 1.0, 2) if simulated else "",
        _times([a.first_s for a in answers], 1e3, 0),
        _times([(a.whole_s - a.first_s) / (a.output - 1) for a in answers if a.output > 1], 1e3, 1),
        f"{sum(a.cached for a in answers) / sum(a.prompt for a in answers):.0%}",
        f"{ended / len(answers):.0%}" + (f", {failed} failed" if failed else ""),
    ]


def _times(seconds: Sequence[float], factor: float, digits: int) -> str:
    """Mean and 99th percentile."""
    return ", ".join(f"{factor * each:.{digits}f}" for each in (fmean(seconds), percentile(seconds, 0.99)))
