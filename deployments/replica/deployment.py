"""The `Engine` deployment: each replica runs one engine and hosts the requests on it."""

import asyncio
import copy
import logging
import os
import random
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import ray
from ray.util import get_node_ip_address

from deployments.api.calls import PairOrder, PinAnswer, Submission
from deployments.api.protocols import CONTROL_METHODS, PEER_METHODS, ChannelApi, EngineApi
from deployments.api.report import Gauges, ReplicaReport
from deployments.api.stubs import engines, scheduler_client
from deployments.cache.occupancy import CacheReport, cache_report
from deployments.channels.links import CallLinks
from deployments.channels.listening import ChannelListener
from deployments.channels.wire import ChannelOffer, Failure
from deployments.config import EngineConfig, MigrationSettings, Topology
from deployments.engine.port import Engine, EngineDead, ProfileSession
from deployments.metrics.cache import expose_cache
from deployments.metrics.exposition import Family
from deployments.metrics.vllm import expose_engine
from deployments.processes.guard import start_guard
from deployments.processes.heap import freeze_heap
from deployments.processes.niceness import take_niceness_of_parent
from deployments.replica.elastic import ElasticRequests, KvPool, start_pool
from deployments.replica.host import RequestHost
from deployments.replica.imports import import_vllm
from deployments.replica.ingress_channels import IngressChannel, offered, submit_all
from deployments.replica.moves import Moves
from deployments.replica.outbox import Outboxes
from deployments.replica.pairing import PairKeeper
from deployments.replica.peers import ChannelPeer, PeerCalls, PeerConnections
from deployments.replica.prefix_cache.contexts import BYTES_PER_TOKEN, PastContexts
from deployments.replica.prefix_cache.copies import Copies
from deployments.replica.prefix_cache.evacuation import Evacuator, LastCopies
from deployments.replica.prefix_cache.fetching import Fetches
from deployments.replica.prefix_cache.pins import Pins
from deployments.replica.prefix_cache.recomputing import Recomputation
from deployments.replica.prefix_cache.returning import Returns
from deployments.replica.reporting import ReplicaReporter
from deployments.replica.seating import Seating
from deployments.replica.standby import keep_standby, take
from deployments.replica.transports import make_slots, make_transport, size_slots
from deployments.replica.utilities import EngineUtilities
from deployments.serve.environment import check_environment
from deployments.serve.membership import Membership, ServeMembership
from deployments.serve.routing import own_app, own_id, own_node, own_pool
from deployments.serve.scaling import REQUESTS
from migration.concurrency import repeat
from migration.protocol.core_messages import Adapter
from migration.protocol.errors import Refused, Stopping
from migration.protocol.ports import PeerGroups
from migration.protocol.record import CopyRecord, MigrationRecord
from migration.protocol.request import IngressId, ModelIdentity
from migration.run.donor import CopyOrder
from migration.run.profiling import measure
from migration.run.source import Order
from migration.run.world import MigrationWorld
from policies.causes import Cause
from policies.memory.ledger import MemoryOrder, MemoryReport, OrderNumber
from policies.model import Blocks, ReplicaId, ReplicaLoad, ReplicaState, RequestId
from policies.prefix.evacuation import CachedContext, ContextCopy

log = logging.getLogger("ray.serve")

_WATCH_PERIOD_S = 0.2
"""The time between two checks of the replica's own state, in seconds."""

_ADAPTER_S = 2.0
"""The longest time that a request waits here for its adapter; then it tries another replica, or this one again."""


