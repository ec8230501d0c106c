"""The cluster as it would be had all decisions been carried out: what a scheduler that only observes has to decide on.

Decided on the cluster as it is, the same moves would be found again in every epoch, and nothing would ever come of
them. So the shadow keeps a cluster of its own. It begins as the real one was found; from then on the real one only says
which requests there are and how large they have become. Every epoch is decided as a live one is, with the same limits,
and what it decides is done at once: the idealised model of the simulator, with real requests in it.
"""

from collections import Counter
from collections.abc import Mapping

from policies.cluster.changes import Arrival
from policies.cluster.cluster import Cluster
from policies.cluster.supply import Supply
from policies.decision import epoch
from policies.decision.dry_run import DryRun
from policies.decision.epoch import Events
from policies.decision.experience import Experience
from policies.decision.limits import Limits
from policies.decision.observation import Observation
from policies.decision.planner import LiveLimits
from policies.model import UP, Phase, ReplicaLoad, ReplicaState, RequestId, RequestLoad, Tokens
from policies.plan import Plan
from policies.rules.policy import Policy

Reported = Mapping[RequestId, tuple[ReplicaLoad, RequestLoad]]
"""Every request with the replica that it really is on, the oldest first."""


class Shadow:
    """Lives through observations as `Planner` does. Equal observations give equal shadows."""

    def __init__(self, policy: Policy, limits: LiveLimits, epoch_s: float) -> None:
        self._policy = policy
        self._limits = limits
        self._experience = Experience(epoch_s)
        self._began: float | None = None
        self._now = 0.0
        self._replicas_now = 0
        self._real_s = 0.0
        self._needed_s = 0.0
        self._moves = 0
        self._moved = 0
        self.cluster = Cluster(Tokens(1))

    def observe(self, seen: Observation) -> Plan:
        """Live through one epoch; returns what has been decided and done in the shadow.

        Nothing is, before all replicas that run have reported once: where their requests are is where it begins.
        """
        self._experience.observe(seen)
        limits = self._limits.now(self._experience)
        reported = _reported(seen)
        if self._began is None:
            if not _all_known(seen):
                return Plan()
            self.cluster = _found(seen, reported, limits)
            self._began = self._now = seen.now
        self._pass(seen)
        plan = self._decide(seen.now, reported, limits)
        self._moves += len(plan.moves) + len(plan.evicted)
        self._moved += sum(move.tokens for move in plan.moves) + sum(eviction.tokens for eviction in plan.evicted)
        return plan

    @property
    def so_far(self) -> DryRun | None:
        """What it has come to by the last observation; None as long as it has not begun."""
        if self._began is None:
            return None
        return DryRun(
            since_s=self._now - self._began,
            replicas_now=self._replicas_now,
            replicas_needed=len(self.cluster.replicas),
            requests_waiting=len(self.cluster.waiting),
            gpu_seconds_real=self._real_s,
            gpu_seconds_needed=self._needed_s,
            moves=self._moves,
            moved_tokens=Tokens(self._moved),
        )

    # --- inside ---------------------------------------------------------------------------------------

    def _pass(self, seen: Observation) -> None:
        """What the last epoch left held until now."""
        passed_s = seen.now - self._now
        self._real_s += passed_s * self._replicas_now
        self._needed_s += passed_s * len(self.cluster.replicas)
        self._now = seen.now
        self._replicas_now = sum(load.state is not ReplicaState.STOPPED for load in seen.state.replicas)

    def _decide(self, now: float, reported: Reported, limits: Limits) -> Plan:
        cluster, rate = self.cluster, self._experience.decode_rate
        cluster.reserve(epoch.headroom(self._policy, limits, rate), epoch.lead(limits, rate))
        changes = epoch.begin(cluster, _events(cluster, reported), limits, now)
        for request_id, (_, request) in reported.items():
            cluster.pin(cluster.requests[request_id], request.immovable is not None)
        return epoch.decide(cluster, changes, self._policy, limits, now)


def _reported(seen: Observation) -> Reported:
    residents = seen.state.residents()
    return dict(sorted(residents.items(), key=lambda item: (-item[1][1].age_s, item[0])))


def _all_known(seen: Observation) -> bool:
    """Whether replicas run, and each that does not start has told its capacity."""
    starting = ReplicaState.STARTING
    known = all(load.capacity_tokens or load.state is starting for load in seen.state.replicas)
    return known and bool(seen.state.running())


def _found(seen: Observation, reported: Reported, limits: Limits) -> Cluster:
    """The cluster as it is. Replicas that start are up, since starting takes no time here; those that are to be gone
    are gone, and their requests wait as what is queued does.

    Of replicas that differ the smallest is the measure of all.
    """
    up = sorted((load for load in seen.state.replicas if load.state in UP), key=lambda load: (load.node, load.id))
    running = seen.state.running()
    supply = Supply(max(Counter(load.node for load in up).values()), max(seen.max_replicas, len(up)))
    capacity = min(load.capacity_tokens for load in running)
    most = min(load.max_requests for load in running)
    cluster = Cluster(capacity, supply, max_requests=most)
    homes = {load.id: cluster.open() for load in up}
    while len(cluster.replicas) < limits.min_replicas and cluster.open():
        pass
    for request_id, (load, request) in reported.items():
        added = cluster.add_request(request_id, _size(load, request, cluster.capacity))
        home = homes.get(load.id)
        if home is not None and request.phase is not Phase.WAITING:
            cluster.locate(added, home)
    cluster.settle()
    return cluster


def _events(cluster: Cluster, reported: Reported) -> Events:
    """What has become of requests since the last epoch."""
    sizes = {name: _size(load, request, cluster.capacity) for name, (load, request) in reported.items()}
    return Events(
        sizes={name: sizes[name] for name, q in cluster.requests.items() if sizes.get(name, q.tokens) != q.tokens},
        departed=[name for name in cluster.requests if name not in sizes],
        arrived=[Arrival(name, tokens) for name, tokens in sizes.items() if name not in cluster.requests],
    )


def _size(load: ReplicaLoad, request: RequestLoad, capacity: Tokens) -> Tokens:
    """Tokens in whole blocks; what shares blocks with others counts in full. Never more than a replica has."""
    blocks = -(-max(1, request.tokens) // load.block_size)
    return Tokens(min(blocks * load.block_size, capacity))
