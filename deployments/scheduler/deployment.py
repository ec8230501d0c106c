"""The `Scheduler` deployment: the one process that places requests, orders migrations and scales the pool.

Its state is soft: it is rebuilt from the replicas' reports within an epoch of its start. While no scheduler runs,
requests stay on their replicas, and ingresses place new ones by themselves.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, replace
from http import HTTPStatus
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.util import get_node_ip_address

from deployments.api.calls import MoveAccepted, MoveAnswer, MoveRejected, PlaceAnswer, PlaceCall
from deployments.api.protocols import DISPATCH_METHODS, ControlApi, DispatchApi, RemoteReplicas, SchedulerApi
from deployments.api.report import replica_json
from deployments.api.stubs import engines
from deployments.channels.listening import ChannelListener
from deployments.channels.wire import ChannelOffer
from deployments.config import SchedulerConfig, Topology
from deployments.metrics.exposition import Family
from deployments.metrics.telemetry import Telemetry
from deployments.processes.guard import start_guard
from deployments.processes.heap import keep_heap_frozen
from deployments.processes.niceness import take_niceness_of_parent
from deployments.scheduler.dispatch import Dispatch
from deployments.scheduler.epochs import Epochs
from deployments.scheduler.evacuating import Evacuations
from deployments.scheduler.gatherer import EngineReporters, Gatherer
from deployments.scheduler.listing import Listing, ServeListing
from deployments.scheduler.mode import OrderedMode
from deployments.scheduler.pool import LivePool
from deployments.scheduler.recorder import FileRecorder
from deployments.scheduler.records import Records
from deployments.scheduler.scaler import Scaler, ServeScaler
from deployments.serve.environment import check_environment
from deployments.serve.membership import Membership, ServeMembership
from deployments.serve.modes import ModeStore, ServeModeStore
from deployments.serve.roles import RoleStore, ServeRoleStore
from deployments.serve.routing import own_app, own_id
from migration.protocol.errors import MigrationError, PeerLost
from migration.protocol.messages import ONLY, PathRequest
from migration.protocol.ports import Clock
from migration.protocol.record import CopyRecord, MigrationRecord
from migration.protocol.request import IngressId
from migration.run.source import Order
from policies.bounds import least_replicas
from policies.cluster.changes import Arrival
from policies.cost.latencies import ClassCounts
from policies.decision.deciding import SchedulerMemory, match_prompt, placing_order, preview
from policies.decision.disaggregation.prefills import prefill_report
from policies.decision.disaggregation.roles import barred_by_role
from policies.decision.level.scaling import scaling_report
from policies.decision.level.service import replica_speed, service_report
from policies.decision.limits import Mode, Terms
from policies.decision.matching import PromptMatch
from policies.decision.placement import Decision, NoReplica, Place, PlacingView, Queue, placing_view
from policies.decision.reports import Roster, load_of
from policies.model import SOLE_POOL, ReplicaId, RequestLoad, Role
from policies.plan import Move, Reason
from policies.prefix.copies import CopyReason
from policies.prefix.names import Naming
from policies.prefix.routing import Routing
from policies.prefix.tree import PromptTree

log = logging.getLogger("ray.serve")

_NAMESPACE = b"mell"

_STALLED_EPOCHS = 30
"""The number of missing epochs after which the scheduler counts as stalled."""

_NO_MIRROR = "no replica has a mirror of its cache"
_DIFFERENT = "the engines of the replicas name KV blocks differently"

_NO_NAMES = (
    "the ingress has no names for the prompt: it names blocks differently (see its log), does not know the adapter's "
    "folder, or has just started"
)

_SERVE_SCALES = (
    "with autoscaling_config.target_ongoing_requests, Serve decides the number of replicas: the mode act needs a "
    "deployment without it"
)

_OPERATOR_WAIT_S = 0.3
"""The time that an operator's call waits for slow replicas, in seconds, before it uses their previous reports."""


