"""The world as a whole: the idealised model, and what each cost changes in it."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import pytest

from policies.causes import Cause
from policies.cluster.changes import Arrival
from policies.cluster.cluster import Cluster
from policies.cluster.conditions import EpochConditions
from policies.cluster.supply import Supply
from policies.decision.conditions import headroom
from policies.model import RequestId, Tokens
from policies.plan import Plan
from policies.rules.registry import policy
from simulator.costs.costs import IDEAL, Costs, PathChoice
from simulator.workload.workload import Job
from simulator.world.live import Stage
from simulator.world.loop import Turn
from simulator.world.setup import Setup
from simulator.world.world import one_pool, simulate
from tests.policies.stepping import Events, step
from tests.simulator.physics import COMPUTE, MIGRATION, Log, job, move, play

FLUID = Costs("fluid", slots=False)
STARTS = Costs("starts", slots=False, startup_s=5.0)
COMPUTES = Costs("computes", slots=False, compute=COMPUTE)


def workload(seed: int, seconds: float, rate: float = 0.5, capacity: int = 1000) -> list[Job]:
    """Requests at random, a few of which nearly fill a replica."""
    dice, time, jobs = random.Random(seed), 0.0, list[Job]()
    while (time := time + dice.expovariate(rate)) < seconds:
        prompt = dice.randint(1, capacity // 2)
        jobs.append(job(f"r{len(jobs)}", time, prompt, dice.randint(1, capacity - prompt)))
    return jobs


# --- the idealised model ----------------------------------------------------------------------------------


def slots(jobs: list[Job], name: str, setup: Setup) -> Iterator[tuple[int, Plan]]:
    """The paper's model, slot by slot, written down as simply as it can be: open replicas and plans."""
    chosen = policy(name)
    conditions = EpochConditions(headroom(chosen, setup.limits, setup.decode_rate, Tokens(0)))
    cluster = Cluster(setup.capacity, Supply(setup.gpus_per_node), conditions)
    held: dict[RequestId, int] = {}
    ends = {each.id: each.prompt + each.output for each in jobs}
    for slot in range(int(setup.horizon_s)):
        departed = [request for request in held if held[request] == ends[request]]
        for request in departed:
            del held[request]
        for request in held:
            held[request] = min(held[request] + int(setup.decode_rate), ends[request])
        sizes = {request: Tokens(tokens) for request, tokens in held.items()}
        arrived = [Arrival(each.id, each.prompt) for each in jobs if slot <= each.arrival_s < slot + 1]
        held |= {arrival.id: arrival.tokens for arrival in arrived}
        plan = step(cluster, Events(sizes, departed, arrived), chosen, setup.limits, slot)
        yield len(cluster.replicas), plan


@pytest.mark.parametrize("name", ["best_fit", "worst_fit", "load_balance", "mell", "mell_repaired"])
@pytest.mark.parametrize("seed", [1, 2])
def test_without_costs_it_is_the_papers_model_slot_by_slot(name: str, seed: int) -> None:
    jobs, setup, log = workload(seed, 250.0), Setup(Tokens(1000), 25.0, horizon_s=300.0), Log()
    simulate(jobs, policy(name), setup, IDEAL, log)
    expected = list(slots(jobs, name, setup))
    assert log.gpus == [(slot, gpus) for slot, (gpus, _) in enumerate(expected)]
    assert log.plans == [plan for _, plan in expected]
    assert log.preempted_s == []


def test_in_slots_a_request_waits_for_the_end_of_the_slot_it_arrives_in() -> None:
    life = play([job("a", at=2.3, output=25)]).lives["a"]
    assert (life.first_token_s, life.finished_s) == pytest.approx((3.1, 5.5))
    assert (life.ideal_first_token_s, life.ideal_s) == pytest.approx((0.1, 2.5))


def test_in_slots_a_request_is_placed_with_its_prompt_and_leaves_after_its_last_slot() -> None:
    log = play([job("a", output=20)], until=6.0)
    assert log.gpus == [(0.0, 1), (1.0, 1), (2.0, 1), (3.0, 0), (4.0, 0), (5.0, 0)]


PAIR = [job("a", prompt=450, output=100), job("b", prompt=450, output=100)]
"""Two requests that are together too large for a replica of 1,000 tokens after five slots of ten tokens."""


def test_in_slots_an_overload_that_the_decision_cures_causes_no_preemption() -> None:
    log = play(PAIR, {6: move("b", 1)}, up=2, until=30.0)
    assert log.preempted_s == []
    assert [(each.path, each.began_s, each.ended_s, each.stall_s) for each in log.transfers] == [(None, 7, 7, 0)]
    assert {name: life.finished_s for name, life in log.lives.items()} == {"a": 11.0, "b": 11.0}


