"""Where an arriving request goes between epochs: at once, and without moving any other."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from policies.events import Arrival
from policies.model import ClusterState, ReplicaId, ReplicaState, Tokens
from policies.policy import Policy
from policies.view import cluster_of


@dataclass(frozen=True, slots=True)
class Place:
    """The request fits on this replica now."""

    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class Queue:
    """Nothing has room: wait on the replica where room is nearest."""

    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class NoReplica:
    """No replica accepts requests."""


Decision = Place | Queue | NoReplica


def place(
    policy: Policy,
    state: ClusterState,
    arrival: Arrival,
    exclude: Collection[ReplicaId] = (),
    headroom: Tokens = Tokens(0),
) -> Decision:
    """Choose a replica for `arrival`, never one in `exclude`; `headroom` tokens stay free for each request's growth.

    A request that is on a replica already is placed as if it were not. What fits nowhere queues where the fewest
    requests are; of equals, where the most is free.
    """
    cluster = cluster_of(state, headroom, exclude)
    running = [r for r in cluster.replicas.values() if r.state is ReplicaState.RUNNING]
    if not running:
        return NoReplica()
    if arrival.id in cluster.requests:
        cluster.remove_request(cluster.requests[arrival.id])
    chosen = policy.place(cluster, cluster.add_request(arrival.id, arrival.tokens))
    if chosen is not None:
        return Place(chosen.id)
    return Queue(min(running, key=lambda r: (len(r.requests), -r.free, r.id)).id)


def least_loaded(
    state: ClusterState, running: Collection[ReplicaId], sent: Mapping[ReplicaId, int]
) -> ReplicaId | None:
    """A choice without the scheduler: of `running`, the replica with the most room as last known.

    `sent` counts the caller's own requests per replica; it alone decides between replicas of which nothing is known.
    """

    def load(replica_id: ReplicaId) -> tuple[int, int, ReplicaId]:
        known = state.replica(replica_id)
        return (-known.free_tokens if known else 0, sent.get(replica_id, 0), replica_id)

    return min(running, key=load, default=None)
