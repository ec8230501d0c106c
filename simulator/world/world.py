"""The simulated world: one virtual time and one set of devices, over the pools that share them.

The world decides nothing: in every epoch all pools report to `policies.decision`, which then decides each of them, as
live.
"""

from collections.abc import Mapping, Sequence

from policies.decision.deciding import Plans, SchedulerMemory, decide
from policies.decision.observation import Observation
from policies.model import SOLE_POOL, PoolId
from policies.rules.policy import Policy
from simulator.costs.costs import Costs
from simulator.workload.workload import Job
from simulator.world.crowding import DeviceTime
from simulator.world.devices import Devices
from simulator.world.loop import Loop, Timer, Turn
from simulator.world.observer import Observer
from simulator.world.pool import PoolSpec, SimulatedPool
from simulator.world.setup import Setup
from simulator.world.shared import SharedDevices, SharedModel, SharedSetup

EARLIEST_S = 0.1
"""Minimum seconds between an epoch and an early next one, as in the live scheduler."""


def simulate(jobs: Sequence[Job], policy: Policy, setup: Setup, costs: Costs, observer: Observer) -> None:
    """Play `jobs`, sorted by arrival, through `policy` until the horizon; `observer` gets the events."""
    one_pool(policy, setup, costs, observer).run(jobs)


def one_pool(policy: Policy, setup: Setup, costs: Costs, observer: Observer) -> "World":
    """The world of a single pool."""
    return World([PoolSpec(SOLE_POOL, policy, setup, costs, observer)], setup.max_gpus)


class World:
    """One simulation, with `limit` devices (None: no limit) for all pools.

    If it is `shared`, replicas of several pools are on one device; the models are those of the pools.
    """

    def __init__(
        self,
        specs: Sequence[PoolSpec],
        limit: int | None = None,
        shared: SharedSetup | None = None,
        models: Mapping[PoolId, SharedModel] | None = None,
    ) -> None:
        """Raises `ValueError` if the pools differ in what they share.

        That is epochs, horizon, nodes, and slots. Where pools share a number of devices, an opening may find none, so
        that starts have to take time: no request is placed on a replica in the epoch that opens it.
        """
        first, *others = specs
        if any(_shared(spec) != _shared(first) for spec in others):
            raise ValueError("the pools of a world have the same epochs, horizon, nodes and slots")
        if others and limit is not None and not all(spec.costs.startup_s for spec in specs):
            raise ValueError("pools that share a number of devices need costs with a startup time")
        self.loop = Loop()
        self.devices = Devices(first.setup.gpus_per_node, limit, first.setup.by_machine)
        self.shared = None if shared is None else SharedDevices(self.loop, shared, models or {})
        self._device_time = None if shared is None else DeviceTime(self.loop)
        self.pools = tuple(self._pool(spec) for spec in specs)
        if self.shared is not None:
            for pool in self.pools:
                self.shared.register(pool)
        self._memory = SchedulerMemory(pools={pool.id: pool.memory for pool in self.pools})
        self._slots, self._epoch_s, self._horizon_s = first.costs.slots, first.setup.epoch_s, first.setup.horizon_s
        self._next_epoch: Timer | None = None
        self._next_epoch_s = 0.0
        self._last_epoch_s = 0.0

    def run(self, *jobs: Sequence[Job]) -> None:
        """Run the arrivals of each pool, and an epoch every `epoch_s` seconds, until the horizon."""
        for pool in self.pools:
            pool.open_first()
        if not self._slots:
            self._decide(0.0)
        for pool, own in zip(self.pools, jobs, strict=True):
            pool.await_jobs(own)
        self._await_epoch(self._epoch_s)
        self.loop.run(self._horizon_s)

    def _pool(self, spec: PoolSpec) -> SimulatedPool:
        return SimulatedPool(spec, self.loop, self.shared or self.devices, self._ask_early, self._device_time)

    def _await_epoch(self, time: float) -> None:
        """Schedule the next epoch for a time, in place of the one scheduled before."""
        if self._next_epoch is not None:
            self._next_epoch.cancel()
        self._next_epoch_s = time
        self._next_epoch = self.loop.at(time, Turn.EPOCH, self._epoch)

    def _ask_early(self) -> None:
        """Have the next epoch as early as possible."""
        time = max(self.loop.now, self._last_epoch_s + EARLIEST_S)
        if not self._slots and time < self._next_epoch_s:
            self._await_epoch(time)

    def _epoch(self) -> None:
        """Decide, and schedule the next epoch `epoch_s` seconds later, even if this one was early."""
        self._last_epoch_s = self.loop.now
        self._await_epoch(self.loop.now + self._epoch_s)
        # The time of a slot is its beginning.
        now = self.loop.now - self._epoch_s * self._slots
        plans = self._decide(now)
        for pool in self.pools:
            if pool.id in plans:
                pool.end_epoch(now, plans[pool.id])

    def _decide(self, now: float) -> Plans:
        """Decide all pools, and carry the plans out; first those of pools that have found no device before.

        On shared devices, openings come last, those for the oldest waiting request first.
        """
        pools = self.pools
        if self.shared is not None:
            self.shared.begin_epoch()
            pools = tuple(pool for pool in pools if not pool.is_quiet)
        plans = decide(self._memory, Observation(now, tuple(pool.observed() for pool in pools)))
        for pool in sorted(pools, key=lambda pool: not pool.lacks_device):
            pool.carry_out(plans[pool.id])
        for pool in sorted(pools, key=lambda pool: pool.waits_since):
            pool.open_decided()
        return plans


def _shared(spec: PoolSpec) -> tuple[object, ...]:
    """The epochs, the horizon, the nodes and the kind of costs, which are the same for all pools of a world."""
    setup = spec.setup
    return setup.epoch_s, setup.horizon_s, setup.gpus_per_node, setup.by_machine, spec.costs.slots
