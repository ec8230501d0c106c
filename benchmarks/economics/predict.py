"""The simulator on the requests of runs, with costs that are known (the engines' pace) or were measured in the runs.

Serve's own autoscaler is not simulated. Otherwise the decisions are those of the live scheduler, with its limits, and
the same kinds of moves are counted: a waiting request is queued on a replica, and a change of its replica is a
migration by tokens.
"""

import random
from collections.abc import Sequence
from statistics import median

from benchmarks.economics.case import FOLLOWS_LEVEL, SCHEDULERS, LiveCase, bounds_of
from benchmarks.economics.figures import Figures, delays, startups, usage
from benchmarks.economics.observed import LiveRun, ObservedMigration, ServedRequest
from deployments.config import SchedulerSettings
from deployments.engine.pace import Pace
from deployments.engine.tokens import TOKEN_BYTES
from policies.decision.limits import Limits, Terms
from policies.model import RequestId, Tokens
from policies.plan import Path
from policies.rules.registry import policy
from simulator.costs.costs import ComputeCosts, Costs, LinkCosts, MigrationCosts
from simulator.outcome.metrics import Window, inter_token
from simulator.outcome.recorder import EpochSample, EventRecorder
from simulator.outcome.statistics import quantile
from simulator.replay.trace import TraceRequest
from simulator.workload.workload import Job
from simulator.world.observer import Life, TransferOutcome
from simulator.world.setup import Setup
from simulator.world.world import simulate

LIVE = SchedulerSettings()
"""The live scheduler's defaults, which the runs do not change."""
MEMCPY_BYTES_PER_S = 1e9
"""A copy within one machine; with four bytes per token of a paced engine, never a bottleneck."""
LAG_S = 0.004
"""Longest time by which the client sends a request too late, in 99 % of the cases."""
INGRESS_S, INGRESS_SHARE = 0.018, 0.01
"""Time to the first token beside the engine's, and the percentile of measured first tokens that it is: one that waits
neither for a step nor for another prefill."""
SERVE_STARTS_S = (1.7, 3.0)
"""Shortest and longest time that a start takes beside the engine's: Serve's loop, the process, and its first report.

As seen in recordings of two runs with twelve starts on two busy processors, less half of an epoch."""
LISTED_S, GONE_S = 0.7, 1.3
"""Time from the decision to open a replica until Serve lists it, and from that to close one until it no longer does; as
in these recordings. A run's replicas are counted in Serve's list."""
ROUND_S, HANDOVER_S = 0.01, 0.02
"""Time of a round of copying, without the target's step, and of a hand-over between two processes of one machine."""
STEPS_PER_ROUND = 1.5
"""Steps of the target in a round of copying: what is left of one, on average half of it, and one to load the blocks."""
TAIL_S = 600.0
"""Time between the last arrival and the simulation's end, for requests to end."""


def costs_of(pace: Pace, runs: Sequence[LiveRun]) -> Costs:
    """The costs of runs with this pace."""
    starts = [took for run in runs for took in startups(run.observed.looks)]
    # Moves by tokens are no measurement of links: most are of waiting requests, which have no KV yet.
    moves = [m for run in runs for m in run.observed.migrations if (m.path, m.outcome) == ("kv", "committed")]
    return Costs(
        name="paced",
        slots=False,
        startup_s=LISTED_S + median(starts) if starts else pace.startup_s,
        ingress_s=ingress_s(pace, [request for run in runs for request in run.observed.requests]),
        compute=compute_costs(pace),
        migration=migration_costs(moves, pace),
    )


def ingress_s(pace: Pace, requests: Sequence[ServedRequest]) -> float:
    """The time to a first token beside the prefill's, of requests that waited neither for a step nor for a prefill."""
    costs, chunk = pace.costs, pace.max_num_batched_tokens
    beside = [r.first_s - r.at_s - costs.prefill_s(r.prompt, 0, chunk) for r in requests if r.first_s is not None]
    return max(0.0, quantile(sorted(beside), INGRESS_SHARE)) if beside else 0.0