class LiveScheduler:
    """Implements `SchedulerApi`: runs an epoch every `epoch_s` seconds, and answers ingresses and operators in between.

    `id` is the id of the scheduler itself, which is a replica of its deployment, too.
    """

    def __init__(
        self,
        id: ReplicaId,
        config: SchedulerConfig,
        fence: int,
        replicas: RemoteReplicas[ControlApi],
        membership: Membership,
        listing: Listing,
        scaler: Scaler,
        telemetry: Telemetry,
        clock: Clock,
        wall_clock: Clock,
        roles: RoleStore,
        modes: ModeStore,
    ) -> None:
        self._id = id
        self._config = config
        self._clock = clock
        self._wall_clock = wall_clock
        self._fence = fence
        self._replicas = replicas
        self._membership = membership
        self._listing = listing
        reporters = EngineReporters(replicas, membership, listing, fence)
        self._roster = Roster()
        self._gatherer = Gatherer(
            reporters, self._roster, clock, config.report_timeout_s, self._take_records, self._gathered, listing.leaving
        )
        self._as_of = 0.0
        self._scaler = scaler
        self._telemetry = telemetry
        self._ordered = OrderedMode(config.mode, modes, listing)
        terms = replace(config.terms, mode=self._ordered.mode)
        self._memory = SchedulerMemory(terms)
        self._records = Records(telemetry)
        self._evacuations = Evacuations(
            replicas, self._roster, listing, self._tree, self._without_arrivals, fence, clock
        )
        self._dispatch = Dispatch(self, self._records)
        self._recorder = _recorder(config, terms, fence)
        pool = self._live = LivePool(SOLE_POOL, fence, listing, self._gatherer, self._roster, self._dispatch, scaler)
        self._epochs = Epochs(
            config,
            (pool,),
            self._memory,
            telemetry,
            clock,
            self._recorder,
            lambda: self._ordered.mode,
        )
        self._roles = roles
        for replica, role in roles.read().items():
            self._epochs.set_role(SOLE_POOL, replica, role)

    async def run(self) -> None:
        """Run epochs, from Serve's first list of the replicas until a newer scheduler has replaced this one."""
        await self._membership.listed.wait()
        await self._epochs.run()

    @property
    def silent_s(self) -> float:
        """Seconds since the last epoch began."""
        return self._clock() - self._epochs.last

    def close(self) -> None:
        """Stop gathering, and end the recording."""
        self._gatherer.close()
        if self._recorder is not None:
            self._recorder.close()

    # --- moves ----------------------------------------------------------------------------------------

    async def move(self, source: ReplicaId, order: Order, target: ReplicaId) -> MigrationRecord:
        """See `Sources.move`."""
        return await self._replicas.at(source).move(order, target, self._fence)

    # --- caches of replicas that stop -----------------------------------------------------------------

    def _tree(self) -> PromptTree:
        return self._memory.pool(SOLE_POOL).router.tree

    def _without_arrivals(self) -> Collection[ReplicaId]:
        """The replicas that no arrival is placed on."""
        return barred_by_role(self._memory.pool(SOLE_POOL), frozenset())

    async def evacuate(self, replica: ReplicaId, model: str, within_s: float) -> None:
        """See `EvacuationApi.evacuate`."""
        await self._epochs.ready.wait()
        await self._evacuations.evacuate(replica, model, within_s)

    # --- reports --------------------------------------------------------------------------------------

    def _take_records(self, records: Iterable[MigrationRecord]) -> None:
        for record in records:
            self._dispatch.take(record)

    def _gathered(self) -> None:
        self._as_of = self._wall_clock()

    # --- for ingresses and replicas -------------------------------------------------------------------

    async def place(self, calls: tuple[PlaceCall, ...]) -> list[Decision]:
        """See `PlacingApi.place`."""
        await self._epochs.ready.wait()
        gone, by_request = self._gone(), {call.arrival.id: call for call in calls}
        ordered = placing_order(self._memory.pool(SOLE_POOL), [call.arrival for call in calls], self._clock())
        placed = {arrival.id: self._place(by_request[arrival.id], gone) for arrival in ordered}
        return [placed[call.arrival.id] for call in calls]

    async def place_all(self, calls: tuple[PlaceCall, ...]) -> tuple[PlaceAnswer, ...]:
        """See `DispatchApi.place_all`."""
        return tuple(map(PlaceAnswer.of, await self.place(calls)))

    def _place(self, call: PlaceCall, gone: Collection[ReplicaId]) -> Decision:
        decision = self._epochs.place(call, gone)
        if not isinstance(decision, Place):
            self._epochs.hurry()
        if not isinstance(decision, NoReplica) and not call.exclude:
            self._telemetry.matched(decision.matched)
        return decision

    def _gone(self) -> tuple[ReplicaId, ...]:
        """The replicas that have left since the last epoch."""
        running = frozenset(self._membership.running)
        return tuple(r for r in self._roster.statuses if r not in running)

    async def view(self) -> PlacingView:
        """See `PlacingApi.view`."""
        memory = self._memory.pool(SOLE_POOL)
        return placing_view(memory.cluster, replica_speed(memory), self._naming())

    def _naming(self) -> Naming | str:
        """The naming of blocks that all replicas with a mirror have, or the reason why there is none."""
        known = self._gatherer.gauges.values()
        namings = {gauges.naming for gauges in known if gauges.naming is not None}
        if not known:
            return "no replica has reported yet"
        if not namings:
            off = {gauges.cache.off for gauges in known if gauges.cache is not None and gauges.cache.off}
            return "; ".join([_NO_MIRROR, *sorted(off)])
        return namings.pop() if len(namings) == 1 else _DIFFERENT

    def _routing(self) -> dict[str, Any]:
        """The member `routing` of `/mell/state`."""
        tree, naming = self._memory.pool(SOLE_POOL).router.tree, self._naming()
        distinct, copies = tree.copies()
        return {
            "kind": str(self._config.routing),
            "names": asdict(naming) if isinstance(naming, Naming) else None,
            "off": naming if isinstance(naming, str) else None,
            "mirrors": sum(1 for _ in tree.replicas),
            "distinct_blocks": distinct,
            "copies_per_block": round(copies / distinct, 3) if distinct else None,
        }

    async def wanted(self) -> int | None:
        """See `OperatorApi.wanted`."""
        return self._scaler.wanted if self._epochs.ready.is_set() else None

    async def metrics(self) -> tuple[Family, ...]:
        """See `MetricsApi.metrics`."""
        return self._telemetry.expose(self._id)

    async def record(self, record: MigrationRecord) -> None:
        """See `NoticeApi.record`."""
        self._dispatch.take(record)

    async def copied(self, record: CopyRecord) -> None:
        """See `NoticeApi.copied`."""
        self._dispatch.take_copy(record)
        if record.reason is CopyReason.EVACUATE:
            self._telemetry.copied(record)

    async def latencies(self, ingress: IngressId, counts: ClassCounts) -> None:
        """See `NoticeApi.latencies`."""
        self._live.reached.take(ingress, counts, self._clock())

    async def hurry(self) -> None:
        """See `NoticeApi.hurry`."""
        self._epochs.hurry()

    # --- for operators --------------------------------------------------------------------------------

    async def state(self) -> dict[str, Any]:
        """The body of `/mell/state`, from fresh reports."""
        await self._gatherer.gather_within(_OPERATOR_WAIT_S)
        return self._state()

    async def snapshot(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The bodies of `/mell/state` and `/mell/migrations` as of the last gathering, without a call to a replica."""
        return self._state(), self._migrations()

    def _state(self) -> dict[str, Any]:
        roster, gauges, memory, now = self._roster, self._gatherer.gauges, self._memory.pool(SOLE_POOL), self._clock()
        by_hand = memory.learned.roles_by_hand
        loads = roster.loads(self._listing.leaving())
        replicas = [replica_json(r, gauges[r.id], memory.locations.role(r.id), by_hand.get(r.id)) for r in loads]
        others = self._listing.others(roster.statuses)
        replicas += [replica_json(load_of(status), by_hand=by_hand.get(status.id)) for status in others]
        dry_run = run.to_json() if (run := self._epochs.dry_runs.get(SOLE_POOL)) is not None else None
        state = {
            "as_of": self._as_of,
            "mode": str(self._epochs.mode),
            "configured_mode": str(self._ordered.configured),
            "policy": self._config.policy,
            "fence": self._fence,
            "wanted_replicas": self._scaler.wanted,
            "min_replicas": self._scaler.min_replicas,
            "max_replicas": self._scaler.max_replicas,
            "estimates": memory.learned.estimates.to_json(now) | {"steps": memory.learned.experience.steps.to_json()},
            "routing": self._routing(),
            "resting_pairs": [list(pair) for pair in memory.learned.breaker.resting(now)],
            "replicas": sorted(replicas, key=lambda r: str(r["id"])),
        }
        if (service := service_report(memory, now, self._live.reached.quantiles(now))) is not None:
            state["service"] = service.to_json()
        if (least := least_replicas(memory.cluster)) is not None:
            state["least_replicas"] = least
        if memory.scaled is not None:
            state["scaling"] = scaling_report(memory.cluster, memory.scaled).to_json()
        if (prefills := prefill_report(memory)) is not None:
            state["disaggregation"] = prefills.to_json()
        return state | ({"dry_run": dry_run} if dry_run else {})

    async def migrations(self) -> dict[str, Any]:
        """The body of `/mell/migrations`, newest first, from fresh reports."""
        await self._gatherer.gather_within(_OPERATOR_WAIT_S)
        return self._migrations()

    def _migrations(self) -> dict[str, Any]:
        return {"migrations": [record.to_json() for record in self._records.newest_first()]}

    async def migrate(self, id: str, reference: str, target: str | None, path: PathRequest) -> MoveAnswer:
        """Move the request with the id or label `reference` to `target`, by default to the policy's choice.

        `id` becomes the migration's id; a second call with the same id starts no second migration. The request is
        looked up in the last reports, and in fresh ones only if the first attempt fails.
        """
        answer = self._begun(id) or await self._find_and_order(id, reference, target, path)
        if isinstance(answer, MoveAccepted) or answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
            return answer
        await self._gatherer.gather_within(_OPERATOR_WAIT_S)
        return self._begun(id) or await self._find_and_order(id, reference, target, path)

    def _begun(self, id: str) -> MoveAccepted | None:
        return MoveAccepted(id) if id in self._records else None

    async def _find_and_order(self, id: str, reference: str, target: str | None, path: PathRequest) -> MoveAnswer:
        found = self._roster.find(reference)
        if not found:
            return MoveRejected(404, f"no running request has the id or label {reference!r}")
        if len({request.id for _, request in found}) > 1:
            candidates = [{"id": r.id, "label": r.label, "replica": replica} for replica, r in found]
            message = f"{len(found)} requests have the id or label {reference!r}"
            return MoveRejected(409, message, {"candidates": candidates})
        source, request = min(found, key=lambda pair: pair[1].hop)
        return await self._order(id, source, request, target, path)

    async def _order(
        self, id: str, source: ReplicaId, request: RequestLoad, target: str | None, path: PathRequest
    ) -> MoveAnswer:
        to = ReplicaId(target) if target else self._choose(source, request)
        if to is None:
            return MoveRejected(422, "no other replica is running")
        if to not in self._roster.statuses:
            return MoveRejected(422, f"no replica {to!r} is running", self._running_replicas())
        fixed = None if path is PathRequest.AUTO else path.first
        move = self._epochs.order(SOLE_POOL, Move(request.id, source, to, request.tokens, Reason.MANUAL, 0, fixed))
        path = ONLY[move.path] if path is PathRequest.AUTO and move.path is not None else path
        order = Order(id, request.id, path, move.reason, move.kv_s, move.tokens_s)
        try:
            await self._dispatch.order(order, move)
        except PeerLost as error:
            return MoveRejected(503, str(error))
        except MigrationError as error:
            return MoveRejected(422, str(error))
        return MoveAccepted(order.id)

    async def match(self, arrival: Arrival) -> dict[str, Any]:
        """See `OperatorApi.match`."""
        await self._epochs.ready.wait()
        found = match_prompt(self._memory.pool(SOLE_POOL), arrival, self._clock(), self._gone())
        routing = {"kind": str(self._config.routing), "off": self._why_not_by_content(arrival, found)}
        return {"routing": routing, **found.to_json()}

    def _why_not_by_content(self, arrival: Arrival, found: PromptMatch) -> str | None:
        """The reason why the arrival is not routed by content; None if it is."""
        if self._config.routing is not Routing.TREE:
            return f"scheduler.routing is {self._config.routing}"
        if isinstance(naming := self._naming(), str):
            return naming
        if found.full_blocks and not arrival.names:
            return _NO_NAMES
        return None

    def _running_replicas(self) -> dict[str, Any]:
        return {"replicas": sorted(self._roster.statuses)}

    def _choose(self, source: ReplicaId, request: RequestLoad) -> ReplicaId | None:
        arrival = Arrival(request.id, request.tokens, precedence=request.precedence, adapter=request.adapter)
        decision = preview(self._memory.pool(SOLE_POOL), arrival, (source, *self._gone()))
        return decision.replica if isinstance(decision, Place | Queue) else None

    async def drain(self, replica: str) -> MoveAnswer:
        """See `OperatorApi.drain`. Its requests move to other replicas while they run."""
        if replica not in self._roster.statuses:
            return MoveRejected(404, f"no replica {replica!r} is running", self._running_replicas())
        if len(self._membership.running) < 2 and self._scaler.max_replicas < 2:
            return MoveRejected(422, "the only replica cannot be drained while max_replicas is 1")
        try:
            await self._scaler.drain(ReplicaId(replica), self._fence)
        except PeerLost as error:
            return MoveRejected(503, str(error))
        except MigrationError as error:
            return MoveRejected(422, str(error))
        self._epochs.hurry()
        return MoveAccepted(replica)

    async def set_role(self, replica: str, role: Role | None) -> MoveAnswer:
        """See `OperatorApi.set_role`. The next epoch assigns it."""
        if replica not in self._roster.statuses:
            return MoveRejected(404, f"no replica {replica!r} is running", self._running_replicas())
        mode = self._epochs.mode
        if mode is not Mode.ACT:
            return MoveRejected(422, f"scheduler.mode is {mode}: nothing moves requests on; write act")
        self._epochs.set_role(SOLE_POOL, ReplicaId(replica), role)
        by_hand, running = self._memory.pool(SOLE_POOL).learned.roles_by_hand, self._roster.statuses
        self._roles.write({r: by_hand[r] for r in sorted(by_hand) if r in running})
        return MoveAccepted(replica)

    async def set_mode(self, mode: Mode) -> MoveAnswer:
        """See `OperatorApi.set_mode`. Moves that have been ordered before go on to their ends."""
        if mode is Mode.ACT and not self._config.scales:
            return MoveRejected(422, _SERVE_SCALES)
        await self._ordered.order(mode)
        await self._epochs.follow_mode()
        return MoveAccepted(mode)

    async def set_bounds(self, least: int, most: int) -> MoveAnswer:
        """See `OperatorApi.set_bounds`."""
        mode = self._epochs.mode
        if mode is not Mode.ACT:
            return MoveRejected(422, f"scheduler.mode is {mode}: nothing opens replicas; write act")
        if self._config.prefill_replicas >= least:
            prefills = self._config.prefill_replicas
            return MoveRejected(422, f"{prefills} replicas may be for prefills: the minimum must be above that")
        self._scaler.set_bounds((least, most))
        return MoveAccepted(SOLE_POOL)


class EpochScheduler(LiveScheduler):
    """The deployment: a `LiveScheduler` over the application's replicas in Serve."""

    async def __init__(self, config: SchedulerConfig, topology: Topology) -> None:  # type: ignore[misc]  # Serve awaits it
        check_environment()
        start_guard()
        take_niceness_of_parent()
        self._listener = await ChannelListener.start(get_node_ip_address())
        app = own_app()
        (pool,) = topology.pools
        replicas = engines(app, pool)
        # A replica that has left Serve's list may need evacuation.
        membership = ServeMembership(pool, app, f"scheduler-{own_id()}", lambda _: self._epochs.hurry())
        listing = ServeListing(app, pool, config.report_timeout_s)
        telemetry = Telemetry()
        clock, wall_clock = time.monotonic, time.time
        scaler = ServeScaler(app, pool, replicas, listing, config.bounds, telemetry.freed, clock, wall_clock)
        fence = next_fence(app)
        roles, modes = ServeRoleStore(app, pool), ServeModeStore(app)
        super().__init__(
            own_id(), config, fence, replicas, membership, listing, scaler, telemetry, clock, wall_clock, roles, modes
        )
        self._stalled_s = _STALLED_EPOCHS * config.epoch_s + config.report_timeout_s
        self._loop = asyncio.create_task(self.run())
        self._freezing = asyncio.create_task(keep_heap_frozen(config.epoch_s))
        log.info("scheduler started with fence %d, mode %s, policy %s", fence, self._epochs.mode, config.policy)

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
        self._membership.stop()
        self.close()


if TYPE_CHECKING:
    _offers: type[SchedulerApi] = EpochScheduler
    _answers: type[DispatchApi] = LiveScheduler


def check_epochs(ended: bool, silent_s: float, stalled_s: float) -> None:
    """Raise `RuntimeError` if the loop of epochs has ended, or if the last epoch began `stalled_s` seconds ago."""
    if ended or silent_s > stalled_s:
        raise RuntimeError(f"no epoch for {silent_s:.1f} s")


def next_fence(app: str) -> int:
    """A fence above all earlier ones of the application in this cluster. No two callers get the same.

    Serve may run two schedulers for a moment: in a redeploy, or after a failed health check. Replicas obey only the
    highest fence that they have seen, so the older scheduler's orders are refused.
    """
    newest = f"fence/{app}".encode()
    fence = int(_internal_kv_get(newest, namespace=_NAMESPACE) or 0) + 1
    while _internal_kv_put(f"fence/{app}/{fence}".encode(), b"taken", overwrite=False, namespace=_NAMESPACE):
        fence += 1
    _internal_kv_put(newest, str(fence).encode(), overwrite=True, namespace=_NAMESPACE)
    return fence


def _recorder(config: SchedulerConfig, terms: Terms, fence: int) -> FileRecorder | None:
    """The recorder of epochs, if they are recorded. Every scheduler writes a file of its own."""
    if config.record is None:
        return None
    path = FilePath(config.record) / f"epochs-{time.strftime('%Y%m%d-%H%M%S')}-{fence}.jsonl"
    return FileRecorder(path, terms)
