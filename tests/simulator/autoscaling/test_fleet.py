"""A fleet of replicas under an autoscaler."""

from collections import Counter
from dataclasses import replace

import pytest

from policies.model import RequestId, Tokens
from simulator.autoscaling.fleet import SimulatedFleet, requests_per_replica
from simulator.autoscaling.rule import FleetRouter, LoadMeasure, ScalingRule
from simulator.costs.costs import ComputeCosts, Costs
from simulator.workload.workload import Job
from simulator.world.setup import Setup
from tests.simulator.physics import COMPUTE, FleetLog, job

COSTS = Costs(slots=False, startup_s=20.0, compute=ComputeCosts(((1, 0.02),), context_s=1e-6))
SETUP = Setup(Tokens(1000), horizon_s=400.0)
RULE = ScalingRule(target=2.0, upscale_delay_s=2.0, downscale_delay_s=10.0, look_back_s=2.0, push_s=1.0)


def play(jobs: list[Job], rule: ScalingRule = RULE, setup: Setup = SETUP, costs: Costs = COSTS) -> FleetLog:
    log = FleetLog()
    SimulatedFleet(rule, setup, costs, log, lambda now: None).run(jobs)
    return log


def long_jobs(count: int, at: float = 0.0) -> list[Job]:
    """Requests that take about a minute."""
    return [job(f"q{n}", at, prompt=10, output=240 * 10) for n in range(count)]


def test_replicas_open_for_the_load_after_the_delay_and_close_after_theirs() -> None:
    log = play([job(f"q{n}", 10.0, 10, 2400) for n in range(4)], setup=replace(SETUP, capacity=Tokens(20000)))
    assert log.gpus[0] == (0.0, 1)
    (up_s, two), (down_s, one) = log.gpus[1:]
    assert (two, one) == (2, 1)
    # The load is seen a push later, its mean is above the target, and the delay follows.
    assert 12.0 < up_s <= 15.0
    ends = max(life.finished_s for life in log.lives.values())
    assert ends + 10.0 < down_s <= ends + 15.0
    assert len(log.lives) == 4


def test_a_new_replica_takes_requests_once_it_has_started() -> None:
    early, late = [job(f"e{n}", 0.0, 10, 9000) for n in range(4)], [job(f"l{n}", 40.0, 10, 100) for n in range(2)]
    log = play([*early, *late], setup=replace(SETUP, capacity=Tokens(50000)))
    slow, quick = log.lives["e0"], log.lives["l0"]
    assert log.gpus[1][0] + 20.0 < 40.0
    assert quick.finished_s - quick.first_token_s < 100 * 0.021 < slow.finished_s


def test_a_stopping_replica_ends_with_its_last_request() -> None:
    early = [job(f"e{n}", 0.0, 10, 2400) for n in range(4)]
    late = [job(f"l{n}", 40.0, 10, 4000) for n in range(2)]
    log = play([*early, *late], setup=replace(SETUP, capacity=Tokens(50000)))
    # The late ones are on the second replica, whose end is wanted once the early ones are over.
    assert [gpus for _, gpus in log.gpus] == [1, 2, 3, 2, 1]
    ends = {name: life.finished_s for name, life in log.lives.items()}
    assert max(ends[f"e{n}"] for n in range(4)) + 20.0 < ends["l0"]
    assert log.gpus[-1][0] == max(ends["l0"], ends["l1"])


@pytest.mark.parametrize("measure", LoadMeasure)
def test_requests_of_stopping_replicas_are_no_load(measure: LoadMeasure) -> None:
    setup = replace(SETUP, min_replicas=4, max_gpus=4, capacity=Tokens(50000))
    fleet = SimulatedFleet(replace(RULE, measure=measure), setup, COSTS, FleetLog(), lambda now: None)
    fleet.run([job(f"q{n}", 0.0, 4000, 40000) for n in range(20)])
    first, *others = fleet._members.values()
    of_first = {LoadMeasure.REQUESTS: first.ongoing, LoadMeasure.KV: fleet._kv(first) / setup.capacity}[measure]
    assert 0 < 3 * of_first < fleet._load()
    for member in others:
        member.stopping = True
    assert fleet._load() == of_first


@pytest.mark.parametrize(("by_machine", "left"), [(False, [0, 2]), (True, [2, 3])])
def test_the_machine_with_the_fewest_replicas_loses_one_first(by_machine: bool, left: list[int]) -> None:
    """The first of four replicas, on machines of two, is alone once the second has ended."""
    setup = replace(SETUP, min_replicas=4, max_gpus=4, gpus_per_node=2, by_machine=by_machine, horizon_s=1.0)
    fleet = SimulatedFleet(RULE, setup, COSTS, FleetLog(), lambda now: None)
    fleet.run([])
    members = list(fleet._members.values())
    members[1].stopping = True
    fleet._end(members[1])
    fleet._apply(2)
    assert [members.index(member) for member in fleet._members.values()] == left


def test_machines_are_counted_with_gpus() -> None:
    jobs, setup = long_jobs(6), replace(SETUP, capacity=Tokens(20000), gpus_per_node=2)
    log = play(jobs, setup=replace(setup, by_machine=True))
    assert [(gpus, machines) for (_, gpus), (_, machines) in zip(log.gpus, log.machines, strict=True)] == [
        (1, 1),
        (2, 1),
        (3, 2),
        (2, 1),
        (1, 1),
    ]
    assert {machines for _, machines in play(jobs, setup=setup).machines} == {None}


