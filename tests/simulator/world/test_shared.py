"""Several models on shared devices: the ledger, the division and the ladder in the simulated world."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from policies.cluster.cluster import Cluster
from policies.decision.limits import Limits
from policies.memory.plan import ModelMemory
from policies.model import Blocks, Bytes, PoolId, Tokens
from policies.plan import Plan
from policies.rules.registry import policy
from simulator.costs.costs import Costs
from simulator.workload.workload import Job
from simulator.world.pool import PoolSpec
from simulator.world.setup import Setup
from simulator.world.shared import SharedModel, SharedSetup
from simulator.world.world import World
from tests.simulator.physics import COMPUTE, MIGRATION, Log, job

WAKE_S, START_S = 1.0, 20.0
COSTS = Costs("starts", slots=False, preemption=True, startup_s=START_S, compute=COMPUTE, migration=MIGRATION)
MEMORY = ModelMemory(Bytes(1000), Bytes(100), Bytes(50), Bytes(10), Blocks(30))
"""1,400 bytes at the floor, which has room for 300 tokens: a byte per token."""
MODEL = SharedModel(MEMORY, 10, WAKE_S, START_S)


@dataclass(slots=True)
class SharedLog(Log):
    """A log of one pool that checks every device of its world after every decision."""

    worlds: list[World] = field(default_factory=list)

    def decided(
        self, now: float, cluster: Cluster, plans: Sequence[Plan], closing: int = 0, machines: int | None = None
    ) -> None:
        Log.decided(self, now, cluster, plans, closing, machines)
        (world,) = self.worlds
        assert world.shared is not None
        for ledger in world.shared.ledgers:
            ledger.check_integrity()
            assert ledger.bound <= ledger.budget


def played(
    jobs: Mapping[str, Sequence[Job]],
    budget: int,
    count: int = 1,
    models: Mapping[str, SharedModel] | None = None,
    linger_s: float = 5.0,
) -> tuple[dict[str, SharedLog], World]:
    """The logs of pools with these requests, on devices with that many bytes."""
    kinds = {name: MODEL for name in jobs} | dict(models or {})
    logs = {name: SharedLog() for name in jobs}
    setup = Setup(
        Tokens(10 * MEMORY.blocks_in(budget)), horizon_s=300.0, limits=Limits(linger_s=linger_s), max_gpus=count
    )
    specs = [
        PoolSpec(PoolId(name), policy("pack"), replace(setup, min_replicas=kinds[name].min_replicas), COSTS, log)
        for name, log in logs.items()
    ]
    own = {PoolId(name): kinds[name] for name in jobs}
    world = World(specs, shared=SharedSetup(count, Bytes(budget)), models=own)
    for log in logs.values():
        log.worlds.append(world)
    world.run(*jobs.values())
    for name, log in logs.items():
        assert set(log.lives) == {str(each.id) for each in jobs[name]}, "every request ends, in its own pool"
    return logs, world


def ttft_s(logs: Mapping[str, SharedLog], model: str, name: str) -> float:
    life = logs[model].lives[name]
    return life.first_token_s - life.job.arrival_s


def test_a_request_waits_for_its_sleeping_model_to_wake() -> None:
    logs, world = played({"a": [job("q", 10.0)]}, 2000)
    assert WAKE_S < ttft_s(logs, "a", "q") < WAKE_S + 0.5
    assert world.shared is not None and (world.shared.wakes, world.shared.starts) == (1, 0)


def test_an_idle_model_falls_asleep_for_one_that_is_asked_and_a_busy_one_does_not() -> None:
    idle, _ = played({"a": [job("q", 1.0)], "b": [job("r", 10.0)]}, 2000, linger_s=100.0)
    assert ttft_s(idle, "b", "r") < WAKE_S + 0.5
    busy, _ = played({"a": [job("q", 1.0, output=200), job("p", 2.5, output=190)], "b": [job("r", 3.0)]}, 2000)
    ended_s = max(life.finished_s for life in busy["a"].lives.values())
    assert busy["b"].lives["r"].first_token_s > ended_s + WAKE_S


def test_both_models_are_awake_where_they_fit() -> None:
    logs, world = played({"a": [job("q", 1.0)], "b": [job("r", 10.0), job("s", 15.0)]}, 3000, linger_s=100.0)
    assert ttft_s(logs, "b", "s") < 0.5
    assert world.shared is not None and world.shared.wakes == 2


def test_one_replica_of_a_device_wakes_at_a_time() -> None:
    logs, _ = played({"a": [job("q", 1.0)], "b": [job("r", 1.0)]}, 3000)
    first, second = sorted([ttft_s(logs, "a", "q"), ttft_s(logs, "b", "r")])
    assert first < WAKE_S + 0.5 < 2 * WAKE_S < second


def test_a_model_with_a_minimum_is_awake_at_first_and_makes_no_room_for_others() -> None:
    # The third model sleeps where the first one is awake, idle: it starts elsewhere.
    requests = {"a": [job("q", 1.0), job("p", 100.0)], "b": [], "c": [job("r", 50.0)]}
    logs, _ = played(requests, 2000, count=2, models={"a": replace(MODEL, min_replicas=1)})
    assert max(ttft_s(logs, "a", "q"), ttft_s(logs, "a", "p")) < 0.5
    assert ttft_s(logs, "c", "r") > START_S


def test_memory_follows_demand() -> None:
    # 1,200 tokens in a second, first of one model, then of the other one, of 1,600 for both.
    def burst(name: str, at_s: float) -> list[Job]:
        return [job(f"{name}{number}", at_s, 100, 100) for number in range(6)]

    requests = {"a": [job("q", 1.0), *burst("a", 19.95)], "b": [job("r", 5.0), *burst("b", 39.95)]}
    logs, _ = played(requests, 2 * 1100 + 1600, linger_s=100.0)
    for model in ("a", "b"):
        assert not logs[model].preempted_s
        assert max(ttft_s(logs, model, f"{model}{number}") for number in range(6)) < 0.5


def test_a_model_whose_sleeper_has_no_room_starts_on_another_device() -> None:
    # The first and the third model sleep on the first device, which has room for one of them.
    long = [job(f"q{number}", 1.0 + number, 100, 190) for number in range(40)]
    logs, world = played({"a": long, "b": [], "c": [job("r", 3.0)]}, 2000, count=2)
    assert world.shared is not None and world.shared.starts == 1
    assert START_S < ttft_s(logs, "c", "r") < START_S + 1.0


@pytest.mark.parametrize("count", [1, 2, 3])
def test_many_models_share_few_devices_within_their_budgets(count: int) -> None:
    requests = {
        f"m{model}": [job(f"q{model}-{n}", 1.0 + 7 * n + 1.3 * model, 60 + 20 * n, 40) for n in range(6)]
        for model in range(6)
    }
    played(requests, 4000, count, models={name: replace(MODEL, homes=2) for name in requests})


def test_sleepers_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(ValueError, match="sleepers exceed"):
        played({f"m{model}": [] for model in range(41)}, 2000)
