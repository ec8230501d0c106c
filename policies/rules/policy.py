"""The policy protocol: two functions of the cluster, one for a single arrival and one for an epoch."""

from collections.abc import Callable, Set
from typing import Protocol

from policies.cluster.changes import Changes
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.model import ReplicaId

Barred = Set[ReplicaId]
"""Replicas that are excluded from a placement."""

NONE: Barred = frozenset()


def outside(barred: Barred) -> Callable[[Replica], bool] | None:
    """A filter that accepts all replicas but the barred ones; None if no replica is barred."""
    return (lambda replica: replica.id not in barred) if barred else None


class Policy(Protocol):
    """The rule that assigns requests to replicas. It has no state: equal clusters and changes give equal outcomes."""

    @property
    def headroom_s(self) -> float:
        """Seconds of every request's growth to keep free."""
        ...

    @property
    def knows_sharing(self) -> bool:
        """True if it asks for a request's size on each replica, and not only for all of its tokens."""
        ...

    def place(self, cluster: Cluster, request: Request, barred: Barred = NONE) -> Replica | None:
        """The replica for an arriving request without moving any other; None if it fits on no replica that is not
        `barred`. Does not change the cluster.
        """
        ...

    def rebalance(self, cluster: Cluster, changes: Changes) -> None:
        """React to an epoch's changes by the `place`, `move`, `evict` and `open` of `cluster.decisions`.

        Requests that still wait afterwards are queued. The caller closes emptied replicas.
        """
        ...
