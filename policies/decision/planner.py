"""The live scheduler's decisions: from one observation of the cluster to what is to be done, and where arrivals go.

What the simulator does with its persistent cluster, the planner does with one that is made anew from each observation:
both then call the same `epoch.decide` (design: reports are the truth, everything else is soft state).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from policies.cluster.changes import Arrival, Changes, Crossing, Departure
from policies.cluster.classes import Kind
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.decision import epoch
from policies.decision.experience import Experience
from policies.decision.limits import Limits
from policies.decision.observation import Observation
from policies.decision.placement import Decision, place
from policies.decision.view import Known, View, view
from policies.model import ClusterState, ReplicaId, RequestId, Tokens
from policies.plan import Move, Plan, Reason
from policies.rules.policy import Barred, Policy


class Mode(StrEnum):
    """What becomes of plans. OFF: none are made; replicas that are to be gone are still evacuated, in every mode.
    OBSERVE: they are made, and not carried out. ACT: they are carried out.
    """

    OFF = "off"
    OBSERVE = "observe"
    ACT = "act"


@dataclass(frozen=True, slots=True)
class Decided:
    """One epoch's outcome. `orders` are the moves to be carried out now, `plan` is what the policy decided.

    In mode OBSERVE nothing of the plan is in `orders`, and nothing is to be opened or closed.
    """

    plan: Plan
    orders: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class LiveLimits:
    """`limits` as configured; what is None in the live settings is learned: `linger_s` and `foresight_s` from how long
    replicas take to start. `by_hand_s` is how long a request stays that an operator has moved.
    """

    limits: Limits = field(default_factory=Limits)
    linger_s: float | None = None
    foresight_s: float | None = None
    by_hand_s: float = 60.0

    def now(self, experience: Experience) -> Limits:
        """The limits of an epoch."""
        startup_s = experience.startup_s
        return replace(
            self.limits,
            lead_s=experience.lead_s,
            linger_s=startup_s if self.linger_s is None else self.linger_s,
            foresight_s=startup_s if self.foresight_s is None else self.foresight_s,
        )


class Planner:
    """Decides, epoch by epoch. `observe` begins an epoch, `decide` ends it; arrivals are placed in between."""

    def __init__(self, policy: Policy, limits: LiveLimits, epoch_s: float) -> None:
        self._policy = policy
        self._limits = limits
        self._known = Known()
        self._experience = Experience(epoch_s)
        self._hosts: dict[RequestId, tuple[ReplicaId, Kind]] = {}
        self._seen = Observation(0.0, ClusterState(()))
        self._models: dict[ReplicaId, str] = {}
        self._view = View(Cluster(Tokens(1)))

    @property
    def cluster(self) -> Cluster:
        """The cluster as the last epoch left it, with what was placed since."""
        return self._view.cluster

    def observe(self, seen: Observation) -> None:
        """The cluster is found to be so."""
        self._seen = seen
        self._models = {load.id: load.model for load in seen.state.replicas}
        self._experience.observe(seen)
        self._known.meet(seen)
        for request_id in seen.by_hand:
            self._known.resting[request_id] = seen.now + self._limits.by_hand_s
        self._look()

    def decide(self, mode: Mode) -> Decided:
        """What is to be done about it."""
        limits = self._limits.now(self._experience)
        changes = self._changes()
        limits.begin(self._view.cluster, self._seen.now)
        evacuation = self._evacuate()
        orders = self._orders(evacuation)
        plan = evacuation
        if mode is not Mode.OFF:
            self._replace_missing()
            left = replace(changes, waiting=tuple(self._view.cluster.in_order()))
            plan = epoch.decide(self._view.cluster, left, self._policy, limits, self._seen.now)
        if mode is Mode.ACT:
            self._remember()
            plan = self._keep_what_is_open(plan)
            orders += self._orders(plan)
        else:
            self._look()
        cluster = self._view.cluster
        self._hosts = {q.id: (q.replica.id, q.kind) for q in cluster.requests.values() if q.replica is not None}
        return Decided(plan, orders)

    def place(self, arrival: Arrival, exclude: Collection[ReplicaId] = ()) -> Decision:
        """Where a request goes that has just arrived; it counts there from now on."""
        return place(self._policy, self._view.cluster, arrival, exclude)

    def put_off(self, requests: Collection[RequestId]) -> None:
        """Those orders are not carried out in this epoch: the requests stay, and may be moved in the next one."""
        for request_id in requests:
            self._known.resting.pop(request_id, None)

    # --- inside ---------------------------------------------------------------------------------------

    def _look(self) -> None:
        """See the cluster as it was observed, without any decision."""
        self._view = view(self._seen, self._known)
        limits, rate = self._limits.now(self._experience), self._experience.decode_rate
        self._view.cluster.reserve(epoch.headroom(self._policy, limits, rate), epoch.lead(limits, rate))

    def _changes(self) -> Changes:
        """What became different since the last observation: which requests ended, which are of another class."""
        cluster = self._view.cluster
        departed, crossed = [], []
        for request_id, (replica_id, kind) in self._hosts.items():
            request, replica = cluster.requests.get(request_id), cluster.replicas.get(replica_id)
            if request is None and replica is not None:
                departed.append(Departure(request_id, kind, replica))
            elif request is not None and request.replica is not None and request.kind is not kind:
                crossed.append(Crossing(request, kind))
        return Changes(tuple(departed), tuple(crossed))

    def _evacuate(self) -> Plan:
        """Place what is on replicas that are to be gone, the largest first. What fits nowhere is left to the policy."""
        cluster = self._view.cluster
        leaving = [cluster.requests[request_id] for request_id in self._view.leaving]
        for request in sorted(leaving, key=lambda q: (-q.tokens, q.order)):
            strangers = self._strangers(request)
            target = self._policy.place(cluster, request, strangers) or _without_headroom(cluster, request, strangers)
            if target is not None:
                cluster.place(request, target)
        return cluster.settle()

    def _keep_what_is_open(self, plan: Plan) -> Plan:
        """While a replica starts, because there is too little, none is emptied or closed: it would be opened again."""
        if not (self._seen.opening or plan.opened or self._experience.awaits_start(self._seen.now)):
            return plan
        self.put_off([move.request for move in plan.moves if move.reason is Reason.DRAIN])
        return replace(plan, moves=tuple(m for m in plan.moves if m.reason is not Reason.DRAIN), closed=())

    def _strangers(self, request: Request) -> Barred:
        """Replicas where the request cannot continue: they run another version."""
        own = self._models[self._view.homes[request.id]]
        return frozenset(r for r in self._view.cluster.replicas if self._models.get(r, own) != own)

    def _replace_missing(self) -> None:
        """Open what is missing to the fewest replicas: those that drain do not count."""
        cluster = self._view.cluster
        while cluster.up() < cluster.min_replicas and cluster.open() is not None:
            pass

    def _orders(self, plan: Plan) -> tuple[Move, ...]:
        """What a plan comes to where every request is on some replica: moves, and placements that lead to another one.

        While two versions run side by side, what leads from one to the other is left out.
        """
        cluster, homes = self._view.cluster, self._view.homes
        evicted = {eviction.request: eviction.source for eviction in plan.evicted}
        placed = []
        for placement in plan.placements:
            request = placement.request
            source = evicted.get(request) or homes.get(request)
            if source is not None:
                reason = _reason(request, evicted, self._view)
                tokens = cluster.requests[request].tokens
                placed.append(Move(request, source, placement.replica, tokens, reason, 0))
        moves = (move for move in (*placed, *plan.moves) if move.source != move.target)
        return tuple(move for move in moves if self._models[move.source] == self._models[move.target])

    def _remember(self) -> None:
        cluster = self._view.cluster
        self._known.resting = dict(cluster.resting)
        self._known.idle_since = {r.id: r.idle_since for r in cluster.replicas.values() if r.idle_since is not None}


def _without_headroom(cluster: Cluster, request: Request, barred: Barred) -> Replica | None:
    """The replica with the most free blocks, if the request fits there now: what is to be gone cannot be choosy."""
    fitting = [r for r in cluster.running() if r.accepts and r.free >= request.tokens and r.id not in barred]
    return max(fitting, key=lambda r: r.free, default=None)


def _reason(request: RequestId, evicted: Mapping[RequestId, ReplicaId], seen: View) -> Reason:
    if request in evicted:
        return Reason.OVERLOAD
    return Reason.EVACUATE if request in seen.leaving else Reason.ADMIT
