"""What the deployments' parts are tested with, in place of Serve: every fake implements a port."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from deployments.api.calls import PairOrder
from deployments.api.protocols import ControlApi, RemoteReplicas
from deployments.api.report import ElasticMemory, Gauges, ReplicaReport
from deployments.metrics.telemetry import Telemetry
from deployments.replica.reporting import ReplicaReporter
from deployments.scheduler.listing import Listing
from deployments.scheduler.pool_scheduler import PoolPorts
from deployments.scheduler.scaler import Scaler
from deployments.serve.levels import Levels
from deployments.serve.membership import Membership
from deployments.serve.modes import ModeOrder
from deployments.serve.seats import Claims
from migration.protocol.errors import Refused
from migration.protocol.record import MigrationRecord
from migration.run.source import Order
from policies.causes import Cause
from policies.decision.observation import Status
from policies.memory.ledger import MemoryOrder, MemoryReport
from policies.model import Blocks, PoolId, ReplicaId, ReplicaLoad, ReplicaState, RequestLoad, Role, Tokens
from policies.paths.prices import Profile
from policies.prefix.change import CacheChange, Tier
from policies.prefix.evacuation import CachedContext, ContextCopy
from policies.prefix.names import Naming


@dataclass(frozen=True, slots=True)
class Present:
    """A replica's present state, which its reporter reports. `blocks` are in its cache; None: it has no mirror."""

    load: ReplicaLoad
    records: tuple[MigrationRecord, ...] = ()
    profile: Profile | None = None
    preemptions: int = 0
    blocks: tuple[int, ...] | None = None
    naming: Naming | None = None
    memory: ElasticMemory | None = None


def make_report(
    name: str,
    free: int = 10,
    requests: tuple[RequestLoad, ...] = (),
    blocks: tuple[int, ...] | None = None,
    naming: Naming | None = None,
) -> Present:
    load = ReplicaLoad(
        ReplicaId(name), ReplicaState.RUNNING, "node", Tokens(1024), 4, Blocks(free), 64, requests=requests
    )
    return Present(load, blocks=blocks, naming=naming)


class FakeRoles:
    """Implements `RoleStore`."""

    def __init__(self, kept: Mapping[ReplicaId, Role] | None = None) -> None:
        self.kept = dict(kept or {})

    def read(self) -> dict[ReplicaId, Role]:
        return dict(self.kept)

    def write(self, roles: Mapping[ReplicaId, Role]) -> None:
        self.kept = dict(roles)


class FakeLevels:
    """Implements `LevelStore`."""

    def __init__(self) -> None:
        self.kept: Levels | None = None

    def read(self, configured: Levels) -> Levels:
        return self.kept or configured

    def write(self, configured: Levels, ordered: Levels) -> None:
        self.kept = ordered


class FakeClaims:
    """Implements `ClaimStore`. While `lost`, writes fail; once `replaced`, a newer scheduler has begun."""

    def __init__(self) -> None:
        self.kept: Claims = {}
        self.lost = self.replaced = False

    def check_current(self) -> None:
        if self.replaced:
            raise Refused("a newer scheduler has begun", Cause.SUPERSEDED)

    def take_over(self) -> Claims:
        return dict(self.kept)

    def write(self, claims: Claims) -> None:
        if self.lost:
            raise ConnectionError("Ray's control service is away")
        self.check_current()
        self.kept = dict(claims)


class FakeModes:
    """Implements `ModeStore`."""

    def __init__(self, kept: ModeOrder | None = None) -> None:
        self.kept = kept

    def read(self) -> ModeOrder | None:
        return self.kept

    def write(self, order: ModeOrder) -> None:
        self.kept = order


class Reporting:
    """The reporters of replicas, as their deployments have them."""

    def __init__(self) -> None:
        self._reporters: dict[ReplicaId, ReplicaReporter] = {}

    def report(self, present: Present, version: int | None, at: float = 0.0) -> ReplicaReport:
        reporter = self._reporters.setdefault(present.load.id, ReplicaReporter(present.profile))
        gauges = Gauges((1, 2, 3), present.preemptions, naming=present.naming, memory=present.memory)

        def cache(whole: bool) -> CacheChange | None:
            return None if present.blocks is None else CacheChange({Tier.HBM: present.blocks}, {}, True)

        return reporter.report(present.load, gauges, present.records, version, at, cache)


