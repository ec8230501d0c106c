"""The cluster to decide on, made from what was observed."""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica
from policies.cluster.supply import Demand, Supply
from policies.decision.observation import Observation
from policies.model import UP, Phase, ReplicaId, ReplicaLoad, ReplicaState, RequestId, RequestLoad, Tokens

Name = TypeVar("Name", bound=str)

_SETTLED = (Phase.DECODE, Phase.MOVING)
"""What a request does that has all of its blocks."""


@dataclass(slots=True)
class Known:
    """What outlives an observation: in which order replicas and requests appeared, and what policies and limits noted.

    `capacity` is a replica's in tokens, 0 as long as none has been seen.
    """

    capacity: Tokens = Tokens(0)
    replicas: dict[ReplicaId, None] = field(default_factory=dict)
    requests: dict[RequestId, None] = field(default_factory=dict)
    resting: dict[RequestId, float] = field(default_factory=dict)
    idle_since: dict[ReplicaId, float] = field(default_factory=dict)
    demand: Demand = field(default_factory=Demand)

    def meet(self, seen: Observation) -> None:
        """Add what is new, the oldest request first, and forget what is gone."""
        self.capacity = max((r.capacity_tokens for r in seen.state.replicas), default=Tokens(0)) or self.capacity
        replicas = [r.id for r in seen.state.replicas]
        self.replicas = _in_order(self.replicas, set(replicas), replicas)
        requests = {request.id: request for _, request in seen.state.requests()}
        new = sorted((q for q in requests.values() if q.id not in self.requests), key=lambda q: (-q.age_s, q.id))
        self.requests = _in_order(self.requests, requests, (q.id for q in new))
        self.resting = {q: until for q, until in self.resting.items() if q in requests}
        self.idle_since = {r: since for r, since in self.idle_since.items() if r in self.replicas}


@dataclass(slots=True)
class View:
    """A cluster, and where those of its waiting requests are that are on a replica after all.

    `homes` maps a request to its replica: it is queued there without KV blocks, or its replica is to be gone.
    """

    cluster: Cluster
    homes: dict[RequestId, ReplicaId] = field(default_factory=dict)
    leaving: set[RequestId] = field(default_factory=set)


def view(seen: Observation, known: Known) -> View:
    """The cluster in which every replica and request is where `seen` says. `known` must have met `seen`.

    A request that is on its way is at its target, and holds its blocks at its source, too. Requests that are queued,
    or whose replica is draining, wait for a place. The engines' count of free blocks is the truth about room: where
    requests share blocks, their tokens add up to more than is in use.
    """
    up = sum(r.state in UP for r in seen.state.replicas) + seen.opening
    draining = sum(r.state is ReplicaState.DRAINING for r in seen.state.replicas)
    supply = Supply(limit=max(0, seen.max_replicas - up - draining))
    cluster = Cluster(
        Tokens(max(1, known.capacity)), supply, demand=known.demand, holds=True, starts_as=ReplicaState.STARTING
    )
    made = View(cluster)
    _add_replicas(cluster, seen, known)
    targets = {move.request: cluster.replicas.get(move.target) for move in seen.moves}
    residents = seen.state.residents()
    for request_id in known.requests:
        _add_request(made, *residents[request_id], targets.get(request_id))
    for load in seen.state.replicas:
        if load.state is ReplicaState.RUNNING:
            _correct(cluster, cluster.replicas[load.id], load)
    _admit_at_home(made)
    for request_id, until in known.resting.items():
        if request_id in cluster.requests:
            cluster.rest(request_id, until)
    return made


def _in_order(known: Iterable[Name], there: Container[Name], new: Iterable[Name]) -> dict[Name, None]:
    """What is known and still there, then what is new."""
    return dict.fromkeys([*(name for name in known if name in there), *new])


def _add_replicas(cluster: Cluster, seen: Observation, known: Known) -> None:
    loads = {load.id: load for load in seen.state.replicas}
    for load in map(loads.__getitem__, known.replicas):
        if load.state in UP:
            replica = cluster.add_replica(load.id, load.node, load.capacity_tokens or known.capacity, load.state)
            replica.max_requests = load.max_requests or replica.max_requests
            replica.idle_since = known.idle_since.get(load.id)
    for number in range(seen.opening):
        cluster.add_replica(ReplicaId(f"opening-{number}"), "", known.capacity, ReplicaState.STARTING)


def _add_request(made: View, load: ReplicaLoad, reported: RequestLoad, target: Replica | None) -> None:
    cluster = made.cluster
    home = cluster.replicas.get(load.id)
    stays = reported.immovable is not None or reported.phase is Phase.MOVING
    if home is None and stays and target is None:
        return  # Its replica is to be gone, and nothing can be done about this one.
    queued = target is None and (home is None or (reported.phase is Phase.WAITING and not stays))
    host = None if queued else target or home
    request = cluster.add_request(reported.id, Tokens(max(1, reported.tokens)), host)
    cluster.pin(request, stays or target is not None)
    if queued:
        made.homes[request.id] = load.id
        if home is None:
            made.leaving.add(request.id)
        else:
            cluster.enqueue(home, home.queued + 1)
    elif home is not None and home is not host:
        cluster.locate(request, host, home)


def _admit_at_home(made: View) -> None:
    """What is queued where there is room for it now runs there in the engine's next step, whatever is decided."""
    for request_id, home_id in list(made.homes.items()):
        request, home = made.cluster.requests[request_id], made.cluster.replicas.get(home_id)
        if home is not None and home.free >= request.tokens:
            made.cluster.locate(request, home)
            made.cluster.enqueue(home, home.queued - 1)
            del made.homes[request_id]


def _correct(cluster: Cluster, replica: Replica, load: ReplicaLoad) -> None:
    """Set the difference between what the engine has in use and what the replica's requests should.

    Requests that prefill, or are on their way here, may have all of their blocks by now, or none.
    """
    settled = {q.id for q in load.requests if q.phase in _SETTLED}
    uncertain = sum(q.tokens for q in replica.requests.values() if q.source is not None or q.id not in settled)
    sure = replica.load + replica.held - uncertain
    unexplained = load.used_tokens - sure
    cluster.correct(replica, unexplained - min(max(unexplained, 0), uncertain))