def compute_costs(pace: Pace) -> ComputeCosts:
    """Step times of a paced engine."""
    costs = pace.costs
    return ComputeCosts(
        linear=costs.linear,
        overhead_s=costs.overhead_s,
        sequence_s=costs.sequence_s,
        context_s=costs.context_s,
        attention_s=costs.attention_s,
        chunk_tokens=pace.max_num_batched_tokens,
    )


def migration_costs(moves: Sequence[ObservedMigration], pace: Pace) -> MigrationCosts:
    """The costs of migrations: the pause is the hand-over, the time before it is divided among the copy rounds.

    The steps in which the target loads the blocks are the simulated engine's own.
    """
    pauses = [m.pause_s for m in moves if m.pause_s is not None]
    rounds = [
        (m.duration_s - (m.pause_s or 0.0) - m.rounds * STEPS_PER_ROUND * pace.decode_s) / (m.rounds + 1) for m in moves
    ]
    link = LinkCosts(MEMCPY_BYTES_PER_S, max(0.0, median(rounds)) if rounds else 0.0)
    return MigrationCosts(
        intra=link,
        inter=link,
        kv_bytes=TOKEN_BYTES,
        block_tokens=pace.block_size,
        handover_s=median(pauses) if pauses else 0.0,
    )


def calibration(costs: Costs) -> str:
    """The measured costs as a sentence."""
    moving = costs.migration
    assert moving is not None
    return (
        f"Calibrated: a replica starts in {costs.startup_s:.1f} s, a first token takes {1e3 * costs.ingress_s:.0f} ms "
        f"beside the engine's time, a round of copying takes "
        f"{1e3 * moving.intra.latency_s:.1f} ms, a hand-over {1e3 * moving.handover_s:.1f} ms."
    )


def predict(run: LiveRun, costs: Costs) -> Figures:
    """The simulated figures of a run's requests."""
    jobs = [
        Job(RequestId(f"r{i}"), r.at_s, Tokens(r.prompt), Tokens(r.output))
        for i, r in enumerate(sorted(run.observed.requests, key=lambda r: r.at_s))
    ]
    return simulated(run.case, jobs, costs)


def foretell(case: LiveCase, due: Sequence[TraceRequest], seed: int) -> Figures:
    """The simulated figures of a run that has not been carried out.

    What a run leaves to chance is drawn: the phase of the scheduler's epochs, when each request arrives within `LAG_S`,
    and how long Serve takes to start a replica beside the engine. Times outside of the engines are those of earlier
    runs.
    """
    draw, conditions = random.Random(seed), case.conditions
    phase_s = draw.uniform(0.0, conditions.epoch_s)
    arrivals = sorted((each.at_s + phase_s + draw.uniform(0.0, LAG_S), each.row, each) for each in due)
    jobs = [
        Job(RequestId(f"r{i}"), at_s, Tokens(each.prompt_tokens), Tokens(each.output_tokens))
        for i, (at_s, _, each) in enumerate(arrivals)
    ]
    costs = usual_costs(conditions.pace, draw.uniform(*SERVE_STARTS_S))
    return simulated(case, jobs, costs)


def usual_costs(pace: Pace, serve_starts_s: float) -> Costs:
    """Costs before any run, with the times outside of the engines that earlier runs had.

    A start takes `serve_starts_s` seconds beside the engine's.
    """
    link = LinkCosts(MEMCPY_BYTES_PER_S, ROUND_S)
    return Costs(
        name="paced",
        slots=False,
        startup_s=pace.startup_s + serve_starts_s,
        ingress_s=INGRESS_S,
        compute=compute_costs(pace),
        migration=MigrationCosts(
            intra=link, inter=link, kv_bytes=TOKEN_BYTES, block_tokens=pace.block_size, handover_s=HANDOVER_S
        ),
    )


