"""Simulated prefills on GPUs of their own, by the live decision."""

import random
from dataclasses import replace

import pytest

from policies.model import RequestId, Role, Tokens
from policies.plan import Path, Reason
from policies.rules.registry import policy
from simulator.costs.costs import Costs, LinkCosts
from simulator.workload.workload import Job
from simulator.world.setup import Setup
from simulator.world.world import World, one_pool
from tests.simulator.physics import COMPUTE, MIGRATION, Log, job

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
    made = one_pool(policy(rule), setup, costs, log)
    made.run([job(f"r{i}", at=0.3 + i * 0.4, prompt=dice.randint(300, 1200), output=200) for i in range(60)])
    assert len(log.lives) == 60
    return made, log


@pytest.mark.parametrize("rule", ["pack", "best_fit", "load_balance", "mell"])
def test_requests_are_prefilled_on_one_gpu_and_decode_on_the_others(rule: str) -> None:
    made, log = played(1, rule)
    roles = [replica.role for replica in made.pools[0].cluster.running()]
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
    assert {replica.role for replica in made.pools[0].cluster.running()} == {Role.BOTH}
    assert not [each for each in log.transfers if each.reason is Reason.DISAGGREGATE]


def conversations(count: int = 8, turns: int = 4) -> list[Job]:
    """Conversations whose turns begin five seconds after the one before: each has 20, 31, 42, ... blocks of prompt."""
    jobs = []
    for number in range(count):
        for turn in range(turns):
            blocks = tuple(1000 * number + block for block in range(20 + 11 * turn + 8))
            jobs.append(
                Job(
                    RequestId(f"{number}-{turn}"),
                    0.5 * number + 10.0 * turn,
                    Tokens((len(blocks) - 8) * 16 + 1),
                    Tokens(8 * 16),
                    blocks[:-8],
                    session=str(number),
                    after=RequestId(f"{number}-{turn - 1}") if turn else None,
                    think_s=5.0,
                    outputs=blocks[-8:],
                )
            )
    return sorted(jobs, key=lambda job: job.arrival_s)


def cached(returns: bool) -> int:
    """The tokens that the conversations' prefills find."""
    counts = {"min_replicas": 3, "max_gpus": 3, "prefill_gpus": 1, "block_tokens": 16}
    setup, log = Setup(Tokens(32_000), horizon_s=200.0, returns=returns, **counts), Log()  # type: ignore[arg-type]
    one_pool(policy("pack"), setup, COSTS, log).run(conversations())
    assert len(log.lives) == 32
    return sum(life.cached for life in log.lives.values())


def test_next_turns_prefill_finds_what_was_decoded_elsewhere() -> None:
    """Seven blocks more for each of 24 turns: the last one of an answer lacks its last token."""
    assert cached(returns=True) - cached(returns=False) >= 24 * 7 * 16
