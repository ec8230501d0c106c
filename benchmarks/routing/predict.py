"""The simulator on the sessions of runs: the same sessions, engines and decisions, in virtual time.

Times outside of the engines are those of earlier runs, as in `benchmarks.economics.predict`.
"""

import math

from benchmarks.economics.predict import HANDOVER_S, INGRESS_S, LIVE, MEMCPY_BYTES_PER_S, ROUND_S, TAIL_S, compute_costs
from benchmarks.routing.case import POLICY, REPLICAS, RoutingCase, System
from benchmarks.routing.live import RoutedAnswer, RoutingRun
from deployments.engine.pace import Pace
from deployments.engine.tokens import TOKEN_BYTES
from policies.decision.limits import Limits, Terms
from policies.model import Tokens
from policies.rules.registry import policy
from simulator.costs.costs import Costs, LinkCosts, MigrationCosts
from simulator.outcome.recorder import EventRecorder
from simulator.workload.workload import ArrivalTrace, Recipe, draw, made_up
from simulator.world.setup import Setup
from simulator.world.world import simulate


def predict(system: System, case: RoutingCase) -> RoutingRun:
    """The simulated run of one of Mell's routings."""
    assert system.routing is not None, "Ray's routers are not simulated"
    pace, seed = case.pace, case.seed
    capacity, ends_s = Tokens(pace.num_gpu_blocks_override * pace.block_size), max(each.at_s for each in case.requests)
    rows = tuple(made_up(case.requests, seed, pace.block_size))
    recipe = Recipe(ArrivalTrace(rows), None, math.nextafter(ends_s, math.inf), capacity, block_tokens=pace.block_size)
    jobs = draw(recipe, seed).jobs
    setup = Setup(
        capacity,
        gpus_per_node=REPLICAS,
        horizon_s=ends_s + TAIL_S,
        min_replicas=REPLICAS,
        max_gpus=REPLICAS,
        limits=Limits(cooldown_s=LIVE.cooldown_s),
        moves_at_once=LIVE.moves_at_once,
        moves_per_replica=Terms().moves_per_replica,
        block_tokens=pace.block_size,
        routing=system.routing,
        copies=True,
    )
    recorder = EventRecorder(lambda now: None)
    simulate(jobs, policy(POLICY), setup, paced_costs(pace), recorder)
    lives = recorder.lives
    answers = [
        RoutedAnswer(
            life.first_token_s - life.job.arrival_s, life.finished_s - life.job.arrival_s, life.job.prompt, life.cached
        )
        for life in lives
    ]
    predicted, delivered = sum(life.matched.predicted for life in lives), sum(life.cached for life in lives)
    return RoutingRun(system, case.workload, seed, 0.0, tuple(answers), predicted, delivered)


def paced_costs(pace: Pace) -> Costs:
    """The costs of paced engines, and of moves between them through the memory of one machine."""
    link = LinkCosts(MEMCPY_BYTES_PER_S, ROUND_S)
    moving = MigrationCosts(
        intra=link, inter=link, kv_bytes=TOKEN_BYTES, block_tokens=pace.block_size, handover_s=HANDOVER_S
    )
    return Costs("paced", slots=False, ingress_s=INGRESS_S, compute=compute_costs(pace), migration=moving)
