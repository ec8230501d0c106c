"""Groups of replicas in the simulated world: their steps, their account of KV, their forming and their end."""

from dataclasses import replace

import pytest

from policies.cost.steps import HopCosts
from policies.memory.pairing import PairingTerms
from policies.model import Bytes, Tokens
from policies.rules.registry import policy
from simulator.costs.costs import ComputeCosts, Costs, LinkCosts
from simulator.workload.workload import Job
from simulator.world.engine import SimulatedEngine
from simulator.world.lockstep import Lockstep
from simulator.world.pairs import Groups
from simulator.world.setup import Exchange, PairSetup, Setup
from simulator.world.world import World, one_pool
from tests.simulator.physics import MIGRATION, Log, engine, job, live

COMPUTE = ComputeCosts(linear=((1, 0.02), (2000, 0.02)), context_s=1e-6, chunk_tokens=500)
"""A step takes 20 ms, and 1 us for each token of context."""
COSTS = Costs("pairs", slots=False, compute=COMPUTE, migration=replace(MIGRATION, intra=LinkCosts(1e6), kv_bytes=100))
NO_HOP = HopCosts()
PAIRS = PairSetup(Tokens(1000), 10, Bytes(1_000), 1e6, NO_HOP, PairingTerms(restore_after_s=2.0))


def pair(*outputs: int, account: int | None = None, hop: HopCosts = NO_HOP) -> list[SimulatedEngine]:
    """Two engines in lockstep, each with a request of 100 tokens and that output."""
    engines = [engine(1000, COMPUTE) for _ in outputs]
    lockstep = Lockstep(engines, 0.0, hop)
    lockstep.account = None if account is None else Tokens(account)
    for machine, output in zip(engines, outputs, strict=True):
        machine.lockstep = lockstep
        machine.add(live("first", 100, output))
    return engines


def played(jobs: list[Job], pairs: PairSetup | None, capacity: int = 2_000, until: float = 200.0) -> tuple[World, Log]:
    """Two replicas under a policy with moves."""
    log = Log()
    setup = Setup(Tokens(capacity), horizon_s=until, min_replicas=2, max_gpus=2, pairs=pairs)
    world = one_pool(policy("load_balance"), setup, COSTS, log)
    world.run(jobs)
    return world, log


def burst(count: int = 40) -> list[Job]:
    """Requests of 400 tokens, twenty per second: ten fit two replicas."""
    return [job(f"q{number}", 1.0 + number / 20, 200, 200) for number in range(count)]


def groups(world: World) -> Groups:
    found = world.pools[0].groups
    assert found is not None
    return found


# --- steps ------------------------------------------------------------------------------------------------------------


def test_both_members_wait_for_the_slower_step() -> None:
    fast, slow = pair(10, 10)
    slow.add(live("more", 300, 10))
    for now in (0.0, 0.02, 0.02):
        for machine in (fast, slow):
            machine.settle(now)
    # Requests of 101 tokens, and of 101 and 301: ends of the second step of each.
    assert fast.whole_step is not None and fast.whole_step.step_s == pytest.approx(0.020101)
    for machine in (fast, slow):
        assert machine.batch.after(1.0) == pytest.approx(0.02 + 0.020402, abs=2e-6)


def test_a_hop_lengthens_a_cycle_once_for_each_part() -> None:
    plain, hopping = (pair(10, 10, hop=hop)[0] for hop in (NO_HOP, HopCosts(0.003, 1e-5)))
    for machine in (plain, hopping):
        machine.settle(0.0)
    assert hopping.due() - plain.due() == pytest.approx(2 * (0.003 + 100e-5))


def test_members_have_one_account() -> None:
    one, other = pair(10, 10, account=250)
    one.settle(0.0)
    assert one.free(0.0) == other.free(0.0) == 150
    other.settle(0.0)
    assert (one.free(0.0), len(other.scheduler.running)) == (50, 1)
    other.add(live("third", 100, 10))
    other.settle(0.0)
    assert len(other.scheduler.waiting) == 1


