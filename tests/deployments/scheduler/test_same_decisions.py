"""The live shell and the simulator decide alike: one history, told to both, gives the same plans.

A simulated world writes down what its replicas would report, what arrives and what is decided. Fake replicas then
report the same to the live scheduler, through its gatherer, roster and dispatch.
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deployments.api.calls import PairOrder, PlaceCall
from deployments.api.report import ReplicaReport
from deployments.config import SchedulerConfig
from deployments.metrics.telemetry import Telemetry
from deployments.scheduler.deployment import LiveScheduler
from deployments.scheduler.pool_scheduler import PoolPorts
from migration.protocol.record import MigrationRecord, Outcome
from migration.run.source import Order
from policies.cluster.changes import Arrival
from policies.cost.service import ReplicaSpeed
from policies.decision.observation import PoolReport, Status
from policies.decision.placement import Decision, Place
from policies.decision.recording import Epoch
from policies.decision.reports import status_of
from policies.memory.ledger import MemoryOrder, MemoryReport
from policies.model import (
    SOLE_POOL,
    Blocks,
    Phase,
    ReplicaId,
    ReplicaLoad,
    ReplicaState,
    RequestId,
    RequestLoad,
    Tokens,
)
from policies.paths.prices import Profile
from policies.plan import Move, MoveReport, Path, Plan
from policies.prefix.evacuation import CachedContext, ContextCopy
from policies.rules.registry import POLICIES, policy
from simulator.costs.costs import ComputeCosts, Costs, LinkCosts, MigrationCosts
from simulator.workload.workload import Job
from simulator.world.devices import Devices
from simulator.world.loop import Loop
from simulator.world.observer import Observer
from simulator.world.pool import PoolSpec, SimulatedPool
from simulator.world.reports import PHASES
from simulator.world.setup import Setup
from simulator.world.terms import terms_of
from simulator.world.world import World
from tests.counts import scaled
from tests.deployments.scheduler.fakes import (
    FakeClaims,
    FakeLevels,
    FakeListing,
    FakeMembership,
    FakeModes,
    FakeRoles,
    Present,
    Reporting,
)
from tests.deployments.scheduler.test_scheduler import FakeScaler
from tests.simulator.physics import Log

CAPACITY, MOST = Tokens(4000), 5
COSTS = Costs(
    "some",
    slots=False,
    startup_s=4.0,
    compute=ComputeCosts(linear=((1, 0.02), (2000, 0.4)), chunk_tokens=500),
    migration=MigrationCosts(LinkCosts(1e5, 0.01), LinkCosts(5e4, 0.02), kv_bytes=100, handover_s=0.05),
)


@dataclass(frozen=True, slots=True)
class Look:
    """What there is to report when an epoch begins."""

    now: float
    loads: tuple[ReplicaLoad, ...]
    profiles: dict[ReplicaId, Profile]
    moves: tuple[MoveReport, ...]


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request, and the decision on it."""

    now: float
    arrival: Arrival
    decision: Decision


class WrittenPool(SimulatedPool):
    """A pool that writes down what happens to its scheduler."""

    def __init__(self, spec: PoolSpec, loop: Loop, devices: Devices, ask_early: Callable[[], None]) -> None:
        super().__init__(spec, loop, devices, ask_early)
        self.script: list[Look | Arrived | tuple[Plan, ...]] = []
        self._known: dict[ReplicaId, Status] = {}
        self._profiles: dict[ReplicaId, Profile] = {}

    def observed(self) -> PoolReport:
        seen = super().observed()
        for replica in seen.lost:
            del self._known[replica]
        self._known |= {status.id: status for status in seen.replicas}
        self._profiles |= seen.profiles
        loads = tuple(self._load(status) for status in self._known.values())
        self.script.append(Look(self._loop.now, loads, dict(self._profiles), seen.moves))
        return seen

    def carry_out(self, plans: Sequence[Plan]) -> None:
        super().carry_out(plans)
        self.script.append(tuple(plans))

    def _decide_placement(self, arrival: Arrival) -> Decision:
        decision = super()._decide_placement(arrival)
        self.script.append(Arrived(self._loop.now, arrival, decision))
        return decision

    def _load(self, status: Status) -> ReplicaLoad:
        there = [live for live in self.lives.values() if live.at == status.id]
        requests = tuple(
            RequestLoad(q.id, "", Tokens(q.reported), PHASES[q.stage], self._loop.now - q.job.arrival_s, q.moves)
            for q in there
        )
        held = sum(q.tokens for q in requests if q.phase is not Phase.WAITING)
        return ReplicaLoad(
            status.id, status.state, status.node, CAPACITY, 1, Blocks(CAPACITY - held), 1 << 30, requests
        )