class Answers:
    """Implements `RemoteReplicas[ControlApi]`: a replica gives one answer to any call, an error, or none ("silent")."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[tuple[Any, ...]] = []

    def at(self, replica: ReplicaId, routed: bool = True) -> "AnsweringReplica":
        return AnsweringReplica(self, replica)

    def forget(self, replica: ReplicaId) -> None:
        pass

    async def answer(self, replica: ReplicaId, call: str, *args: Any) -> Any:
        self.asked.append((replica, call, *args))
        await asyncio.sleep(0)
        return await given(self.answers[replica])


class AnswersCalls(Protocol):
    """The replicas that calls are passed on to, by name."""

    async def answer(self, replica: ReplicaId, call: str, *args: Any) -> Any: ...


class AnsweringReplica:
    """Implements `ControlApi`: one replica of `answers`."""

    def __init__(self, answers: AnswersCalls, replica: ReplicaId) -> None:
        self._answers = answers
        self._replica = replica

    async def report(self, fence: int, version: int | None) -> ReplicaReport:
        report: ReplicaReport = await self._answers.answer(self._replica, "report", fence, version)
        return report

    async def move(self, order: Order, target: ReplicaId, fence: int) -> MigrationRecord:
        record: MigrationRecord = await self._answers.answer(self._replica, "move", order, target, fence)
        return record

    async def drain(self, fence: int) -> None:
        await self._answers.answer(self._replica, "drain", fence)

    async def close(self, fence: int) -> None:
        await self._answers.answer(self._replica, "close", fence)

    async def reopen(self, fence: int) -> None:
        await self._answers.answer(self._replica, "reopen", fence)

    async def set_memory(self, order: MemoryOrder, shrink_s: float, fence: int) -> MemoryReport:
        report: MemoryReport = await self._answers.answer(self._replica, "set_memory", order, shrink_s, fence)
        return report

    async def pair(self, order: PairOrder, fence: int) -> None:
        await self._answers.answer(self._replica, "pair", order, fence)

    async def unpair(self, epoch: int, fence: int) -> None:
        await self._answers.answer(self._replica, "unpair", epoch, fence)

    async def cached_contexts(self, fence: int) -> tuple[CachedContext, ...]:
        contexts: tuple[CachedContext, ...] = await self._answers.answer(self._replica, "cached_contexts", fence)
        return contexts

    async def evacuate(self, copies: tuple[ContextCopy, ...], within_s: float, fence: int) -> int:
        done: int = await self._answers.answer(self._replica, "evacuate", copies, within_s, fence)
        return done


async def given(answer: Any) -> Any:
    """The answer; an exception is raised, "silent" never comes."""
    if answer == "silent":
        await asyncio.Event().wait()
    if isinstance(answer, Exception):
        raise answer
    return answer


class FakeMembership:
    """Implements `Membership`; `become` is what Serve would push."""

    def __init__(self, *names: str, on_change: Callable[[Membership], None] = lambda _: None) -> None:
        self.running = tuple(map(ReplicaId, names))
        self.listed = asyncio.Event()
        self.listed.set()
        self._on_change = on_change

    def become(self, *names: str) -> None:
        self.running = tuple(map(ReplicaId, sorted(names)))
        self._on_change(self)

    def stop(self) -> None:
        pass


class FakeListing:
    """Implements `Listing`: replicas that run, and `starting` ones that nobody has a name for."""

    def __init__(self, running: Collection[str], starting: int = 0) -> None:
        self.running, self.starting = set(running), starting
        self.listed = self.is_current = True
        self.deployed_at: float | None = None
        self.without_room: tuple[Status, ...] = ()

    async def refresh(self) -> None:
        pass

    @property
    def wanted_by_serve(self) -> int:
        return len(self.running) + self.starting

    def lists(self, replica: ReplicaId) -> bool:
        return replica in self.running

    def runs(self, replica: ReplicaId) -> bool:
        return replica in self.running

    def stopping(self) -> tuple[ReplicaId, ...]:
        return ()

    def leaving(self) -> tuple[ReplicaId, ...]:
        return ()

    def others(self, reported: Collection[ReplicaId]) -> tuple[Status, ...]:
        return tuple(status for status in self.without_room if status.id not in reported)


def make_ports(
    pool: PoolId, replicas: RemoteReplicas[ControlApi], members: Collection[ReplicaId], listing: Listing, scaler: Scaler
) -> PoolPorts:
    """The ports to a pool with these members, of which nothing has been stored."""
    stores = FakeRoles(), FakeLevels()
    return PoolPorts(pool, replicas, FakeMembership(*members), listing, scaler, *stores, Telemetry(pool))
