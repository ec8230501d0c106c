"""The `Scheduler` deployment: the one process that places requests, orders migrations and scales the pools.

Its state is soft: it is rebuilt from the replicas' reports within an epoch of its start. While no scheduler runs,
requests stay on their replicas, and ingresses place new ones by themselves.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from ray.util import get_node_ip_address

from deployments.api.calls import (
    MoveAccepted,
    MoveAnswer,
    MoveRejected,
    PlaceAnswer,
    PlaceCall,
    SeatAnswer,
    SeatCall,
    SeatLater,
)
from deployments.api.protocols import DISPATCH_METHODS, DispatchApi, SchedulerApi
from deployments.api.stubs import engines
from deployments.channels.listening import ChannelListener
from deployments.channels.wire import ChannelOffer
from deployments.config import SchedulerConfig, Topology
from deployments.metrics.exposition import Family, join_families
from deployments.metrics.telemetry import Telemetry, expose_budgets
from deployments.processes.guard import start_guard
from deployments.processes.heap import keep_heap_frozen
from deployments.processes.niceness import take_niceness_of_parent
from deployments.scheduler.epochs import Epochs
from deployments.scheduler.listing import ServeListing
from deployments.scheduler.memory.ledgers import BudgetedPool
from deployments.scheduler.memory.nodes import NodeMemory
from deployments.scheduler.mode import OrderedMode
from deployments.scheduler.pool_scheduler import PoolPorts, PoolScheduler
from deployments.scheduler.recorder import FileRecorder
from deployments.scheduler.scaler import ServeScaler
from deployments.serve.environment import check_environment
from deployments.serve.fences import next_fence
from deployments.serve.levels import ServeLevelStore
from deployments.serve.membership import ServeMembership
from deployments.serve.modes import ModeStore, ServeModeStore
from deployments.serve.retirement import generation
from deployments.serve.roles import ServeRoleStore
from deployments.serve.routing import own_app, own_id
from deployments.serve.seats import ClaimStore, ServeClaimStore
from migration.protocol.messages import PathRequest
from migration.protocol.ports import Clock
from migration.protocol.record import CopyRecord, MigrationRecord
from migration.protocol.request import IngressId
from policies.cluster.changes import Arrival
from policies.cost.latencies import ClassCounts
from policies.decision.deciding import SchedulerMemory
from policies.decision.limits import Mode, Terms
from policies.decision.placement import Decision, PlacingView
from policies.model import PoolId, ReplicaId, Role

log = logging.getLogger("ray.serve")


_STALLED_EPOCHS = 30
"""The number of missing epochs after which the scheduler counts as stalled."""

_SERVE_SCALES = (
    "with autoscaling_config.target_ongoing_requests, Serve decides the number of replicas: the mode act needs a "
    "deployment without it"
)


class LiveScheduler:
    """Implements `SchedulerApi`: runs an epoch every `epoch_s` seconds, and answers ingresses and operators in between.

    A call about a pool goes to that pool's `PoolScheduler`, and raises `KeyError` for an unknown one. `id` is the id of
    the scheduler itself, which is a replica of its deployment, too.
    """

    def __init__(
        self,
        id: ReplicaId,
        config: SchedulerConfig,
        fence: int,
        pools: Sequence[PoolPorts],
        clock: Clock,
        wall_clock: Clock,
        modes: ModeStore,
        claims: ClaimStore,
    ) -> None:
        self._id = id
        self._config = config
        self._clock = clock
        # The listings of all pools have the application's time of deployment.
        self._ordered = OrderedMode(config.mode, modes, pools[0].listing)
        terms = replace(config.terms, mode=self._ordered.mode)
        self._memory = memory = SchedulerMemory(terms)
        self._recorder = _recorder(config, terms, fence)
        elastic = {ports.pool: _elastic_pool(ports, config.of(ports.pool).weight) for ports in pools}
        self._claims = claims
        self._nodes = NodeMemory.of(
            config.memory, fence, elastic, claims, lambda: self._memory.terms.mode is Mode.ACT, clock
        )
        self._pools = {
            ports.pool: PoolScheduler(
                config.of(ports.pool),
                fence,
                ports,
                memory.pool(ports.pool),
                clock,
                wall_clock,
                lambda: self._epochs,
                self._nodes,
            )
            for ports in pools
        }
        self._epochs = Epochs(
            config,
            [pool.live for pool in self._pools.values()],
            memory,
            clock,
            self._recorder,
            lambda: self._ordered.mode,
            self._nodes,
        )
        for pool in self._pools.values():
            pool.restore_orders()

    async def run(self) -> None:
        """Run epochs, from Serve's first lists of the replicas until a newer scheduler has replaced this one."""
        for pool in self._pools.values():
            await pool.listed()
        await self._epochs.run()

    @property
    def silent_s(self) -> float:
        """Seconds since the last epoch began."""
        return self._clock() - self._epochs.last

    def close(self) -> None:
        """Stop gathering, and end the recording."""
        for pool in self._pools.values():
            pool.close()
        if self._recorder is not None:
            self._recorder.close()

    # --- for ingresses and replicas -------------------------------------------------------------------

    async def place(self, calls: tuple[PlaceCall, ...]) -> list[Decision]:
        """See `PlacingApi.place`."""
        await self._epochs.ready.wait()
        placed = {
            pool: self._pools[pool].place([call for call in calls if call.pool == pool])
            for pool in dict.fromkeys(call.pool for call in calls)
        }
        return [placed[call.pool][call.arrival.id] for call in calls]

    async def place_all(self, calls: tuple[PlaceCall, ...]) -> tuple[PlaceAnswer, ...]:
        """See `DispatchApi.place_all`."""
        return tuple(map(PlaceAnswer.of, await self.place(calls)))

    async def view(self, pool: PoolId) -> PlacingView:
        """See `PlacingApi.view`."""
        return self._pools[pool].view()

    async def metrics(self) -> tuple[Family, ...]:
        """See `MetricsApi.metrics`."""
        found = [pool.metrics(self._id) for pool in self._pools.values()]
        if self._nodes is not None:
            ledgers = self._nodes.ledgers
            found.append(expose_budgets(ledgers.nodes if ledgers.is_known else (), ledgers.budget, self._id))
        return join_families(found)

    async def record(self, pool: PoolId, record: MigrationRecord) -> None:
        """See `NoticeApi.record`."""
        self._pools[pool].record(record)

    async def copied(self, pool: PoolId, record: CopyRecord) -> None:
        """See `NoticeApi.copied`."""
        self._pools[pool].copied(record)

    async def latencies(self, pool: PoolId, ingress: IngressId, counts: ClassCounts) -> None:
        """See `NoticeApi.latencies`."""
        self._pools[pool].latencies(ingress, counts)

    async def hurry(self) -> None:
        """See `NoticeApi.hurry`."""
        self._epochs.hurry()

    async def seat(self, call: SeatCall) -> SeatAnswer:
        """See `SeatApi.seat`."""
        self._claims.check_current()
        if self._nodes is None:
            raise ValueError("memory.budget_mib is not set: replicas start without asking")
        answer = self._nodes.starting.seat(call)
        if isinstance(answer, SeatLater):
            self._epochs.hurry()
        return answer

    async def evacuate(self, pool: PoolId, replica: ReplicaId, model: str, within_s: float) -> None:
        """See `EvacuationApi.evacuate`."""
        await self._epochs.ready.wait()
        await self._pools[pool].evacuate(replica, model, within_s)

    # --- for operators --------------------------------------------------------------------------------

    async def wanted(self, pool: PoolId) -> int | None:
        """See `OperatorApi.wanted`."""
        return self._pools[pool].wanted()

    async def state(self, pool: PoolId) -> dict[str, Any]:
        """See `OperatorApi.state`."""
        return await self._pools[pool].state()

    async def migrations(self, pool: PoolId) -> dict[str, Any]:
        """See `OperatorApi.migrations`."""
        return await self._pools[pool].migrations()

    async def snapshot(self, pool: PoolId) -> tuple[dict[str, Any], dict[str, Any]]:
        """See `OperatorApi.snapshot`."""
        return self._pools[pool].snapshot()

    async def migrate(self, pool: PoolId, id: str, reference: str, target: str | None, path: PathRequest) -> MoveAnswer:
        """See `OperatorApi.migrate`."""
        return await self._pools[pool].migrate(id, reference, target, path)

    async def drain(self, pool: PoolId, replica: str) -> MoveAnswer:
        """See `OperatorApi.drain`. Its requests move to other replicas while they run."""
        return await self._pools[pool].drain(replica)

    async def set_role(self, pool: PoolId, replica: str, role: Role | None) -> MoveAnswer:
        """See `OperatorApi.set_role`. The next epoch assigns it."""
        return self._pools[pool].set_role(replica, role)

    async def set_memory(self, pool: PoolId, replica: str, blocks: int | None) -> MoveAnswer:
        """See `OperatorApi.set_memory`."""
        return await self._pools[pool].set_memory(replica, blocks)

    async def set_asleep(self, pool: PoolId, replica: str | None, asleep: bool) -> MoveAnswer:
        """See `OperatorApi.set_asleep`."""
        return await self._pools[pool].set_asleep(replica, asleep)

    async def pair(self, pool: PoolId, lower: str, upper: str) -> MoveAnswer:
        """See `OperatorApi.pair`."""
        return await self._pools[pool].pair(lower, upper)

    async def unpair(self, pool: PoolId, replica: str) -> MoveAnswer:
        """See `OperatorApi.unpair`."""
        return await self._pools[pool].unpair(replica)

    async def set_mode(self, mode: Mode) -> MoveAnswer:
        """See `OperatorApi.set_mode`. Moves that have been ordered before go on to their ends."""
        if mode is Mode.ACT and not all(self._config.of(pool).scales for pool in self._pools):
            return MoveRejected(422, _SERVE_SCALES)
        await self._ordered.order(mode)
        await self._epochs.follow_mode()
        return MoveAccepted(mode)

    async def set_bounds(self, pool: PoolId, least: int, most: int) -> MoveAnswer:
        """See `OperatorApi.set_bounds`."""
        return self._pools[pool].set_bounds(least, most)

    async def set_level(
        self, pool: PoolId, service_class: str, ttft_p99_s: float | None, itl_p99_s: float | None
    ) -> MoveAnswer:
        """See `OperatorApi.set_level`."""
        return await self._pools[pool].set_level(service_class, ttft_p99_s, itl_p99_s)

    async def match(self, pool: PoolId, arrival: Arrival) -> dict[str, Any]:
        """See `OperatorApi.match`."""
        await self._epochs.ready.wait()
        return self._pools[pool].match(arrival)