def test_a_pause_lengthens_the_next_step_alone() -> None:
    machine = engine(1000, COMPUTE)
    machine.add(live("a", 100, 4))
    machine.settle(0.0)
    machine.pause(0.5)
    ends = []
    while (due := machine.due()) < 10.0:
        machine.settle(due)
        ends.append(round(due, 3))
    assert ends[-1] == pytest.approx(0.02 * 4 + 0.5, abs=0.002)


# --- forming and undoing ----------------------------------------------------------------------------------------------


def test_a_burst_forms_a_pair_that_ends_once_demand_fits() -> None:
    _, whole = played(burst(), None)
    world, log = played(burst(), PAIRS)
    (record,) = groups(world).records
    assert len(log.lives) == len(whole.lives) == 40
    assert record.formed_s is not None and record.undoing_s is not None and record.over_s is not None
    assert 1.0 < record.began_s < record.formed_s < record.undoing_s < record.over_s
    assert all(each.lockstep is None and each.capacity == 2_000 for each in world.pools[0].replicas.engines.values())
    waits = [max(life.first_token_s - life.job.arrival_s for life in each.lives.values()) for each in (whole, log)]
    assert waits[1] < waits[0]


@pytest.mark.parametrize("exchange", list(Exchange))
def test_every_kind_of_exchange_sends_the_kv_of_half_of_the_layers(exchange: Exchange) -> None:
    world, log = played(burst(), replace(PAIRS, exchange=exchange, restores=False))
    (record,) = groups(world).records
    assert record.formed_s is not None and record.undoing_s is None
    # At least what both held when the exchange began: demand counts with its rise, so some of their memory is free.
    assert record.sent >= 0.7 * 2 * 2_000 * 100 / 2
    assert len(log.lives) == 40


def test_the_layers_of_one_member_after_another_take_twice_as_long() -> None:
    took = {}
    for exchange in Exchange:
        (record,) = groups(played(burst(), replace(PAIRS, exchange=exchange, restores=False))[0]).records
        assert record.formed_s is not None
        took[exchange] = record.formed_s - record.began_s
    assert took[Exchange.IN_TURN] > 1.7 * took[Exchange.TOGETHER]
    assert took[Exchange.TOGETHER] == pytest.approx(took[Exchange.AT_ONCE], rel=0.2)


def test_always_paired_replicas_share_their_memory_from_the_start() -> None:
    world, log = played(burst(), replace(PAIRS, always=True))
    (record,) = groups(world).records
    assert (record.began_s, record.formed_s, record.over_s) == (0.0, 0.0, None)
    assert record.sent == 0 and len(log.lives) == 40


def test_a_request_longer_than_a_replica_waits_for_a_pair() -> None:
    world, log = played([job("long", 1.0, 3_000, 100), job("short", 2.0)], PAIRS)
    assert set(log.lives) == {"long", "short"}
    assert len(groups(world).records) == 1


@pytest.mark.parametrize(
    ("setup", "costs"),
    [
        (Setup(Tokens(2_000), min_replicas=2, max_gpus=3, pairs=PAIRS), COSTS),
        (Setup(Tokens(2_000), min_replicas=2, max_gpus=2, pairs=PAIRS, block_tokens=16), COSTS),
        (Setup(Tokens(2_000), min_replicas=2, max_gpus=2, pairs=PAIRS), replace(COSTS, migration=None)),
        (
            Setup(Tokens(2_000), min_replicas=2, max_gpus=2, pairs=PAIRS),
            replace(COSTS, compute=replace(COMPUTE, interference=False)),
        ),
    ],
)
def test_what_is_not_simulated_is_refused(setup: Setup, costs: Costs) -> None:
    with pytest.raises(ValueError, match="groups of replicas"):
        one_pool(policy("load_balance"), setup, costs, Log())