def test_requests_beyond_the_limit_queue_at_the_router() -> None:
    jobs = [job(f"q{n}", 0.0, 10, 100) for n in range(3)]
    limited = play(jobs, replace(RULE, max_ongoing=1), replace(SETUP, max_gpus=1))
    firsts = sorted(life.first_token_s for life in limited.lives.values())
    step_s = 0.02
    assert firsts == pytest.approx([step_s, step_s + 100 * step_s, step_s + 200 * step_s], rel=0.05)
    free = play(jobs, RULE, replace(SETUP, max_gpus=1))
    assert max(life.first_token_s for life in free.lives.values()) < 3 * step_s


def test_the_number_of_replicas_is_bounded() -> None:
    log = play(long_jobs(20), replace(RULE, target=1.0), replace(SETUP, max_gpus=3, capacity=Tokens(50000)))
    assert max(gpus for _, gpus in log.gpus) == 3
    never = play([job("q", 0.0, 10, 10)], replace(RULE, target=0.01), replace(SETUP, min_replicas=2, max_gpus=2))
    assert {gpus for _, gpus in never.gpus[1:]} == {2}


def test_the_less_loaded_of_two_replicas_is_chosen() -> None:
    setup = replace(SETUP, min_replicas=2, max_gpus=2, capacity=Tokens(50000))
    fleet = SimulatedFleet(RULE, setup, COSTS, FleetLog(), lambda now: None)
    fleet.run([job(f"q{n}", n / 10, 10, 40000) for n in range(10)])
    assert Counter(member.ongoing for member in fleet._members.values()) == {5: 2}


@pytest.mark.parametrize("measure", LoadMeasure)
def test_the_replica_with_the_least_kv_is_chosen(measure: LoadMeasure) -> None:
    rule = ScalingRule(measure, 0.9, router=FleetRouter.LEAST_KV)
    setup = replace(SETUP, min_replicas=2, max_gpus=2, capacity=Tokens(50000))
    fleet = SimulatedFleet(rule, setup, COSTS, FleetLog(), lambda now: None)
    fleet.run([job("large", 0.0, 9000, 40000), *(job(f"q{n}", 0.1 + n / 10, 50, 40000) for n in range(3))])
    # The large one is on a replica of its own, since the others together have less KV.
    assert [member.ongoing for member in fleet._members.values()] == [1, 3]


def test_a_number_of_replicas_with_equal_bounds_is_constant() -> None:
    log = play(long_jobs(20), setup=replace(SETUP, min_replicas=3, max_gpus=3, capacity=Tokens(50000)))
    assert {gpus for _, gpus in log.gpus[2:]} == {3} and log.gpus[2][0] == 0.0


def test_an_autoscaler_that_looks_ahead_has_replicas_when_the_load_comes() -> None:
    jobs = [job(f"q{n}", 100.0, 10, 2400) for n in range(8)]
    rule, setup = replace(RULE, looks_ahead=True), replace(SETUP, capacity=Tokens(50000))
    rehearsal = SimulatedFleet(rule, setup, replace(COSTS, startup_s=0.0), FleetLog(), lambda now: None)
    rehearsal.run(jobs)
    log = FleetLog()
    SimulatedFleet(rule, setup, COSTS, log, lambda now: None, 0, rehearsal.loads).run(jobs)
    opened = [at_s for at_s, gpus in log.gpus if gpus > 1]
    # Four replicas of two requests start no earlier than it takes to see their load, act on it, and start.
    assert max(gpus for _, gpus in log.gpus) == 4
    assert 100.0 - COSTS.startup_s - rule.lag_s <= opened[0] and opened[2] <= 100.0 - COSTS.startup_s
    blind = play(jobs, setup=setup)
    assert min(at_s for at_s, gpus in blind.gpus if gpus > 1) > 100.0


def test_kv_utilisation_counts_queued_prompts() -> None:
    rule = ScalingRule(LoadMeasure.KV, 0.5, 0.0, 10.0, 2.0, 1.0, router=FleetRouter.LEAST_KV)
    slow = replace(COSTS, compute=ComputeCosts(((1, 0.5),)))
    log = play([job(f"q{n}", 0.0, 450, 45) for n in range(4)], rule, costs=slow)
    # 1,800 tokens of prompts that grow to 1,980, and 500 per replica.
    assert max(gpus for _, gpus in log.gpus) == 4


def test_equal_seeds_give_equal_runs() -> None:
    jobs = [job(f"q{n}", n * 0.7, 20 + n, 300) for n in range(60)]
    assert play(jobs).gpus == play(jobs).gpus
    assert {n: life.finished_s for n, life in play(jobs).lives.items()} == {
        n: life.finished_s for n, life in play(jobs).lives.items()
    }


def test_replicas_have_prefix_caches() -> None:
    names = tuple(range(20))
    jobs = [Job(RequestId(f"q{n}"), 10.0 * n, Tokens(405), Tokens(5), names) for n in range(2)]
    setup = replace(SETUP, max_gpus=1)
    costs = replace(COSTS, compute=COMPUTE)

    def waits(block_tokens: int) -> list[float]:
        log = play(jobs, setup=replace(setup, block_tokens=block_tokens), costs=costs)
        return [log.lives[job.id].first_token_s - job.arrival_s for job in jobs]

    first, again = waits(20)
    assert waits(0) == pytest.approx([first, first])
    assert again < first / 10


def test_requests_of_mean_size_fill_a_replica() -> None:
    assert requests_per_replica([job("a", 0, 100, 200), job("b", 0, 300, 200)], Tokens(3000)) == 10
    assert requests_per_replica([job("a", 0, 5000, 200)], Tokens(3000)) == 1
