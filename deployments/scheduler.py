"""The `Scheduler` deployment: a singleton that knows where every request is, and decides where it goes.

All it knows is soft state, rebuilt from the replicas' reports within an epoch of its start. While it is away
requests run on where they are, and ingresses place new ones by themselves.
"""

import asyncio
import logging
import time
import uuid
from typing import Any

from deployments.calls import PlaceCall
from deployments.cluster import Cluster
from deployments.config import SchedulerConfig, Topology
from deployments.control import MoveAccepted, MoveAnswer, MoveRejected
from deployments.fencing import next_fence
from deployments.membership import Membership
from deployments.report import ReplicaReport
from deployments.routing import Replicas, own_id
from migration.errors import MigrationError, PeerLost, Refused
from migration.messages import PathRequest
from migration.record import MigrationRecord
from migration.source_run import Order
from policies.events import Arrival
from policies.ledger import Ledger
from policies.model import ClusterState, ReplicaId, ReplicaLoad, RequestLoad
from policies.placement import Decision, Place, Queue, place
from policies.registry import policy

log = logging.getLogger("ray.serve")

_RECORDS = 1000
_STALLED_EPOCHS = 30
_OPERATOR_WAIT_S = 0.3
"""How long an operator's call waits for replicas that are slow to report, before it makes do with their last word."""