class WrittenWorld(World):
    """A world of one pool, which is `written`."""

    def __init__(self, spec: str, setup: Setup, observer: Observer) -> None:
        super().__init__([PoolSpec(SOLE_POOL, policy(spec), setup, COSTS, observer)], setup.max_gpus)

    def _pool(self, spec: PoolSpec) -> SimulatedPool:
        self.written = WrittenPool(spec, self.loop, self.devices, self._ask_early)
        return self.written


class Told:
    """Implements `RemoteReplicas[ControlApi]`: replicas report what a script says, and obey."""

    def __init__(self) -> None:
        self.present: dict[ReplicaId, Present] = {}
        self.reporting = Reporting()
        self.orders: dict[tuple[RequestId, ReplicaId, ReplicaId], Order] = {}

    def at(self, replica: ReplicaId, routed: bool = True) -> "ToldReplica":
        return ToldReplica(self, replica)

    def forget(self, replica: ReplicaId) -> None:
        pass


class ToldReplica:
    """Implements `ControlApi`."""

    def __init__(self, told: Told, replica: ReplicaId) -> None:
        self._told = told
        self._replica = replica

    async def report(self, fence: int, version: int | None) -> ReplicaReport:
        return self._told.reporting.report(self._told.present[self._replica], version)

    async def move(self, order: Order, target: ReplicaId, fence: int) -> MigrationRecord:
        self._told.orders[order.request, self._replica, target] = order
        return record(order, MoveReport(order.request, self._replica, target))

    async def drain(self, fence: int) -> None: ...

    async def close(self, fence: int) -> None: ...

    async def reopen(self, fence: int) -> None: ...

    async def set_memory(self, order: MemoryOrder, shrink_s: float, fence: int) -> MemoryReport:
        raise AssertionError("KV pools keep their sizes")

    async def pair(self, order: PairOrder, fence: int) -> None:
        raise AssertionError("replicas are not paired")

    async def unpair(self, epoch: int, fence: int) -> None:
        raise AssertionError("replicas are not paired")

    async def cached_contexts(self, fence: int) -> tuple[CachedContext, ...]:
        return ()

    async def evacuate(self, copies: tuple[ContextCopy, ...], within_s: float, fence: int) -> int:
        raise AssertionError("nothing is cached")


def record(order: Order, report: MoveReport) -> MigrationRecord:
    """The record that is reported as that."""
    outcome = None if report.moved is None else Outcome.COMMITTED if report.moved else Outcome.ABORTED
    kv = report.path is Path.KV
    return MigrationRecord(
        order.id,
        report.request,
        "",
        report.source,
        report.target,
        report.path,
        "",
        "",
        order.reason,
        outcome,
        cause=report.cause,
        bytes=report.sent,
        copy_s=report.copy_s or 1e-9 * report.fell_back,
        pause_s=report.took_s,
        duration_s=report.took_s,
        tokens=report.tokens,
        resume_s=report.whole_s,
        predicted_kv_s=report.predicted_s if kv else None,
        predicted_tokens_s=None if kv else report.predicted_s,
    )


class Kept:
    """Implements `Recorder`: keeps plans."""

    def __init__(self) -> None:
        self.plans: list[tuple[Plan, ...]] = []

    def record(self, epoch: Epoch) -> None:
        self.plans.append(epoch.plans[SOLE_POOL])


