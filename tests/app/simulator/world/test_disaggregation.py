"""Simulated prefills on GPUs of their own, by the live decision."""

import random
from dataclasses import replace

import pytest

from app.simulator.costs.costs import Costs, LinkCosts
from app.simulator.world.setup import Setup
from app.simulator.world.world import World
from policies.model import Role, Tokens
from policies.plan import Path, Reason
from policies.rules.registry import policy
from tests.app.simulator.physics import COMPUTE, MIGRATION, Log, job

COSTS = Costs(
    "disaggregates",
    slots=False,
    compute=COMPUTE,
    migration=replace(MIGRATION, intra=LinkCosts(100_000.0), inter=LinkCosts(100_000.0), handover_s=0.01),
)


def played(prefill_gpus: int, rule: str = "pack", costs: Costs = COSTS) -> tuple[World, Log]:
    """Sixty requests on three GPUs."""
    setup = Setup(Tokens(20_000), horizon_s=60.0, min_replicas=3, max_gpus=3, prefill_gpus=prefill_gpus)
    log, dice = Log(), random.Random(7)
    made = World(policy(rule), setup, costs, log)
    made.run([job(f"r{i}", at=0.3 + i * 0.4, prompt=dice.randint(300, 1200), output=200) for i in range(60)])
    assert len(log.lives) == 60
    return made, log


@pytest.mark.parametrize("rule", ["pack", "best_fit", "load_balance", "mell"])
def test_requests_are_prefilled_on_one_gpu_and_decode_on_the_others(rule: str) -> None:
    made, log = played(1, rule)
    roles = [replica.role for replica in made.cluster.running()]
    assert sorted(roles) == [Role.DECODE, Role.DECODE, Role.PREFILL]
    handed = [each for each in log.transfers if each.reason is Reason.DISAGGREGATE]
    assert len(handed) == 60 and {(each.path, each.outcome) for each in handed} == {(Path.KV, "moved")}
    assert all(life.moves >= 1 for life in log.lives.values())


def test_decoding_requests_do_not_wait_for_prefills() -> None:
    """The longest gap between two tokens is that of the hand-over, and not a step with another request's prefill."""
    gaps = {gpus: sorted(life.longest_gap_s for life in played(gpus)[1].lives.values()) for gpus in (0, 1)}
    assert gaps[0][30] > 0.1 > 2 * gaps[1][30]


def test_without_costs_of_moves_every_gpu_does_both() -> None:
    made, log = played(1, costs=replace(COSTS, migration=None))
    assert {replica.role for replica in made.cluster.running()} == {Role.BOTH}
    assert not [each for each in log.transfers if each.reason is Reason.DISAGGREGATE]
