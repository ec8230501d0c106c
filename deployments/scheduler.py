"""The `Scheduler` deployment: a singleton that knows where every request is, and decides where it goes.

All it knows is soft state, rebuilt from the replicas' reports within an epoch of its start. While it is away
requests run on where they are, and ingresses place new ones by themselves.
"""

import asyncio
import logging
import math
import time
from collections.abc import Collection, Mapping
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from deployments.api import ControlApi, RemoteReplicas, SchedulerApi
from deployments.calls import PlaceCall
from deployments.config import SchedulerConfig, Topology
from deployments.control import MoveAccepted, MoveAnswer, MoveRejected
from deployments.dispatch import Dispatch, Route
from deployments.epochs import Epochs
from deployments.exposition import Family
from deployments.fencing import next_fence
from deployments.gatherer import EngineReporters, Gatherer, Received
from deployments.heap import freeze_heap
from deployments.listing import Listing, ServeListing
from deployments.membership import Membership, ServeMembership
from deployments.processes.guard import start_guard
from deployments.recording import Recorder, Setting
from deployments.records import Records
from deployments.rehearsal import Rehearsal
from deployments.report import ReplicaReport
from deployments.routing import own_id
from deployments.scaler import Scaler, ServeScaler
from deployments.stubs import engines
from deployments.telemetry import Telemetry
from migration.errors import MigrationError, PeerLost
from migration.estimates import Boundaries, Estimates
from migration.paths import Choice
from migration.ports import Clock
from migration.protocol.messages import ONLY, PathRequest
from migration.protocol.record import MigrationRecord
from migration.run.source import Order
from policies.cluster.changes import Arrival
from policies.decision.breaker import Breaker
from policies.decision.ledger import Ledger
from policies.decision.placement import Decision, Place, Queue
from policies.decision.planner import Mode, Planner
from policies.decision.shadow import Shadow
from policies.model import ClusterState, ReplicaId, ReplicaLoad, RequestId, RequestLoad
from policies.plan import Move, Path, Reason
from policies.rules.registry import policy

log = logging.getLogger("ray.serve")

_STALLED_EPOCHS = 30
_OPERATOR_WAIT_S = 0.3
"""How long an operator's call waits for replicas that are slow to report, before it makes do with their last word."""