class ScriptedScheduler:
    """The live scheduler over fake replicas, which report no steps; its time is the script's."""

    def __init__(self, config: SchedulerConfig, speed: ReplicaSpeed | None = None) -> None:
        self.now = 0.0
        self.told, self.members, self.listing, self.kept = Told(), FakeMembership(), FakeListing(()), Kept()
        clock = lambda: self.now  # noqa: E731
        scaler, telemetry = FakeScaler(MOST), Telemetry(SOLE_POOL)
        stores = FakeRoles(), FakeLevels()
        ports = PoolPorts(SOLE_POOL, self.told, self.members, self.listing, scaler, *stores, telemetry)
        self.core = LiveScheduler(ReplicaId("s"), config, 1, [ports], clock, clock, FakeModes(), FakeClaims())
        self.core._epochs._recorder = self.kept
        memory = self.core._memory.pool(SOLE_POOL)
        memory.terms = replace(memory.terms, speed=speed)
        if speed is not None:
            memory.learned.follow_speed(speed)

    async def play(self, script: list[Look | Arrived | tuple[Plan, ...]]) -> None:
        """Live through the script; every decision is compared with the script's."""
        for number, step in enumerate(script):
            if isinstance(step, Look):
                await self.look(step)
            elif isinstance(step, Arrived):
                self.now = step.now
                (decision,) = await self.core.place((PlaceCall(SOLE_POOL, step.arrival, "", ()),))
                assert decision == step.decision, number
                if isinstance(decision, Place) and decision.then is not None:
                    self.begin(decision.then)
            else:
                assert self.kept.plans[-1] == step, number

    def begin(self, move: Move) -> None:
        """The replica of a placement begins the move that came with it."""
        self.told.orders[move.request, move.source, move.target] = Order.of(move)

    async def look(self, look: Look) -> None:
        self.now = look.now
        running = [load for load in look.loads if load.state is ReplicaState.RUNNING]
        self.members.running = tuple(load.id for load in running)
        self.listing.without_room = tuple(
            status_of(load) for load in look.loads if load.state is not ReplicaState.RUNNING
        )
        self.told.present = {load.id: Present(load, (), look.profiles.get(load.id)) for load in running}
        for report in look.moves:
            order = self.told.orders[report.request, report.source, report.target]
            await self.core.record(SOLE_POOL, record(order, report))
        await self.core._epochs.epoch()
        for _ in range(3):
            await asyncio.sleep(0)


def jobs(dice: random.Random, seconds: float, output: int, rate: float) -> Iterator[Job]:
    """Requests that come in waves, some as large as half of a replica, with answers of `output` tokens at most."""
    now, number = 0.0, 0
    while (now := now + dice.expovariate(rate * dice.choice([0.2, 1.0, 2.0]))) < seconds:
        prompt = dice.randint(1, dice.choice([200, 1000, 1900]))
        yield Job(RequestId(f"r{number}"), now, Tokens(prompt), Tokens(dice.randint(1, output)))
        number += 1


CONFIGS = [
    {"slack": 0.5, "cooldown_s": 5.0},
    {"moves_per_epoch": 1, "cooldown_s": 0.0, "linger_s": 3.0, "foresight_s": 6.0},
    {"headroom_s": 2.0, "moves_at_once": 2, "slowdown": 0.05},
    {"prefill_replicas": 1, "cooldown_s": 5.0},
    {"prefill_replicas": 2, "moves_at_once": 4, "moves_per_epoch": 2, "cooldown_s": 0.0},
    {"prefill_replicas": 3, "auto_prefills": True, "cooldown_s": 2.0},
]


@pytest.mark.slow
@pytest.mark.virtual_time
@settings(max_examples=scaled(400))
@given(st.sampled_from(sorted(POLICIES)), st.sampled_from(CONFIGS), st.integers(0, 1 << 32))
@example("load_balance", CONFIGS[0], 125)  # a request is preempted during its move
@example("pack", CONFIGS[4], 244)
@example("worst_fit", CONFIGS[5], 1)
async def test_one_history_gives_the_same_plans_live_and_simulated(
    spec: str, chosen: dict[str, float], seed: int
) -> None:
    given_ = {"linger_s": 4.0, "foresight_s": 0.0} | chosen
    config = SchedulerConfig(policy=spec, bounds=(1, MOST), **given_)  # type: ignore[arg-type]
    limits = config.terms.limits
    setup = Setup(
        CAPACITY,
        horizon_s=60.0,
        min_replicas=1,
        max_gpus=MOST,
        limits=replace(
            limits.limits,
            linger_s=limits.linger_s or 0.0,
            foresight_s=limits.foresight_s or 0.0,
            slack=limits.slack or 0.0,
        ),
        moves_at_once=config.moves_at_once,
        moves_per_replica=config.terms.moves_per_replica,
        prefill_gpus=config.prefill_replicas,
        auto_prefills=config.auto_prefills,
        by_machine=True,
    )
    costs = replace(COSTS, migration=replace(COSTS.migration, slowdown=config.slowdown))  # type: ignore[type-var]
    terms = terms_of(setup, costs)
    assert replace(terms, policy=spec, limits=config.terms.limits, speed=None) == config.terms
    log = Log()
    world = WrittenWorld(spec, setup, log)
    memory = world.written.memory
    memory.terms = replace(memory.terms, boundaries=config.terms.boundaries)
    memory.learned.estimates._boundaries = config.terms.boundaries
    load = (100, 6.0) if config.auto_prefills else (1500, 1.0)
    world.run(list(jobs(random.Random(seed), 50.0, *load)))
    await ScriptedScheduler(config, terms.speed).play(world.written.script)