class EpochScheduler(LiveScheduler):
    """The deployment: a `LiveScheduler` over the application's replicas in Serve."""

    async def __init__(self, config: SchedulerConfig, topology: Topology) -> None:  # type: ignore[misc]  # Serve awaits it
        check_environment()
        start_guard()
        take_niceness_of_parent()
        self._listener = await ChannelListener.start(get_node_ip_address())
        app = own_app()
        clock, wall_clock = time.monotonic, time.time
        fence = next_fence(app)
        self._memberships: list[ServeMembership] = []
        pools = [self._ports(app, pool, config, clock, wall_clock) for pool in topology.pools.values()]
        claims = ServeClaimStore(app, fence)
        super().__init__(own_id(), config, fence, pools, clock, wall_clock, ServeModeStore(app), claims)
        self._stalled_s = _STALLED_EPOCHS * config.epoch_s + config.report_timeout_s
        self._loop = asyncio.create_task(self.run())
        self._freezing = asyncio.create_task(keep_heap_frozen(config.epoch_s))
        log.info("scheduler started with fence %d, mode %s, policy %s", fence, self._epochs.mode, config.policy)

    def _ports(self, app: str, pool: PoolId, config: SchedulerConfig, clock: Clock, wall_clock: Clock) -> PoolPorts:
        replicas = engines(app, pool)
        # A replica that has left Serve's list may need evacuation.
        membership = ServeMembership(pool, app, f"scheduler-{pool}-{own_id()}", lambda _: self._epochs.hurry())
        self._memberships.append(membership)
        listing = ServeListing(app, pool, config.report_timeout_s)
        telemetry = Telemetry(pool)
        scaler = ServeScaler(app, pool, replicas, listing, config.of(pool).bounds, telemetry.freed, clock, wall_clock)
        stores = ServeRoleStore(app, pool), ServeLevelStore(app, pool, generation())
        return PoolPorts(pool, replicas, membership, listing, scaler, *stores, telemetry)

    async def check_health(self) -> None:
        """Raise `RuntimeError` if epochs have stopped: Serve then starts another scheduler."""
        check_epochs(self._loop.done(), self.silent_s, self._stalled_s)

    async def channel(self) -> ChannelOffer:
        """See `SchedulerApi.channel`."""
        return self._listener.offer_calls(self, DISPATCH_METHODS)

    def __del__(self) -> None:
        self._listener.close()
        self._loop.cancel()
        self._freezing.cancel()
        for membership in self._memberships:
            membership.stop()
        self.close()


if TYPE_CHECKING:
    _offers: type[SchedulerApi] = EpochScheduler
    _answers: type[DispatchApi] = LiveScheduler


def check_epochs(ended: bool, silent_s: float, stalled_s: float) -> None:
    """Raise `RuntimeError` if the loop of epochs has ended, or if the last epoch began `stalled_s` seconds ago."""
    if ended or silent_s > stalled_s:
        raise RuntimeError(f"no epoch for {silent_s:.1f} s")


def _elastic_pool(ports: PoolPorts, weight: float) -> BudgetedPool:
    listing, scaler = ports.listing, ports.scaler
    return BudgetedPool(
        ports.replicas,
        weight,
        lambda: (scaler.min_replicas, scaler.max_replicas),
        lambda replica: listing.is_current and not listing.lists(replica),
    )


def _recorder(config: SchedulerConfig, terms: Terms, fence: int) -> FileRecorder | None:
    """The recorder of epochs, if they are recorded. Every scheduler writes a file of its own."""
    if config.record is None:
        return None
    path = FilePath(config.record) / f"epochs-{time.strftime('%Y%m%d-%H%M%S')}-{fence}.jsonl"
    return FileRecorder(path, terms)