def simulated(case: LiveCase, jobs: Sequence[Job], costs: Costs) -> Figures:
    """The figures of a case with these requests."""
    conditions = case.conditions
    recorder = EventRecorder(lambda now: None)
    simulate(jobs, policy(str(SCHEDULERS[case.variant]["policy"])), setup_of(case, costs), costs, recorder)
    begin, end = conditions.warmup_s, conditions.until_s
    done = [served(life) for life in recorder.lives if begin <= life.job.arrival_s < end]
    # A move that is put off was not ordered: no replica receives it.
    made = [t for t in recorder.transfers if t.outcome is not TransferOutcome.DEFERRED]
    ordered = [t for t in made if begin <= t.began_s < end]
    completed = [t for t in ordered if t.completed]
    # As measured, the gaps of requests that arrive in the window, up to their ends.
    gaps = inter_token(recorder, Window(begin, max((each.ended_s for each in done), default=end))) or {}
    return {
        **usage(listed(recorder.epochs), begin, end),
        **delays(done),
        "gap_p99": gaps.get("p99"),
        "gap_max": gaps.get("max"),
        "preemptions": sum(begin <= at_s < end for at_s, _ in recorder.preemptions),
        "migrations": len(completed),
        "migrations_kv": sum(t.path is Path.KV for t in completed),
        "migrations_tokens": sum(t.path is Path.TOKENS for t in completed),
        "migrations_void": len(ordered) - len(completed),
    }


def listed(epochs: Sequence[EpochSample]) -> list[tuple[float, int]]:
    """(second, replicas in Serve's list) for every change, and the number at the beginning."""
    changes = [(epoch.now_s + LISTED_S, epoch.opened) for epoch in epochs if epoch.opened]
    changes += [(epoch.now_s + GONE_S, -epoch.closed) for epoch in epochs if epoch.closed]
    count = epochs[0].gpus - epochs[0].opened + epochs[0].closed
    counts = [(0.0, count)]
    for at_s, change in sorted(changes):
        count += change
        counts.append((at_s, count))
    return counts


def setup_of(case: LiveCase, costs: Costs) -> Setup:
    """The cluster and the limits of a case; empty replicas linger for one start-up time, as live."""
    conditions, pace = case.conditions, case.conditions.pace
    follows, (least, most) = case.variant in FOLLOWS_LEVEL, bounds_of(case)
    limits = Limits(
        moves_per_epoch=SCHEDULERS[case.variant].get("moves_per_epoch"),
        cooldown_s=LIVE.cooldown_s,
        slack=0.0 if follows else conditions.slack,
        foresight_s=0.0 if follows else conditions.foresight_s,
        linger_s=0.0 if follows else costs.startup_s,
    )
    return Setup(
        capacity=Tokens(pace.num_gpu_blocks_override * pace.block_size),
        epoch_s=conditions.epoch_s,
        gpus_per_node=conditions.max_replicas,
        horizon_s=conditions.until_s + TAIL_S,
        min_replicas=least,
        max_gpus=most,
        limits=limits,
        moves_at_once=LIVE.moves_at_once,
        moves_per_replica=Terms().moves_per_replica,
        service=conditions.level if follows else None,
    )


def served(life: Life) -> ServedRequest:
    """A simulated request in the form of a measured one."""
    job = life.job
    return ServedRequest(job.arrival_s, job.prompt, job.output, life.first_token_s, life.finished_s, whole=True)


def predictable(runs: Sequence[LiveRun]) -> list[LiveRun]:
    """The runs whose variant can be simulated."""
    return [run for run in runs if is_predictable(run.case)]


def is_predictable(case: LiveCase) -> bool:
    """True for variants that can be simulated: those in which Mell decides."""
    return str(SCHEDULERS[case.variant]["mode"]) == "act"