class EngineReplica:
    """Implements `EngineApi`."""

    _given_up: str | None = None
    """The reason why the engine was given up."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, engine: EngineConfig, migration: MigrationSettings, topology: Topology
    ) -> None:
        """Start the engine. The replica is RUNNING for Serve once this returns."""
        check_environment()
        self._id, self._node = own_id(), own_node()
        self._pool = own_pool()
        self._ingress_lease_s = topology.ingress_lease_s
        self._fence = self._preemptions = 0
        self._silence_s, self._grace_s = topology.engine_silence_s, topology.grace_s
        if not take():
            start_guard()
        self._scheduler = scheduler_client(own_app())
        seating = await self._seated(engine)
        self._engine: Engine = await _engine_class(engine.kind).start(
            engine.model_source, engine.kwargs, engine.audit_s, engine.dram_gib, engine.declared
        )
        take_niceness_of_parent((self._engine.processes.core, *self._engine.processes.workers))
        for adapter in engine.adapters:
            await self._engine.load_adapter(adapter)
        self._utilities = EngineUtilities(self._engine, self._id)
        self._outboxes = Outboxes(time.monotonic)
        self._listener = await ChannelListener.start(get_node_ip_address())
        remembers = (engine.evacuates or engine.recompute_s > 0) and self._engine.mirror.off is None
        contexts = PastContexts(self._context_bytes if remembers else lambda: 0, time.monotonic)
        self._recomputation = Recomputation(self._engine, contexts, self._lacks, random.Random())
        self._host = RequestHost(
            self._engine,
            self._outboxes,
            time.monotonic,
            self._free_tokens,
            by_priority=engine.kwargs.get("scheduling_policy") == "priority",
            contexts=contexts,
        )
        at = await start_pool(self._engine.memory, seating)
        sizes = size_slots(migration, self._engine.fingerprint, self._engine.max_context, engine.on_gpu)
        self._slots = make_slots(migration, sizes)
        # Requests of pooling models stay where they are: no path is chosen for them.
        moves = "generate" in self._engine.tasks
        profile = await measure(self._engine, self._slots, self._node, time.perf_counter) if moves else None
        self._reporter = ReplicaReporter(profile, first=time.time_ns())
        self._transport = make_transport(migration, sizes)
        world = self._make_world(migration, engine.hides_handed_over)
        self._replicas = engines(own_app(), self._pool)
        self._links = CallLinks(lambda peer: self._replicas.at(peer, routed=False).peer_channel(), PEER_METHODS)
        self._moves = Moves(world, self._host, self._peer, migration.lease_s, self._notify_record)
        self._copies = Copies(world, self._engine, self._peer, self._lacks, migration.lease_s, self._notify_copy)
        self._fetches = Fetches(self._host, self._moves, self._copy_here)
        self._pins = Pins(self._engine, engine.pin_share)
        self._returns = Returns(self._id, self._copies.copy, self._returns_wait, time.monotonic)
        self._host.on_context = self._returns.add
        self._evacuator = Evacuator(self._engine, contexts, self._copies.copy, time.monotonic)
        self._last_copies, self._kv_pool = self._make_last_copies(), self._make_pool(at)
        self._pairs = self._make_pairs()
        self._peer_calls = PeerCalls(
            self._id, self._moves, self._copies, self._lacks, self._engine, migration.limits.adopt_s, self._pairs
        )
        self._peers = PeerConnections(self._id, self._links.open, self._forget)
        self._membership = ServeMembership(self._pool, own_app(), f"engine-{self._id}", self._peers_changed)
        self._saves_cache = engine.evacuates and remembers
        checks = (self._watch_preemptions, self._watch_tokens, self._watch_ingresses, self._watch_stop)
        loops = [repeat(check, _WATCH_PERIOD_S) for check in checks]
        loops += [repeat(self._recompute, engine.recompute_s)] if engine.recompute_s else []
        loops += [keep_standby()] if engine.standby else []
        self._tasks = [asyncio.create_task(loop) for loop in loops]
        freeze_heap()

    async def _seated(self, engine: EngineConfig) -> Seating | None:
        """Wait until the node has memory for the engine; None if there is no budget of memory."""
        if engine.declared is None:
            return None
        seating = Seating(self._scheduler, self._pool, self._id, self._node)
        await seating.wait()
        return seating

    def _peers_changed(self, membership: Membership) -> None:
        """End migrations and copies to replicas that have left now, not at their time-outs; connect to new ones."""
        self._peers.follow(membership.running)
        self._moves.outgoing.follow(membership.running)
        self._copies.outgoing.follow(membership.running)

    def _has_peers(self) -> bool:
        """True if another replica runs, and stays."""
        return bool(set(self._membership.running) - {self._id})

    def _make_last_copies(self) -> LastCopies:
        return LastCopies(self._evacuate, self._saves, self._grace_s, time.monotonic)

    def _saves(self) -> bool:
        """True if the cache is copied to others before it goes."""
        return self._saves_cache and self._has_peers()

    def _make_pool(self, at: OrderNumber) -> KvPool:
        requests = ElasticRequests(
            self._host,
            self._moves,
            self._engine.fingerprint.block_size,
            lambda: self._pending,
            self._make_last_copies,
            self._give_up,
        )
        return KvPool(self._id, self._engine.memory, requests, at)

    def _make_pairs(self) -> PairKeeper:
        def give_up(reason: str) -> None:
            self._ending = asyncio.create_task(self._give_up(reason))

        return PairKeeper(
            self._id,
            self._engine.fingerprint.model,
            self._engine.half,
            self._kv_pool,
            self._peer,
            lambda: self._host.closed,
            give_up,
        )

    async def _evacuate(self, within_s: float) -> None:
        """Have the scheduler order the copies of the cache."""
        await self._scheduler.within(within_s).evacuate(self._pool, self._id, self._engine.fingerprint.model, within_s)

    def _make_world(self, config: MigrationSettings, hides_handed_over: bool) -> MigrationWorld:
        return MigrationWorld(
            replica=self._id,
            pool=self._pool,
            host=self._host,
            blocks=self._engine,
            transport=self._transport,
            slots=self._slots,
            limits=config.limits,
            clock=time.monotonic,
            wall_clock=time.time,
            hides_handed_over=hides_handed_over,
        )

    def _peer(self, replica: ReplicaId) -> ChannelPeer:
        return ChannelPeer(self._links, replica)

    def _forget(self, replica: ReplicaId) -> None:
        """A replica is listed no more. It goes on with what it does until its grace period ends."""
        self._disconnect(replica)
        asyncio.get_running_loop().call_later(self._grace_s, self._leave, replica)

    def _leave(self, replica: ReplicaId) -> None:
        """Give up all that is kept for a replica that has ended: its moves to here may have connected again."""
        if replica not in self._membership.running:
            self._disconnect(replica)
            if isinstance(self._transport, PeerGroups):
                self._transport.leave(replica)

    def _disconnect(self, replica: ReplicaId) -> None:
        self._links.forget(replica)
        self._replicas.forget(replica)

    async def _copy_here(self, donor: ReplicaId, order: CopyOrder) -> CopyRecord:
        return await self._peer(donor).copy_prefix(order, self._id)

    def _notify_copy(self, record: CopyRecord) -> None:
        self._scheduler.notify(lambda scheduler: scheduler.copied(self._pool, record))

    def _notify_record(self, record: MigrationRecord) -> None:
        self._scheduler.notify(lambda scheduler: scheduler.record(self._pool, record))

    def _context_bytes(self) -> int:
        """The memory for past contexts, in bytes."""
        stats = self._engine.stats()
        return BYTES_PER_TOKEN * (stats.capacity_tokens + self._engine.host_blocks * stats.block_size)

    def _free_tokens(self) -> int:
        stats = self._engine.stats()
        return stats.free_blocks * stats.block_size

    # --- Serve ----------------------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raise `EngineDead` if the engine is dead or hangs: Serve then replaces this replica."""
        if self._given_up is not None:
            raise EngineDead(self._given_up)
        await self._engine.check_health()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The number of requests, for Serve's own autoscaler if it is used: see `deployments.serve.scaling`."""
        return {REQUESTS: float(sum(1 for _ in self._host.loads()))}

    async def __del__(self) -> None:
        if not hasattr(self, "_tasks"):
            return  # The start has failed: this process ends, and the engine's processes with it.
        for task in self._tasks:
            task.cancel()
        self._last_copies.close()
        self._pairs.close()
        self._kv_pool.close()
        self._returns.close()
        self._membership.stop()
        self._peers.close()
        self._outboxes.close()
        self._links.close()
        self._listener.close()
        self._transport.close()
        self._slots.close()
        self._engine.shutdown()

    async def metrics(self) -> tuple[Family, ...]:
        """See `MetricsApi.metrics`. Renders vLLM's own metrics in a thread, so that the event loop does not wait."""
        cache = expose_cache(self._cache(), self._copies.made, self._recomputation.ended, self._pool, self._id)
        memory = self._kv_pool.metrics(self._fence, self._pool)
        pairs = self._pairs.metrics(self._pool)
        return (*await asyncio.to_thread(expose_engine, self._id), *cache, *memory, *pairs)

    # --- for the ingress ------------------------------------------------------------------------------

    async def channel(self, ingress: IngressId) -> AsyncIterator[ChannelOffer]:
        """See `EngineApi.channel`."""
        channel = IngressChannel(ingress, self._outboxes, self)
        async with offered(self._listener, channel) as offer:
            yield offer
            await channel.over()

    async def submit(self, requests: tuple[Submission, ...]) -> tuple[str | Failure, ...]:
        """See `ChannelApi.submit`."""
        return await submit_all(requests, self._submit, self._lacks)

    async def _lacks(self, adapter: Adapter) -> Refused | None:
        """The reason why the engine does not have the adapter of a request, even after some time; None if it has."""
        try:
            async with asyncio.timeout(_ADAPTER_S):
                await self._engine.load_adapter(adapter)
        except TimeoutError:
            return Stopping(f"adapter {adapter.lora_name!r} is still being loaded", Cause.ADAPTER)
        except Refused as error:
            return error
        return None

    async def load_adapter(self, adapter: Adapter) -> None:
        """See `AdapterApi.load_adapter`."""
        await self._engine.load_adapter(adapter)

    async def tasks(self) -> tuple[str, ...]:
        """See `RequestApi.tasks`."""
        return self._engine.tasks

    async def served(self) -> ModelIdentity:
        """See `RequestApi.served`."""
        return ModelIdentity(self._engine.fingerprint.model, self._host.tied)

    def _submit(self, request: Submission) -> Refused | str:
        """Run a request that has come by a channel."""
        model = self._engine.fingerprint.model
        if request.model not in (None, model):
            return Refused("another version of the model runs here", Cause.FINGERPRINT)
        try:
            if request.fetch is not None:
                self._fetches.submit(request.spec, request.hop, request.outputs, request.fetch, request.then)
            else:
                self._moves.submit(request.spec, request.hop, request.outputs, request.then)
        except Refused as error:
            return error
        return model

    async def keep(self, request: RequestId, hop: int, next_hop: int) -> None:
        """See `ServingApi.keep`."""
        self._moves.keep(request, hop, next_hop)

    async def release(self, request: RequestId, hop: int | None) -> None:
        """See `ServingApi.release`."""
        self._moves.release(request, hop)

    async def attach(self, request: RequestId, hop: int, index: int) -> bool:
        """See `ServingApi.attach`."""
        return self._moves.attach(request, hop, index)

    # --- for the scheduler ----------------------------------------------------------------------------

    async def control_channel(self) -> ChannelOffer:
        """See `EngineApi.control_channel`."""
        return self._listener.offer_calls(self, CONTROL_METHODS)

    async def report(self, fence: int, version: int | None) -> ReplicaReport:
        """See `ControlApi.report`."""
        # Nothing is awaited here: the answer describes one moment, and has one version.
        self._check_fence(fence)
        if self._pairs.is_over:
            self._kv_pool.measure()
        processes = self._engine.processes
        gauges = Gauges(
            pids=(os.getpid(), processes.core, *processes.workers),
            preemptions=self._engine.stats().preemptions,
            blocks_loaded=self._engine.blocks_loaded,
            slots_in_use=self._slots.in_use,
            cache=self._cache(),
            naming=self._engine.naming,
            memory=self._kv_pool.report(fence, self._pairs.unable, self._pairs.report()),
        )
        mirror = self._engine.mirror
        return self._reporter.report(
            self._load(), gauges, self._moves.records(), version, time.monotonic(), mirror.change
        )

    async def move(self, order: Order, target: ReplicaId, fence: int) -> MigrationRecord:
        """See `ControlApi.move`."""
        self._check_fence(fence)
        return self._moves.start(order, target)

    async def drain(self, fence: int) -> None:
        """See `ControlApi.drain`."""
        self._check_fence(fence)
        self._moves.stop()
        self._pairs.undo("the replica drains")

    async def close(self, fence: int) -> None:
        """See `ControlApi.close`."""
        self._check_fence(fence)
        if any(self._host.loads()) or self._pending:
            raise Refused("the replica is not empty", Cause.NOT_EMPTY)
        if self._pairs.undo("the replica closes"):
            raise Refused("the replica is in a pair, which is being undone", Cause.NOT_EMPTY)
        self._moves.stop()

    async def set_memory(self, order: MemoryOrder, shrink_s: float, fence: int) -> MemoryReport:
        """See `ControlApi.set_memory`."""
        self._check_fence(fence)
        return self._kv_pool.obey(order, shrink_s)

    async def pair(self, order: PairOrder, fence: int) -> None:
        """See `ControlApi.pair`."""
        self._check_fence(fence)
        await self._pairs.form(order)

    async def unpair(self, epoch: int, fence: int) -> None:
        """See `ControlApi.unpair`."""
        self._check_fence(fence)
        if not self._pairs.undo("it was ordered to end", epoch):
            raise Refused(f"replica {self._id} is not in that pair", Cause.UNEXPECTED)

    @property
    def _pending(self) -> int:
        """The number of migrations and copies that occupy memory here."""
        return self._moves.pending + len(self._copies.outgoing)

    async def reopen(self, fence: int) -> None:
        """See `ControlApi.reopen`."""
        self._check_fence(fence)
        if is_stopping():
            raise Stopping("Serve is stopping the replica")
        self._host.stopping = False

    async def cached_contexts(self, fence: int) -> tuple[CachedContext, ...]:
        """See `ControlApi.cached_contexts`."""
        self._check_fence(fence)
        return await self._evacuator.cached()

    async def evacuate(self, copies: tuple[ContextCopy, ...], within_s: float, fence: int) -> int:
        """See `ControlApi.evacuate`."""
        self._check_fence(fence)
        return await self._evacuator.send(copies, within_s)

    # --- for operators --------------------------------------------------------------------------------

    async def delete_blocks(self, names: tuple[int, ...] | None) -> Blocks:
        """See `CacheApi.delete_blocks`."""
        return await self._pins.delete(names)

    async def pin_blocks(self, names: tuple[int, ...], ttl_s: float) -> PinAnswer:
        """See `CacheApi.pin_blocks`."""
        return await self._pins.pin(names, ttl_s)

    async def reset_prefix_cache(self) -> str | None:
        """See `UtilityApi.reset_prefix_cache`."""
        return await self._pins.reset(self._utilities.reset_prefix_cache)

    async def start_profile(self, session: ProfileSession) -> str | None:
        """See `UtilityApi.start_profile`."""
        return await self._utilities.start_profile(session)

    async def stop_profile(self) -> str | None:
        """See `UtilityApi.stop_profile`."""
        return await self._utilities.stop_profile()

    # --- for other replicas ---------------------------------------------------------------------------

    async def peer_channel(self) -> ChannelOffer:
        """See `EngineApi.peer_channel`."""
        return self._listener.offer_calls(self._peer_calls, PEER_METHODS)

    async def copy_prefix(self, order: CopyOrder, to: ReplicaId) -> CopyRecord:
        """See `CopyApi.copy_prefix`."""
        return await self._peer_calls.copy_prefix(order, to)

    # --- inside ---------------------------------------------------------------------------------------

    def _returns_wait(self) -> bool:
        """True while returns would be in the way of moves and of other copies."""
        return self._host.closed is not None or bool(self._copies.outgoing) or self._moves.exchanging

    def _cache(self) -> CacheReport:
        """The report on the engine's prefix cache."""
        stats, host = self._engine.stats(), self._host
        total = Blocks(stats.capacity_tokens // stats.block_size)
        partial = host.partial_blocks(stats.block_size)
        engine = self._engine
        return cache_report(
            engine.mirror, total, stats.free_blocks, partial, host.prompts, engine.host_blocks, self._pins.pinned
        )

    def _load(self) -> ReplicaLoad:
        """The state of replica and engine. Blocks reserved for requests on their way here are not free."""
        stats = self._engine.stats()
        reserved = -(-self._host.reserved_tokens // stats.block_size)
        requests = tuple(self._host.loads())
        stops = self._host.stopping or self._engine.death is not None
        return ReplicaLoad(
            id=self._id,
            state=ReplicaState.DRAINING if stops else self._kv_pool.state(is_empty=not requests),
            node=self._node,
            capacity_tokens=stats.capacity_tokens,
            block_size=stats.block_size,
            free_blocks=Blocks(stats.free_blocks - reserved),
            max_requests=stats.max_requests,
            model=self._engine.fingerprint.model,
            steps=stats.steps,
            step_tokens=stats.step_tokens,
            max_adapters=stats.max_adapters,
            nominal_tokens=stats.nominal_tokens,
            requests=requests,
        )

    def _check_fence(self, fence: int) -> None:
        if fence < self._fence:
            raise Refused(f"a newer scheduler is at work (fence {self._fence}, yours {fence})", Cause.SUPERSEDED)
        self._fence = fence

    async def _recompute(self) -> None:
        """Recompute a cached context, unless a request is here or on its way."""
        if not (any(self._host.loads()) or self._pending or self._host.closed is not None):
            await self._recomputation.check()

    async def _watch_preemptions(self) -> None:
        """Have the scheduler look at once when the engine has preempted a request."""
        if (now := self._engine.stats().preemptions) != self._preemptions:
            self._preemptions = now
            self._scheduler.notify(lambda scheduler: scheduler.hurry())

    async def _watch_tokens(self) -> None:
        """Give up an engine that hangs."""
        if self._pairs.pauses:
            self._host.excuse_silence()
        elif self._host.silent_s() > self._silence_s and not self._engine.profiling:
            await self._give_up(f"the engine gave no token for {self._silence_s:g} s")

    async def _give_up(self, reason: str) -> None:
        """Free the engine's memory now. Serve stops this replica only after its next health checks."""
        self._given_up = reason
        self._host.lose_all(reason)
        await asyncio.to_thread(self._engine.shutdown)

    async def _watch_ingresses(self) -> None:
        """End the requests of ingresses that do not read them."""
        for ingress in self._outboxes.silent(self._ingress_lease_s):
            try:
                count = self._host.forget_ingress(ingress)
                log.warning("ingress %s is gone; ended %d of its requests", ingress, count)
            finally:
                self._outboxes.forget(ingress)

    async def _watch_stop(self) -> None:
        """Follow a stop by Serve: end what comes here, save the cache, and then let Serve go on."""
        if is_stopping():
            self._moves.stop()
            self._pairs.undo("the replica stops")
            empty = not any(self._host.loads()) and not self._pending
            # The buddy's requests go on: the pair ends before the engine does.
            if self._last_copies.over(empty=empty) and self._pairs.is_over:
                # Serve waits for open streams, and the ingresses' streams of events never end by themselves.
                self._outboxes.close()


if TYPE_CHECKING:
    _offers: type[EngineApi] = EngineReplica
    _answers: type[ChannelApi] = EngineReplica


def _engine_class(kind: str) -> Any:
    """The engine class of that kind. vLLM's lines go to Serve's replica log, and its errors to the terminal as well."""
    if kind == "paced":
        from deployments.engine.paced import PacedEngine

        return PacedEngine
    engine = import_vllm()
    for handler in log.handlers:
        logging.getLogger("vllm").addHandler(
            errors_only(handler) if type(handler) is logging.StreamHandler else handler
        )
    return engine


def errors_only(handler: logging.Handler) -> logging.Handler:
    """A handler like this one, for errors."""
    made = copy.copy(handler)
    made.setLevel(logging.ERROR)
    return made


def is_stopping() -> bool:
    """True if Serve has begun to stop the replica of this process.

    Serve has no public sign of it. Without the private one (tested with Ray 2.60), a stop takes the whole grace period.
    """
    worker = ray._private.worker.global_worker
    replica = getattr(worker.actors.get(worker.actor_id), "_replica_impl", None)
    return bool(getattr(replica, "_shutting_down", False))
