"""One pool under the scheduler: its reports, moves and replicas, and the answers to calls about them."""

from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any

from deployments.api.calls import MoveAccepted, MoveAnswer, MoveRejected, PlaceCall
from deployments.api.protocols import ControlApi, RemoteReplicas
from deployments.api.report import replica_json
from deployments.config import SchedulerConfig
from deployments.metrics.exposition import Family
from deployments.metrics.telemetry import Telemetry
from deployments.scheduler.dispatch import Dispatch
from deployments.scheduler.epochs import Epochs
from deployments.scheduler.evacuating import Evacuations
from deployments.scheduler.gatherer import EngineReporters, Gatherer
from deployments.scheduler.listing import Listing
from deployments.scheduler.memory.ledgers import ReportedMemory
from deployments.scheduler.memory.nodes import NodeMemory
from deployments.scheduler.memory.view import devices_json
from deployments.scheduler.pairs import PairOrders, pairs_json, unpairable_json
from deployments.scheduler.pool import LivePool
from deployments.scheduler.records import Records
from deployments.scheduler.scaler import Scaler
from deployments.scheduler.sleepers import PoolSleepers
from deployments.serve.levels import LevelStore
from deployments.serve.membership import Membership
from deployments.serve.roles import RoleStore
from migration.protocol.errors import MigrationError, PeerLost
from migration.protocol.messages import ONLY, PathRequest
from migration.protocol.ports import Clock
from migration.protocol.record import CopyRecord, MigrationRecord
from migration.protocol.request import IngressId
from migration.run.source import Order
from policies.bounds import least_replicas
from policies.cluster.changes import Arrival
from policies.cost.latencies import ClassCounts
from policies.cost.service import ServiceLevel
from policies.decision.deciding import match_prompt, placing_order, preview
from policies.decision.disaggregation.prefills import prefill_report
from policies.decision.disaggregation.roles import barred_by_role
from policies.decision.level.scaling import scaling_report
from policies.decision.level.service import replica_speed, service_report
from policies.decision.limits import Mode
from policies.decision.matching import PromptMatch
from policies.decision.memory import PoolMemory
from policies.decision.placement import Decision, NoReplica, Place, PlacingView, Queue, placing_view
from policies.decision.reports import Roster, load_of
from policies.model import PoolId, ReplicaId, ReplicaState, RequestId, RequestLoad, Role
from policies.plan import Move, Reason
from policies.prefix.copies import CopyReason
from policies.prefix.names import Naming
from policies.prefix.routing import Routing
from policies.prefix.tree import PromptTree

_NO_MIRROR = "no replica has a mirror of its cache"
_DIFFERENT = "the engines of the replicas name KV blocks differently"

_NO_NAMES = (
    "the ingress has no names for the prompt: it names blocks differently (see its log), does not know the adapter's "
    "folder, or has just started"
)

_OPERATOR_WAIT_S = 0.3
"""The time that an operator's call waits for slow replicas, in seconds, before it uses their previous reports."""


@dataclass(frozen=True, slots=True)
class PoolPorts:
    """The scheduler's ports to one pool, and its metrics of the pool."""

    pool: PoolId
    replicas: RemoteReplicas[ControlApi]
    membership: Membership
    listing: Listing
    scaler: Scaler
    roles: RoleStore
    levels: LevelStore
    telemetry: Telemetry