def test_in_slots_an_overload_that_is_left_stops_the_youngest_until_there_is_room() -> None:
    log = play(PAIR, up=2, until=30.0)
    assert log.preempted_s == [7.0]
    assert {name: life.finished_s for name, life in log.lives.items()} == {"a": 11.0, "b": 15.0}
    assert (log.lives["b"].preemptions, log.lives["b"].stalled_s, log.lives["b"].longest_gap_s) == (1, 4.0, 4.0)


def test_without_preemption_memory_has_no_end() -> None:
    log = play(PAIR, costs=replace(IDEAL, preemption=False), up=2, until=30.0)
    assert log.preempted_s == []
    assert log.lives["b"].finished_s == 11.0


def test_an_evicted_request_loses_no_token_and_counts_it() -> None:
    def evict(cluster: Cluster) -> None:
        cluster.decisions.evict(cluster.requests[RequestId("b")])

    jobs = [job("a", output=40), job("b", output=40)]
    life = play(jobs, {3: evict}, up=1, until=30.0).lives["b"]
    # Evicted at 4 s, it is placed again when the next slot is decided.
    assert (life.finished_s, life.stalled_s, life.preemptions) == (6.0, 1.0, 1)


# --- time that is not in slots ----------------------------------------------------------------------------


def test_an_arrival_is_placed_at_once() -> None:
    life = play([job("a", at=2.3, output=25)], costs=FLUID, up=1).lives["a"]
    assert (life.first_token_s, life.finished_s) == pytest.approx((2.4, 4.8))


def test_an_arrival_that_fits_nowhere_asks_for_an_epoch_but_not_too_often() -> None:
    jobs = [job(name, at, prompt=900, output=90) for name, at in (("a", 2.3), ("b", 2.31), ("c", 2.35), ("d", 2.36))]
    log = play(jobs, costs=FLUID, until=3.5)
    # As live, the next regular epoch is a whole one after the last, early or not.
    assert log.gpus == [(1.0, 0), (2.0, 0), (2.3, 1), (2.4, 4), (3.4, 4)]
    assert log.lives == {}


def test_a_full_replica_preempts_within_the_epoch_and_asks_for_one() -> None:
    log = play([job("a", at=0.5, prompt=470), job("b", at=0.5, prompt=471)], costs=FLUID, up=1, until=4.5)
    assert log.preempted_s == [pytest.approx(3.45)]
    assert [now for now, _ in log.gpus] == pytest.approx([1.0, 2.0, 3.0, 3.45, 4.45])


def test_a_replica_that_starts_costs_from_its_opening_and_serves_from_its_start() -> None:
    log = play([job("a", at=0.5, output=20)], costs=STARTS, until=9.0)
    assert log.gpus[0] == (0.5, 1)
    life = log.lives["a"]
    assert (life.first_token_s, life.finished_s) == pytest.approx((5.6, 7.5))


def test_the_replicas_that_are_always_up_are_up_from_the_start() -> None:
    log = play([job("a", at=0.5, output=20)], costs=STARTS, until=9.0, up=2)
    assert log.lives["a"].finished_s == pytest.approx(2.5)
    assert {gpus for _, gpus in log.gpus} == {2}


def test_compute_costs_delay_the_first_token_and_set_the_pace() -> None:
    life = play([job("a", at=0.5, prompt=200, output=101)], costs=COMPUTES, up=1).lives["a"]
    assert (life.first_token_s, life.finished_s) == pytest.approx((0.61, 1.61))
    assert (life.ideal_first_token_s, life.ideal_s) == pytest.approx((0.11, 1.11))


def test_the_way_to_the_engine_delays_the_first_token_and_is_no_delay_by_others() -> None:
    life = play([job("a", at=0.5, prompt=200, output=101)], costs=replace(COMPUTES, ingress_s=0.02), up=1).lives["a"]
    assert (life.first_token_s, life.finished_s) == pytest.approx((0.63, 1.63))
    assert (life.ideal_first_token_s, life.ideal_s) == pytest.approx((0.13, 1.13))


# --- whatever the costs -------------------------------------------------------------------------------------

