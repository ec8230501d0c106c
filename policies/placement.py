"""Where an arriving request goes between epochs: at once, and without moving any other."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from policies.cluster import Cluster
from policies.events import Arrival
from policies.model import ClusterState, ReplicaId, ReplicaState
from policies.policy import Policy


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
    with without(cluster, exclude):
        running = cluster.running()
        if not running:
            return NoReplica()
        request = cluster.add_request(arrival.id, arrival.tokens)
        chosen = policy.place(cluster, request)
        if chosen is not None:
            cluster.host(request, chosen)
            return Place(chosen.id)
        queue = min(running, key=lambda r: (len(r.requests), -r.free, r.id))
        cluster.host(request, queue)
        return Queue(queue.id)


@contextmanager
def without(cluster: Cluster, exclude: Collection[ReplicaId]) -> Iterator[None]:
    """For a while, those replicas take nothing."""
    excluded = [r for r in cluster.running() if r.id in exclude] if exclude else []
    for replica in excluded:
        replica.state = ReplicaState.DRAINING
    if excluded:
        cluster.invalidate()
    try:
        yield
    finally:
        for replica in excluded:
            replica.state = ReplicaState.RUNNING
        if excluded:
            cluster.invalidate()


def least_loaded(
    state: ClusterState, running: Collection[ReplicaId], sent: Mapping[ReplicaId, int]
) -> ReplicaId | None:
    """A choice without the scheduler: of `running`, the replica with the most room as last known.

    `sent` counts the caller's own requests per replica; it alone decides between replicas of which nothing is known.
    """
    free = {load.id: load.free_tokens for load in state.replicas}
    return min(running, key=lambda replica: (-free.get(replica, 0), sent.get(replica, 0), replica), default=None)