class EpochScheduler:
    """Runs an epoch every `epoch_s` seconds; answers ingresses and operators in between."""

    async def __init__(self, config: SchedulerConfig, topology: Topology) -> None:  # type: ignore[misc]  # Serve awaits it
        self._config = config
        self._policy = policy(config.policy)
        self._ledger = Ledger(config.placement_ttl_s)
        self._replicas = Replicas("Engine", topology.app)
        self._membership = Membership("Engine", topology.app, f"scheduler-{own_id()}")
        self._cluster = Cluster(self._replicas, self._membership, topology.app, config.report_timeout_s)
        self._fence = next_fence(topology.app)
        self._reports: dict[ReplicaId, ReplicaReport] = {}
        self._others: tuple[ReplicaLoad, ...] = ()
        self._records: dict[str, MigrationRecord] = {}
        self._as_of = 0.0
        self._last_epoch = time.monotonic()
        self._gathered = asyncio.Event()
        self._loop = asyncio.create_task(self._run())
        log.info("scheduler started with fence %d", self._fence)

    async def check_health(self) -> None:
        """Raises when epochs have stopped: Serve then starts another scheduler."""
        silent = time.monotonic() - self._last_epoch
        if self._loop.done() or silent > _STALLED_EPOCHS * self._config.epoch_s + self._config.report_timeout_s:
            raise RuntimeError(f"no epoch for {silent:.1f} s")

    def __del__(self) -> None:
        self._loop.cancel()
        self._membership.stop()

    # --- epochs ---------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                await self._epoch()
            except Refused as error:
                log.warning("this scheduler has been replaced: %s", error)
                return
            except Exception:
                log.exception("epoch failed; the next one starts afresh")
            await asyncio.sleep(self._config.epoch_s)

    async def _epoch(self) -> None:
        await self._membership.known.wait()
        await self._gather()
        self._others = await self._cluster.others()
        self._last_epoch = time.monotonic()

    async def _gather(self, timeout_s: float | None = None) -> None:
        self._reports = await self._cluster.gather(self._fence, timeout_s)
        self._as_of = time.time()
        self._ledger.report([report.load for report in self._reports.values()], time.monotonic())
        for report in self._reports.values():
            for record in report.records:
                self._keep(record)
        if self._reports:
            self._gathered.set()

    # --- for ingresses --------------------------------------------------------------------------------

    async def place(self, calls: tuple[PlaceCall, ...]) -> list[Decision]:
        """Where requests go; each counts there from now on."""
        await self._gathered.wait()
        return [self._place(call) for call in calls]

    def _place(self, call: PlaceCall) -> Decision:
        now = time.monotonic()
        arrival = call.arrival
        gone = tuple(r for r in self._reports if r not in self._membership.running)
        decision = self._decide(arrival, (*call.exclude, *gone))
        match decision:
            case Place(replica) | Queue(replica):
                self._ledger.place(arrival.id, call.label, replica, arrival.tokens, now)
        return decision

    def _decide(self, arrival: Arrival, exclude: tuple[ReplicaId, ...]) -> Decision:
        state = self._ledger.state(time.monotonic())
        return place(self._policy, state, arrival, exclude, self._config.headroom)

    async def view(self) -> ClusterState:
        """The cluster as it is believed to be, for ingresses to fall back on."""
        return self._ledger.state(time.monotonic())

    async def record(self, record: MigrationRecord) -> None:
        """A migration ended, or an ingress resubmitted a request."""
        self._keep(record)

    # --- for operators --------------------------------------------------------------------------------

    async def state(self) -> dict[str, Any]:
        """`/mell/state`, as of now: an operator who acts on it should not act on the last epoch."""
        await self._gather(_OPERATOR_WAIT_S)
        replicas = [report.to_json() for report in self._reports.values()]
        replicas += [
            ReplicaReport(load, (0, 0, 0), 0, 0, 0, self._fence, ()).to_json() | {"pids": []}
            for load in self._others
            if load.id not in self._reports
        ]
        return {
            "as_of": self._as_of,
            "mode": "off",
            "policy": self._config.policy,
            "fence": self._fence,
            "replicas": sorted(replicas, key=lambda r: str(r["id"])),
        }

    async def migrations(self) -> dict[str, Any]:
        """`/mell/migrations`: newest first."""
        await self._gather(_OPERATOR_WAIT_S)
        newest = sorted(self._records.values(), key=lambda r: -r.started_at)
        return {"migrations": [record.to_json() for record in newest]}

    async def migrate(self, reference: str, target: str | None, path: PathRequest) -> MoveAnswer:
        """Move the request with that id or label, to `target` or where the policy would place it."""
        await self._gather(_OPERATOR_WAIT_S)
        found = [
            (report.load, request)
            for report in self._reports.values()
            for request in report.load.requests
            if reference in (request.id, request.label)
        ]
        if not found:
            return MoveRejected(404, f"no running request has the id or label {reference!r}")
        if len(found) > 1:
            candidates = [{"id": r.id, "label": r.label, "replica": load.id} for load, r in found]
            return MoveRejected(409, f"{len(found)} requests are called {reference!r}", {"candidates": candidates})
        return await self._order(*found[0], target, path)

    async def _order(
        self, load: ReplicaLoad, request: RequestLoad, target: str | None, path: PathRequest
    ) -> MoveAnswer:
        to = ReplicaId(target) if target else self._choose(load, request)
        if to is None:
            return MoveRejected(422, "no other replica is running")
        if to not in self._reports:
            return MoveRejected(422, f"no replica {to!r} is running", {"replicas": sorted(self._reports)})
        order = Order(uuid.uuid4().hex[:16], request.id, path, "requested by operator")
        try:
            record: MigrationRecord = await self._replicas.call(load.id, "move", order, to, self._fence)
        except PeerLost as error:
            return MoveRejected(503, str(error))
        except MigrationError as error:
            return MoveRejected(422, str(error))
        self._keep(record)
        return MoveAccepted(order.id)

    def _choose(self, load: ReplicaLoad, request: RequestLoad) -> ReplicaId | None:
        decision = self._decide(Arrival(request.id, request.tokens), (load.id,))
        return decision.replica if isinstance(decision, Place | Queue) else None

    def _keep(self, record: MigrationRecord) -> None:
        """Keep the newest word on a migration; a record without an outcome never replaces one with it."""
        known = self._records.get(record.id)
        if known is None or known.outcome is None:
            self._records[record.id] = record
        while len(self._records) > _RECORDS:
            del self._records[next(iter(self._records))]