SWITCHES = [
    Costs("mixed", slots=slots_, startup_s=startup_s, compute=compute, migration=migration)
    for slots_, startup_s, compute, migration in product(
        (True, False),
        (0.0, 3.0),
        (None, COMPUTE, replace(COMPUTE, interference=False), replace(COMPUTE, decode=False)),
        (None, MIGRATION, replace(MIGRATION, path=PathChoice.ADAPTIVE), replace(MIGRATION, path=PathChoice.TOKENS)),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["load_balance", "mell_repaired"])
def test_whatever_is_switched_on_every_request_ends_once(name: str) -> None:
    jobs = workload(3, 30.0)
    for costs in SWITCHES:
        log = Log()
        simulate(jobs, policy(name), Setup(Tokens(1000), 25.0, gpus_per_node=2, horizon_s=150.0), costs, log)
        assert sorted(log.lives) == sorted(each.id for each in jobs), costs
        assert log.gpus[-1][1] == 0, costs
        for life in log.lives.values():
            assert life.job.arrival_s <= life.first_token_s <= life.finished_s


def test_memory_is_never_exceeded_and_both_sides_agree_on_who_is_where() -> None:
    costs = replace(COMPUTES, startup_s=3.0, migration=replace(MIGRATION, path=PathChoice.ADAPTIVE))
    checked = 0

    @dataclass
    class Check(Log):
        def decided(
            self, now: float, cluster: Cluster, plans: Sequence[Plan], closing: int = 0, machines: int | None = None
        ) -> None:
            nonlocal checked
            Log.decided(self, now, cluster, plans, closing, machines)
            assert pool.mover is not None
            for name, engine in pool.replicas.engines.items():
                queues = engine.scheduler
                waiting = {each.id for each in queues.waiting}
                here = {*queues.running, *waiting, *engine.reserved, *engine.handed}
                # The room of a move by KV may be taken back: then the request comes by tokens, and queues.
                here |= {q for q, move in pool.mover.under_way.items() if move.detour is Cause.TRANSFER_FAILED}
                assert engine.free(now) >= -len(queues.running)
                assert {q for q in cluster.replicas[name].requests if is_running(q)} <= here
                checked += len(here)

    def is_running(request: RequestId) -> bool:
        """A placement whose request ended before any report counts until it expires."""
        return request in pool.lives and pool.lives[request].stage is not Stage.OVER

    setup = Setup(Tokens(1000), 25.0, gpus_per_node=2, horizon_s=100.0)
    played = one_pool(policy("load_balance"), setup, costs, Check())
    (pool,) = played.pools
    played.run(workload(5, 80.0, rate=2.0))
    assert checked > 1000


def test_the_same_workload_gives_the_same_history() -> None:
    costs = replace(COMPUTES, startup_s=3.0, migration=replace(MIGRATION, path=PathChoice.ADAPTIVE))
    logs = [Log(), Log()]
    for log in logs:
        simulate(workload(4, 60.0, rate=2.0), policy("load_balance"), Setup(Tokens(1000), horizon_s=200.0), costs, log)
    assert logs[0] == logs[1]
    assert logs[0].transfers


@pytest.mark.parametrize("block_tokens", [0, 10], ids=["no caches", "caches"])
@pytest.mark.parametrize("seed", range(5))
def test_engines_whose_size_changes_every_second_lose_no_request(seed: int, block_tokens: int) -> None:
    dice, log, capacity = random.Random(seed), Log(), 1000
    setup = Setup(Tokens(capacity), 25.0, horizon_s=900.0, min_replicas=2, max_gpus=6, block_tokens=block_tokens)
    jobs = [each for each in workload(seed, 300.0) if each.prompt + each.output <= capacity // 2]
    costs = Costs("moves", slots=False, compute=COMPUTE, migration=MIGRATION)
    played = one_pool(policy("pack"), setup, costs, log)
    (pool,) = played.pools

    def resize() -> None:
        for replica in pool.replicas.engines:
            pool.resize(replica, Tokens(dice.randrange(capacity // 2, 2 * capacity)))
        assert pool.cluster.capacity in (1, capacity), "the unit follows no size"

    for second in range(900):
        played.loop.at(second + 0.5, Turn.LINK, resize)
    played.run(jobs)
    assert len(log.lives) == len(jobs) > 20
    assert any(transfer.path is not None for transfer in log.transfers), "requests left what shrank"


def test_machines_are_counted_and_the_decision_has_the_nodes_of_replicas() -> None:
    costs = replace(COMPUTES, startup_s=3.0, migration=MIGRATION)
    setup = Setup(Tokens(1000), gpus_per_node=2, by_machine=True, horizon_s=300.0)

    @dataclass
    class Check(Log):
        def decided(
            self, now: float, cluster: Cluster, plans: Sequence[Plan], closing: int = 0, machines: int | None = None
        ) -> None:
            Log.decided(self, now, cluster, plans, closing, machines)
            engines, opened = pool.replicas.engines, {action.replica for plan in plans for action in plan.opened}
            assert machines == len({engine.node for engine in engines.values()})
            for name, replica in cluster.replicas.items():
                assert name in opened or replica.node == engines[name].node

    log = Check()
    world = one_pool(policy("pack"), setup, costs, log)
    (pool,) = world.pools
    world.run([job(f"q{n}", 2.0 * n, 200, 400) for n in range(60)])
    assert max(gpus for _, gpus in log.gpus) > 2 and len(log.lives) == 60
