"""The cluster to decide on, made from what replicas report."""

from collections.abc import Collection

from policies.cluster import Cluster
from policies.model import ClusterState, Phase, ReplicaId, ReplicaState, Tokens
from policies.supply import Supply


def cluster_of(state: ClusterState, headroom: Tokens = Tokens(0), without: Collection[ReplicaId] = ()) -> Cluster:
    """A cluster in which every replica and request is where `state` says, with no replica to be opened.

    Replicas in `without` take nothing. The engines' count of free blocks is the truth about room: where requests
    share blocks, their tokens add up to more than is in use.
    """
    capacity = max((r.capacity_tokens for r in state.replicas), default=Tokens(0))
    cluster = Cluster(capacity, Supply(limit=0), headroom)
    for load in state.replicas:
        runs = load.state is ReplicaState.RUNNING and load.id not in without
        known = load.state if runs or load.state is not ReplicaState.RUNNING else ReplicaState.DRAINING
        replica = cluster.add_replica(load.id, load.node, load.capacity_tokens, known)
        replica.max_requests = load.max_requests
        for reported in load.requests:
            request = cluster.add_request(reported.id, Tokens(max(1, reported.tokens)))
            request.pinned = reported.immovable is not None or reported.phase is Phase.MOVING
            cluster.host(request, replica)
        replica.shared = load.used_tokens - replica.load
    cluster.invalidate()
    return cluster