class PoolScheduler:
    """Answers calls about the pool `id`, between the epochs and within them. `live` is the epochs' side of the pool.

    `fence` is the scheduler's; `epochs` gives its loop, which exists once all pools do. `nodes` have the memory
    that the replicas of all pools share; None: KV pools keep their sizes.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        fence: int,
        ports: PoolPorts,
        memory: PoolMemory,
        clock: Clock,
        wall_clock: Clock,
        epochs: Callable[[], Epochs],
        nodes: NodeMemory | None,
    ) -> None:
        self.id = ports.pool
        self._config = config
        self._fence = fence
        self._replicas = ports.replicas
        self._membership = ports.membership
        self._listing = listing = ports.listing
        self._scaler = ports.scaler
        self._role_store = ports.roles
        self._level_store = ports.levels
        self._configured_levels = config.terms.levels
        self._levels = ports.levels.read(self._configured_levels)
        self._memory = memory
        self._telemetry = ports.telemetry
        self._clock = clock
        self._wall_clock = wall_clock
        self._epochs = epochs
        self._as_of = 0.0
        self._roster = Roster()
        reporters = EngineReporters(ports.replicas, ports.membership, listing, fence)
        self._gatherer = Gatherer(
            reporters,
            self._roster,
            clock,
            config.report_timeout_s,
            self._take_records,
            self._gathered,
            listing.leaving,
        )
        self._records = Records(ports.telemetry)
        self._evacuations = Evacuations(
            ports.replicas, self._roster, listing, self._tree, self._without_arrivals, fence, clock
        )
        self._dispatch = Dispatch(self, self._records)
        self._nodes = nodes
        self._reporters = reporters
        if nodes is not None:
            ports.scaler.sleeping = PoolSleepers(
                self.id, nodes, lambda: self._roster.statuses, config.memory.asleep, lambda: self._epochs().idle()
            )
        self._pairs = PairOrders(
            config.memory,
            fence,
            ports.replicas,
            self._reported_memory,
            lambda: {replica: status.state for replica, status in self._roster.statuses.items()},
        )
        self.live = LivePool(
            self.id,
            fence,
            listing,
            self._gatherer,
            self._roster,
            self._dispatch,
            ports.scaler,
            ports.telemetry,
            None if nodes is None else self._pairs,
        )

    async def listed(self) -> None:
        """Wait for Serve's first list of the pool's replicas."""
        await self._membership.listed.wait()

    def restore_orders(self) -> None:
        """Set the roles and the levels that operators have set before this scheduler began."""
        for replica, role in self._role_store.read().items():
            self._epochs().set_role(self.id, replica, role)
        if self._levels != self._configured_levels:
            self._epochs().begin_levels(self.id, self._levels)

    def close(self) -> None:
        """Stop gathering."""
        self._gatherer.close()

    # --- moves ----------------------------------------------------------------------------------------

    async def move(self, source: ReplicaId, order: Order, target: ReplicaId) -> MigrationRecord:
        """See `Sources.move`."""
        return await self._replicas.at(source).move(order, target, self._fence)

    # --- caches of replicas that stop -----------------------------------------------------------------

    def _tree(self) -> PromptTree:
        return self._memory.router.tree

    def _without_arrivals(self) -> Collection[ReplicaId]:
        """The replicas that no arrival is placed on."""
        return barred_by_role(self._memory, frozenset())

    async def evacuate(self, replica: ReplicaId, model: str, within_s: float) -> None:
        """See `EvacuationApi.evacuate`."""
        await self._evacuations.evacuate(replica, model, within_s)

    # --- reports --------------------------------------------------------------------------------------

    def _take_records(self, records: Iterable[MigrationRecord]) -> None:
        for record in records:
            self._dispatch.take(record)

    def _gathered(self) -> None:
        self._as_of = self._wall_clock()
        if self._nodes is not None:
            self._nodes.ledgers.take(self.id, self._reported_memory(), self._reporters.serving())

    # --- for ingresses and replicas -------------------------------------------------------------------

    def place(self, calls: Sequence[PlaceCall]) -> dict[RequestId, Decision]:
        """Choose replicas for requests of the pool that come together."""
        gone, by_request = self._gone(), {call.arrival.id: call for call in calls}
        ordered = placing_order(self._memory, [call.arrival for call in calls], self._clock())
        return {arrival.id: self._place(by_request[arrival.id], gone) for arrival in ordered}

    def _place(self, call: PlaceCall, gone: Collection[ReplicaId]) -> Decision:
        decision = self._epochs().place(call, gone)
        if not isinstance(decision, Place):
            self._epochs().hurry()
        if not isinstance(decision, NoReplica) and not call.exclude:
            self._telemetry.matched(decision.matched)
        return decision

    def _gone(self) -> tuple[ReplicaId, ...]:
        """The replicas that have left since the last epoch."""
        running = frozenset(self._membership.running)
        return tuple(r for r in self._roster.statuses if r not in running)

    def metrics(self, scheduler: ReplicaId) -> tuple[Family, ...]:
        """All metrics of the pool, with the scheduler's id as a label."""
        return self._telemetry.expose(scheduler)

    def view(self) -> PlacingView:
        """See `PlacingApi.view`."""
        memory = self._memory
        asleep = self._scaler.sleeping.asleep if self._scaler.sleeping is not None else frozenset[ReplicaId]()
        return placing_view(memory.cluster, replica_speed(memory), self._naming(), memory.terms.ttft_s, asleep)

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
        tree, naming = self._memory.router.tree, self._naming()
        distinct, copies = tree.copies()
        return {
            "kind": str(self._config.routing),
            "names": asdict(naming) if isinstance(naming, Naming) else None,
            "off": naming if isinstance(naming, str) else None,
            "mirrors": sum(1 for _ in tree.replicas),
            "distinct_blocks": distinct,
            "copies_per_block": round(copies / distinct, 3) if distinct else None,
        }

    def wanted(self) -> int | None:
        """See `OperatorApi.wanted`."""
        return self._scaler.wanted if self._epochs().ready.is_set() else None

    def record(self, record: MigrationRecord) -> None:
        """See `NoticeApi.record`."""
        self._dispatch.take(record)

    def copied(self, record: CopyRecord) -> None:
        """See `NoticeApi.copied`."""
        self._dispatch.take_copy(record)
        if record.reason is CopyReason.EVACUATE:
            self._telemetry.copied(record)

    def latencies(self, ingress: IngressId, counts: ClassCounts) -> None:
        """See `NoticeApi.latencies`."""
        self.live.reached.take(ingress, counts, self._clock())

    # --- for operators --------------------------------------------------------------------------------

    async def state(self) -> dict[str, Any]:
        """The body of `/mell/state`, from fresh reports."""
        await self._gatherer.gather_within(_OPERATOR_WAIT_S)
        return self._state()

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The bodies of `/mell/state` and `/mell/migrations` as of the last gathering, without a call to a replica."""
        return self._state(), self._migrations()

    def _state(self) -> dict[str, Any]:
        roster, gauges, memory, now = self._roster, self._gatherer.gauges, self._memory, self._clock()
        by_hand = memory.learned.roles_by_hand
        loads = roster.loads(self._listing.leaving())
        replicas = [replica_json(r, gauges[r.id], memory.locations.role(r.id), by_hand.get(r.id)) for r in loads]
        others = self._listing.others(roster.statuses)
        replicas += [replica_json(load_of(status), by_hand=by_hand.get(status.id)) for status in others]
        dry_run = run.to_json() if (run := self._epochs().dry_runs.get(self.id)) is not None else None
        state = {
            "as_of": self._as_of,
            "mode": str(self._epochs().mode),
            "configured_mode": str(self._config.mode),
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
        if (service := service_report(memory, now, self.live.reached.quantiles(now))) is not None:
            state["service"] = service.to_json()
        if (least := least_replicas(memory.cluster)) is not None:
            state["least_replicas"] = least
        if memory.scaled is not None:
            state["scaling"] = scaling_report(memory.cluster, memory.scaled).to_json()
        if (prefills := prefill_report(memory)) is not None:
            state["disaggregation"] = prefills.to_json()
        if self._nodes is not None:
            state["devices"] = devices_json(self._nodes, self._epochs().mode is Mode.ACT)
            state["pairing"] = self._pairing()
        return state | ({"dry_run": dry_run} if dry_run else {})

    def _pairing(self) -> dict[str, Any]:
        """The member `pairing` of `/mell/state`."""
        proposed, reported = self._epochs().proposed_pairs.get(self.id), self._reported_memory()
        return {
            "mode": str(self._memory.terms.pairing_mode),
            "pairs": pairs_json(reported),
            "unpairable": unpairable_json(reported),
        } | ({} if proposed is None else {"proposed": proposed.to_json()})

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
        move = self._epochs().order(self.id, Move(request.id, source, to, request.tokens, Reason.MANUAL, 0, fixed))
        path = ONLY[move.path] if path is PathRequest.AUTO and move.path is not None else path
        order = Order(id, request.id, path, move.reason, move.kv_s, move.tokens_s)
        try:
            await self._dispatch.order(order, move)
        except PeerLost as error:
            return MoveRejected(503, str(error))
        except MigrationError as error:
            return MoveRejected(422, str(error))
        return MoveAccepted(order.id)

    def match(self, arrival: Arrival) -> dict[str, Any]:
        """See `OperatorApi.match`."""
        found = match_prompt(self._memory, arrival, self._clock(), self._gone())
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
        decision = preview(self._memory, arrival, (source, *self._gone()))
        return decision.replica if isinstance(decision, Place | Queue) else None

    async def drain(self, replica: str) -> MoveAnswer:
        """See `OperatorApi.drain`. Its requests move to other replicas while they run."""
        if replica not in self._roster.statuses:
            return MoveRejected(404, f"no replica {replica!r} is running", self._running_replicas())
        if self._scaler.sleeping is not None and replica in self._scaler.sleeping.asleep:
            return MoveRejected(409, f"replica {replica} is asleep: wake it first")
        if len(self._membership.running) < 2 and self._scaler.max_replicas < 2:
            return MoveRejected(422, "the only replica cannot be drained while max_replicas is 1")
        try:
            await self._scaler.drain(ReplicaId(replica), self._fence)
        except PeerLost as error:
            return MoveRejected(503, str(error))
        except MigrationError as error:
            return MoveRejected(422, str(error))
        self._epochs().hurry()
        return MoveAccepted(replica)

    def set_role(self, replica: str, role: Role | None) -> MoveAnswer:
        """See `OperatorApi.set_role`. The next epoch assigns it."""
        if replica not in self._roster.statuses:
            return MoveRejected(404, f"no replica {replica!r} is running", self._running_replicas())
        mode = self._epochs().mode
        if mode is not Mode.ACT:
            return MoveRejected(422, f"scheduler.mode is {mode}: nothing moves requests on; write act")
        self._epochs().set_role(self.id, ReplicaId(replica), role)
        by_hand, running = self._memory.learned.roles_by_hand, self._roster.statuses
        self._role_store.write({r: by_hand[r] for r in sorted(by_hand) if r in running})
        return MoveAccepted(replica)

    def _reported_memory(self) -> dict[ReplicaId, ReportedMemory]:
        """The elastic KV pools of all replicas that have reported."""
        statuses = self._roster.statuses
        return {
            replica: ReportedMemory(statuses[replica].node, gauges.memory, statuses[replica].block_size)
            for replica, gauges in self._gatherer.gauges.items()
            if gauges.memory is not None and replica in statuses
        }

    async def set_memory(self, replica: str, blocks: int | None) -> MoveAnswer:
        """See `OperatorApi.set_memory`."""
        await self._gatherer.gather_within(_OPERATOR_WAIT_S)
        if replica not in self._roster.statuses:
            return MoveRejected(404, f"no replica {replica!r} is running", self._running_replicas())
        if self._nodes is None:
            return MoveRejected(422, "memory.budget_mib is not set: KV pools keep their sizes")
        answer = await self._nodes.orders.set_blocks(ReplicaId(replica), blocks)
        self._epochs().hurry()
        return answer

    async def set_asleep(self, replica: str | None, asleep: bool) -> MoveAnswer:
        """See `OperatorApi.set_asleep`."""
        mode = self._epochs().mode
        if asleep and mode is not Mode.ACT:
            return MoveRejected(422, f"scheduler.mode is {mode}: no request would wake it again; write act")
        if self._nodes is None:
            return MoveRejected(422, "memory.budget_mib is not set: no replica sleeps")
        await self._gatherer.gather_within(_OPERATOR_WAIT_S)
        if replica is not None and replica not in self._roster.statuses:
            return MoveRejected(404, f"no replica {replica!r} is running", self._running_replicas())
        states = [ReplicaState.RUNNING] if asleep else [ReplicaState.ASLEEP]
        found = [r for r, status in self._roster.statuses.items() if status.state in states]
        chosen = sorted(found) if replica is None else [ReplicaId(replica)]
        if not chosen:
            return MoveRejected(409, f"no replica of the model is {'awake' if asleep else 'asleep'}")
        # All fall asleep, or none; of several that sleep, one wakes.
        if replica is None and asleep and self._scaler.min_replicas:
            return MoveRejected(422, f"min_replicas is {self._scaler.min_replicas}: lower it first (mell bounds)")
        answers = [
            await (self._scaler.sleep(each) if asleep else self._scaler.wake(each))
            for each in (chosen if asleep else chosen[:1])
        ]
        self._epochs().hurry()
        refused = next((answer for answer in answers if isinstance(answer, MoveRejected)), None)
        return refused or MoveAccepted(replica or self.id)

    async def pair(self, lower: str, upper: str) -> MoveAnswer:
        """See `OperatorApi.pair`."""
        return await self._order_pair((lower, upper), lambda: self._pairs.pair(ReplicaId(lower), ReplicaId(upper)))

    async def unpair(self, replica: str) -> MoveAnswer:
        """See `OperatorApi.unpair`."""
        return await self._order_pair((replica,), lambda: self._pairs.unpair(ReplicaId(replica)))

    async def _order_pair(
        self, replicas: Sequence[str], order: Callable[[], Coroutine[Any, Any, MoveAnswer]]
    ) -> MoveAnswer:
        """Give an order about replicas that run."""
        await self._gatherer.gather_within(_OPERATOR_WAIT_S)
        if missing := [replica for replica in replicas if replica not in self._roster.statuses]:
            return MoveRejected(404, f"no replica {missing[0]!r} is running", self._running_replicas())
        answer = await order()
        self._epochs().hurry()
        return answer

    async def set_level(self, service_class: str, ttft_p99_s: float | None, itl_p99_s: float | None) -> MoveAnswer:
        """See `OperatorApi.set_level`."""
        if (level := self._levels.get(service_class)) is None:
            message = f"no level is configured for the class {service_class!r}"
            return MoveRejected(422, message, {"classes": list(self._levels)})
        changed = ServiceLevel(
            level.ttft_p99_s if ttft_p99_s is None else ttft_p99_s,
            level.itl_p99_s if itl_p99_s is None else itl_p99_s,
        )
        self._levels = {**self._levels, service_class: changed}
        self._level_store.write(self._configured_levels, self._levels)
        await self._epochs().set_levels(self.id, self._levels)
        return MoveAccepted(self.id)

    def set_bounds(self, least: int, most: int) -> MoveAnswer:
        """See `OperatorApi.set_bounds`."""
        mode = self._epochs().mode
        if mode is not Mode.ACT:
            return MoveRejected(422, f"scheduler.mode is {mode}: nothing opens replicas; write act")
        if (prefills := self._config.prefill_replicas) and prefills >= least:
            return MoveRejected(422, f"{prefills} replicas may be for prefills: the minimum must be above that")
        if not least and self._nodes is None:
            return MoveRejected(422, "a minimum of 0 needs memory.budget_mib: without it no replica sleeps")
        self._scaler.set_bounds((least, most))
        return MoveAccepted(self.id)
