"""Two pools, each of a model of its own, that share a number of devices."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from policies.cluster.cluster import Cluster
from policies.model import PoolId, ReplicaId, Tokens
from policies.plan import Plan
from policies.rules.registry import policy
from simulator.costs.costs import Costs
from simulator.workload.workload import Job
from simulator.world.devices import Devices, Occupant, TakenDevice
from simulator.world.pool import PoolSpec
from simulator.world.setup import Setup
from simulator.world.world import EARLIEST_S, World
from tests.simulator.physics import COMPUTE, MIGRATION, Log, job

LARGE, SMALL = PoolId("large"), PoolId("small")
COSTS = Costs("starts", slots=False, startup_s=2.0, compute=COMPUTE, migration=MIGRATION)
SETUP = Setup(Tokens(1000), gpus_per_node=2, horizon_s=200.0)


@dataclass(slots=True)
class PoolLog(Log):
    """A log of one pool that checks the devices of its world after every decision."""

    name: PoolId = SMALL
    jobs: Sequence[Job] = ()
    decided_on: set[str] = field(default_factory=set)
    worlds: list[World] = field(default_factory=list)
    devices: list[tuple[float, int]] = field(default_factory=list)
    """The number of devices that the pool has, and since when."""

    def decided(
        self, now: float, cluster: Cluster, plans: Sequence[Plan], closing: int = 0, machines: int | None = None
    ) -> None:
        Log.decided(self, now, cluster, plans, closing, machines)
        self.decided_on |= {str(request) for request in cluster.requests}
        (world,) = self.worlds
        occupants = list(world.devices.occupants.values())
        engines = [Occupant(pool.id, replica) for pool in world.pools for replica in pool.replicas.engines]
        assert sorted(occupants) == sorted(engines), "each replica is on one device, and each device has one replica"
        for pool in world.pools:
            for device, (owner, replica) in world.devices.occupants.items():
                assert owner != pool.id or pool.replicas.engines[replica].node == world.devices.node_of(device)
        held = sum(owner == self.name for owner, _ in occupants)
        if not self.devices or self.devices[-1][1] != held:
            self.devices.append((now, held))


def played(
    large: Sequence[Job], small: Sequence[Job], limit: int | None, costs: Costs = COSTS
) -> tuple[PoolLog, PoolLog]:
    """The logs of two pools; the replicas of the small model have half the capacity."""
    logs = PoolLog(name=LARGE, jobs=large), PoolLog(name=SMALL, jobs=small)
    setups = SETUP, replace(SETUP, capacity=Tokens(500))
    specs = [PoolSpec(log.name, policy("pack"), setup, costs, log) for log, setup in zip(logs, setups, strict=True)]
    world = World(specs, limit)
    for log in logs:
        log.worlds.append(world)
    world.run(large, small)
    return logs


def waves(name: str, begins_s: float, prompt: int) -> list[Job]:
    """Two waves of requests, half a minute apart."""
    return [
        job(f"{name}-{wave}-{number}", begins_s + 30.0 * wave + 0.3 * number, prompt, 150)
        for wave in range(2)
        for number in range(8)
    ]


@pytest.mark.parametrize("limit", [2, 3, 5, None])
def test_pools_share_devices_and_every_request_ends(limit: int | None) -> None:
    logs = played(waves("large", 1.0, 400), waves("small", 3.0, 250), limit)
    for log in logs:
        own = {str(each.id) for each in log.jobs}
        assert set(log.lives) == own, "every request ends, in its own pool"
        assert log.decided_on == own, "decisions see the pool's own requests"
        assert log.devices[-1][1] == 0
    if limit is not None:
        assert max(gpus for log in logs for _, gpus in log.devices) <= limit


def test_a_pool_without_a_free_device_waits_until_one_is_given_back() -> None:
    large, small = played([job("a", at=0.5, output=500)], [job("b", at=2.5, output=20)], 1)
    (_, _), (taken_s, one), (freed_s, none) = [(0.0, 0), *large.devices][-3:]
    assert (one, none) == (1, 0)
    assert large.lives["a"].finished_s > 6.0 and taken_s < 2.5
    [(opened_s, _)] = [each for each in small.devices if each[1] == 1]
    assert freed_s <= opened_s <= freed_s + SETUP.epoch_s
    assert small.lives["b"].first_token_s > opened_s + COSTS.startup_s


BOTH = ([job("a", at=0.02, output=100)], [job("b", at=0.03, output=100)])
"""A request in each pool, before an epoch at 0.1 s."""


def test_of_two_openings_for_the_last_device_one_waits() -> None:
    large, small = played(*BOTH, 1)
    assert [len(log.plans[0].opened) for log in (large, small)] == [1, 1], "both decide with one device free"
    assert large.devices[0] == (0.1, 1) and small.devices[0] == (0.1, 0)
    assert large.lives["a"].finished_s < small.lives["b"].first_token_s


def test_the_pool_that_got_no_device_gets_the_next_one() -> None:
    freed_s = played(*BOTH, 1)[0].devices[-1][0]
    first, second = BOTH
    large, small = played([*first, job("c", at=freed_s + 0.05)], second, 1)
    both = [log.plans[[now for now, _ in log.gpus].index(freed_s + EARLIEST_S)] for log in (large, small)]
    assert all(plan.opened for plan in both), "both want the device"
    assert small.lives["b"].finished_s < large.lives["c"].first_token_s


def test_devices_of_the_wished_node_come_first() -> None:
    devices = Devices(per_node=2, limit=5)
    names = [Occupant(LARGE, ReplicaId(f"gpu-{number}")) for number in range(6)]
    wished = ["node-1", "node-1", "node-1", "node-2", "node-2", "node-0"]
    taken = [devices.take(name, node) for name, node in zip(names, wished, strict=True)]
    nodes = [each and each.node for each in taken]
    assert nodes == ["node-1", "node-1", "node-0", "node-2", "node-0", None]
    assert devices.free == 0
    devices.give_back(names[1])
    assert devices.take(names[5], "node-0") == TakenDevice("node-1")
    with pytest.raises(ValueError, match="on no device"):
        devices.give_back(names[1])


def test_machines_in_use_are_filled_before_another_one() -> None:
    devices = Devices(per_node=2, by_machine=True)
    names = [Occupant(LARGE, ReplicaId(f"gpu-{number}")) for number in range(5)]
    nodes = [devices.take(name, "node-0") for name in names[:4]]
    assert nodes == [TakenDevice(node) for node in ("node-0", "node-0", "node-1", "node-1")]
    for name in names[:3]:
        devices.give_back(name)
    nodes = [devices.take(name, "node-0") for name in (names[0], names[1], names[2], names[4])]
    assert nodes == [TakenDevice(node) for node in ("node-1", "node-0", "node-0", "node-2")]


def test_without_a_limit_there_is_always_a_device() -> None:
    devices = Devices(per_node=1)
    assert [devices.take(Occupant(pool, ReplicaId("gpu-0")), "node-0") for pool in (LARGE, SMALL)] == [
        TakenDevice("node-0"),
        TakenDevice("node-1"),
    ]
    assert devices.free is None


@pytest.mark.parametrize(
    ("change", "limit"),
    [
        (replace(SETUP, epoch_s=2.0), 4),
        (replace(SETUP, horizon_s=9.0), 4),
        (replace(SETUP, gpus_per_node=4), None),
        (replace(SETUP, by_machine=True), None),
    ],
)
def test_pools_of_one_world_have_the_same_time_and_nodes(change: Setup, limit: int | None) -> None:
    specs = [PoolSpec(name, policy("pack"), setup, COSTS, Log()) for name, setup in ((LARGE, SETUP), (SMALL, change))]
    with pytest.raises(ValueError, match="the same epochs"):
        World(specs, limit)


def test_starts_of_pools_that_share_devices_take_time() -> None:
    with pytest.raises(ValueError, match="startup time"):
        played([], [], 4, replace(COSTS, startup_s=0.0))
