"""Where an arriving request goes between epochs: at once, and without moving any other."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from policies.cluster.changes import Arrival
from policies.cluster.cluster import Cluster
from policies.model import ClusterState, ReplicaId
from policies.rules.policy import Policy


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


def place(policy: Policy, cluster: Cluster, arrival: Arrival, exclude: Collection[ReplicaId] = ()) -> Decision:
    """Choose a replica for `arrival`, never one in `exclude`, and count the request there.

    A request that is on a replica already is placed as if it were not. What fits nowhere queues where the fewest
    requests are; of equals, where the most is free.
    """
    if arrival.id in cluster.requests:
        cluster.remove_request(cluster.requests[arrival.id])
    barred = frozenset(exclude)
    candidates = [r for r in cluster.running() if r.id not in barred]
    if not candidates:
        return NoReplica()
    request = cluster.add_request(arrival.id, arrival.tokens)
    chosen = policy.place(cluster, request, barred)
    if chosen is not None:
        cluster.locate(request, chosen)
        return Place(chosen.id)
    queue = min(candidates, key=lambda r: (len(r.requests), -r.free, r.id))
    cluster.locate(request, queue)
    return Queue(queue.id)


def least_loaded(
    state: ClusterState, running: Collection[ReplicaId], sent: Mapping[ReplicaId, int]
) -> ReplicaId | None:
    """A choice without the scheduler: of `running`, the replica with the most room as last known.

    `sent` counts the caller's own requests per replica; it alone decides between replicas of which nothing is known.
    """
    free = {load.id: load.free_tokens for load in state.replicas}
    return min(running, key=lambda replica: (-free.get(replica, 0), sent.get(replica, 0), replica), default=None)