class EpochScheduler:
    """Implements `SchedulerApi`: runs an epoch every `epoch_s` seconds; answers ingresses and operators in between."""

    async def __init__(self, config: SchedulerConfig, topology: Topology) -> None:  # type: ignore[misc]  # Serve awaits it
        start_guard()
        replicas = engines(topology.app)
        membership = ServeMembership("Engine", topology.app, f"scheduler-{own_id()}", lambda _: self._members_changed())
        listing = ServeListing(topology.app, config.report_timeout_s)
        telemetry = Telemetry()
        self._id = own_id()
        clock, wall_clock = time.monotonic, time.time
        scaler = ServeScaler(topology.app, replicas, listing, config.bounds, telemetry.freed, clock, wall_clock)
        fence = next_fence(topology.app)
        self._wire(config, fence, replicas, membership, listing, scaler, telemetry, clock, wall_clock)
        self._loop = asyncio.create_task(self._run())
        freeze_heap()
        log.info("scheduler started with fence %d, mode %s, policy %s", self._fence, config.mode, config.policy)

    def _wire(
        self,
        config: SchedulerConfig,
        fence: int,
        replicas: RemoteReplicas[ControlApi],
        membership: Membership,
        listing: Listing,
        scaler: Scaler,
        telemetry: Telemetry,
        clock: Clock,
        wall_clock: Clock,
    ) -> None:
        """Put the parts together."""
        self._config = config
        self._clock = clock
        self._wall_clock = wall_clock
        self._fence = fence
        self._replicas = replicas
        self._membership = membership
        self._listing = listing
        reporters = EngineReporters(replicas, membership, listing, fence)
        self._gatherer = Gatherer(reporters, clock, config.report_timeout_s, self._gathered)
        self._as_of = 0.0
        self._scaler = scaler
        self._telemetry = telemetry
        self._ledger = Ledger(config.placement_ttl_s)
        self._breaker = Breaker()
        self._dispatch = Dispatch(self, self._breaker, clock, config.moves_at_once)
        self._planner = Planner(policy(config.policy), config.limits, config.epoch_s)
        self._estimates = Estimates(Boundaries(config.epoch_s, config.link_time_s, config.slowdown))
        self._profiled: set[ReplicaId] = set()
        self._records = Records(telemetry)
        self._recorder = _recorder(config, fence)
        self._rehearsal = _rehearsal(config, telemetry)
        self._epochs = Epochs(
            config,
            fence,
            listing,
            self._gatherer,
            self._ledger,
            self._planner,
            self._dispatch,
            scaler,
            telemetry,
            self._route,
            clock,
            self._recorder,
            self._rehearsal,
        )

    async def _run(self) -> None:
        await self._membership.known.wait()
        await self._epochs.run()

    def _members_changed(self) -> None:
        """A replica came, or left the list: its requests may have to be evacuated."""
        self._epochs.hurry()

    async def check_health(self) -> None:
        """Raises when epochs have stopped: Serve then starts another scheduler."""
        silent = self._clock() - self._epochs.last
        if self._loop.done() or silent > _STALLED_EPOCHS * self._config.epoch_s + self._config.report_timeout_s:
            raise RuntimeError(f"no epoch for {silent:.1f} s")

    def __del__(self) -> None:
        self._loop.cancel()
        self._gatherer.close()
        self._membership.stop()
        if self._recorder is not None:
            self._recorder.close()

    # --- moves ----------------------------------------------------------------------------------------

    async def move(self, source: ReplicaId, order: Order, target: ReplicaId) -> MigrationRecord:
        """See `Sources.move`."""
        return await self._replicas.at(source).move(order, target, self._fence)

    def _route(self, moves: list[Move]) -> tuple[list[Move], Mapping[RequestId, Route]]:
        """See `Routing`: one planner for the whole cluster gives every move its path (the paper's section V)."""
        choices = self._estimates.choose(moves, self._dispatch.ordered(), self._wall_clock())
        routes = {choice.request: _route(choice, choice.path) for choice in choices if choice.path is not None}
        return [move for move in moves if move.request in routes], routes

    # --- reports --------------------------------------------------------------------------------------

    def _gathered(self, received: Mapping[ReplicaId, Received]) -> None:
        """Take what a gathering brought: room and requests, what new replicas measured, and migrations."""
        self._as_of = self._wall_clock()
        reports = self._reports()
        asked_at = (each.asked_at for each in received.values())
        self._ledger.report(zip((report.load for report in reports), asked_at, strict=True), self._clock())
        self._profile(reports)
        for report in reports:
            for record in report.records:
                self._keep(record)

    def _reports(self) -> list[ReplicaReport]:
        return [self._listing.as_listed(received.report) for received in self._gatherer.received.values()]

    def _profile(self, reports: Collection[ReplicaReport]) -> None:
        """Take what new replicas have measured of themselves, and forget those that are gone."""
        known = {report.load.id for report in reports}
        self._estimates.keep(known)
        for report in reports:
            if report.profile is not None and report.load.id not in self._profiled:
                self._estimates.profile(report.load.id, report.profile)
        self._profiled = known

    # --- for ingresses and replicas -------------------------------------------------------------------

    async def place(self, calls: tuple[PlaceCall, ...]) -> list[Decision]:
        """Where requests go; each counts there from now on."""
        await self._epochs.known.wait()
        gone = self._gone()
        return [self._place(call, gone) for call in calls]

    def _place(self, call: PlaceCall, gone: Collection[ReplicaId]) -> Decision:
        arrival = call.arrival
        decision = self._planner.place(arrival, (*call.exclude, *gone))
        match decision:
            case Place(replica) | Queue(replica):
                self._ledger.place(arrival.id, call.label, replica, arrival.tokens, self._clock())
        if not isinstance(decision, Place):
            self._epochs.hurry()
        return decision

    def _gone(self) -> tuple[ReplicaId, ...]:
        """Replicas that left since the last epoch."""
        running = frozenset(self._membership.running)
        return tuple(r for r in self._gatherer.received if r not in running)

    async def view(self) -> ClusterState:
        """The cluster as it is believed to be, for ingresses to fall back on."""
        return self._ledger.state(self._clock())

    async def wanted(self) -> int | None:
        """The number of replicas that there are to be; None before the first report."""
        return self._scaler.wanted if self._epochs.known.is_set() else None

    async def metrics(self) -> tuple[Family, ...]:
        """What the scheduler counts."""
        return self._telemetry.expose(self._id)

    async def record(self, record: MigrationRecord) -> None:
        """A migration ended, or an ingress resubmitted a request."""
        self._keep(record)

    async def hurry(self) -> None:
        """A replica is short of room, or is to be gone: have the next epoch soon."""
        self._epochs.hurry()

    # --- for operators --------------------------------------------------------------------------------

    async def state(self) -> dict[str, Any]:
        """`/mell/state`, as of now: an operator who acts on it should not act on the last epoch."""
        await self._gatherer.gather_within(_OPERATOR_WAIT_S)
        return self._state()

    async def snapshot(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """`/mell/state` and `/mell/migrations` as of the last gathering: no replica is asked."""
        return self._state(), self._migrations()

    def _state(self) -> dict[str, Any]:
        replicas = [report.to_json() for report in self._reports()]
        replicas += [
            ReplicaReport(load, (0, 0, 0), 0, 0, 0, self._fence, ()).to_json() | {"pids": []}
            for load in self._listing.others(self._gatherer.received)
        ]
        dry_run = self._rehearsal.so_far if self._rehearsal else None
        state = {
            "as_of": self._as_of,
            "mode": str(self._config.mode),
            "policy": self._config.policy,
            "fence": self._fence,
            "wanted_replicas": self._scaler.wanted,
            "estimates": self._estimates.to_json(self._wall_clock()),
            "resting_pairs": [list(pair) for pair in self._breaker.resting(self._clock())],
            "replicas": sorted(replicas, key=lambda r: str(r["id"])),
        }
        return state | ({"dry_run": dry_run.to_json()} if dry_run else {})

    async def migrations(self) -> dict[str, Any]:
        """`/mell/migrations`: newest first."""
        await self._gatherer.gather_within(_OPERATOR_WAIT_S)
        return self._migrations()

    def _migrations(self) -> dict[str, Any]:
        return {"migrations": [record.to_json() for record in self._records.newest_first()]}

    async def migrate(self, id: str, reference: str, target: str | None, path: PathRequest) -> MoveAnswer:
        """Move the request with that id or label, to `target` or where the policy would place it.

        `id` is the migration's; asked for again under the same id, the move is not begun twice.
        """
        await self._gatherer.gather_within(_OPERATOR_WAIT_S)
        if id in self._records:
            return MoveAccepted(id)
        found = [
            (report.load, request)
            for report in self._reports()
            for request in report.load.requests
            if reference in (request.id, request.label)
        ]
        if not found:
            return MoveRejected(404, f"no running request has the id or label {reference!r}")
        if len({request.id for _, request in found}) > 1:
            candidates = [{"id": r.id, "label": r.label, "replica": load.id} for load, r in found]
            return MoveRejected(409, f"{len(found)} requests are called {reference!r}", {"candidates": candidates})
        load, request = min(found, key=lambda pair: pair[1].hop)
        return await self._order(id, load, request, target, path)

    async def _order(
        self, id: str, load: ReplicaLoad, request: RequestLoad, target: str | None, path: PathRequest
    ) -> MoveAnswer:
        to = ReplicaId(target) if target else self._choose(load, request)
        if to is None:
            return MoveRejected(422, "no other replica is running")
        if to not in self._gatherer.received:
            return MoveRejected(422, f"no replica {to!r} is running", self._running_replicas())
        move = Move(request.id, load.id, to, request.tokens, Reason.MANUAL, 0)
        choice = self._estimates.decide(move, self._dispatch.ordered(), self._wall_clock())
        path = ONLY[choice.path or choice.sooner] if path is PathRequest.AUTO else path
        order = Order(id, request.id, path, move.reason, finite(choice.kv_s), finite(choice.tokens_s))
        try:
            record = await self._dispatch.order(order, move, by_hand=True)
        except PeerLost as error:
            return MoveRejected(503, str(error))
        except MigrationError as error:
            return MoveRejected(422, str(error))
        self._keep(record)
        return MoveAccepted(order.id)

    def _running_replicas(self) -> dict[str, Any]:
        return {"replicas": sorted(self._gatherer.received)}

    def _choose(self, load: ReplicaLoad, request: RequestLoad) -> ReplicaId | None:
        decision = self._planner.place(Arrival(request.id, request.tokens), (load.id, *self._gone()))
        return decision.replica if isinstance(decision, Place | Queue) else None

    async def drain(self, replica: str) -> MoveAnswer:
        """Empty a replica and stop it; its requests move to others while they run."""
        if replica not in self._gatherer.received:
            return MoveRejected(404, f"no replica {replica!r} is running", self._running_replicas())
        if len(self._membership.running) < 2 and self._scaler.max_replicas < 2:
            return MoveRejected(422, "it is the only replica that there may be")
        try:
            await self._scaler.drain(ReplicaId(replica), self._fence)
        except PeerLost as error:
            return MoveRejected(503, str(error))
        except MigrationError as error:
            return MoveRejected(422, str(error))
        self._epochs.hurry()
        return MoveAccepted(replica)

    # --- inside ---------------------------------------------------------------------------------------

    def _keep(self, record: MigrationRecord) -> None:
        """Pass on what is new of a migration."""
        if self._records.keep(record):
            self._dispatch.heard(record)
            self._estimates.observe(record)


if TYPE_CHECKING:
    _offers: type[SchedulerApi] = EpochScheduler


def _route(choice: Choice, path: Path) -> Route:
    return Route(ONLY[path], finite(choice.kv_s), finite(choice.tokens_s))


def finite(seconds: float) -> float | None:
    """A prediction that can be told: None instead of "never"."""
    return seconds if math.isfinite(seconds) else None


def _recorder(config: SchedulerConfig, fence: int) -> Recorder | None:
    """Where epochs are recorded, if they are; every scheduler writes a file of its own."""
    if config.record is None:
        return None
    path = FilePath(config.record) / f"epochs-{time.strftime('%Y%m%d-%H%M%S')}-{fence}.jsonl"
    return Recorder(path, Setting(config.policy, config.limits, config.epoch_s))


def _rehearsal(config: SchedulerConfig, telemetry: Telemetry) -> Rehearsal | None:
    """What a scheduler does with its decisions that only observes."""
    if config.mode is not Mode.OBSERVE:
        return None
    return Rehearsal(Shadow(policy(config.policy), config.limits, config.epoch_s), telemetry)
