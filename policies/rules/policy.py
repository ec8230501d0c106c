"""What a policy is: two functions of the cluster, one for a single arrival and one for an epoch."""

from collections.abc import Callable, Set
from typing import Protocol

from policies.cluster.changes import Changes
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.model import ReplicaId

Barred = Set[ReplicaId]
"""Replicas on which a request must not be placed."""

NONE: Barred = frozenset()


def outside(barred: Barred) -> Callable[[Replica], bool] | None:
    """Accepts all replicas but the barred ones; None where that is all of them."""
    return (lambda replica: replica.id not in barred) if barred else None


class Policy(Protocol):
    """Decides where requests live. It keeps no state of its own: the same cluster and changes, the same outcome."""

    @property
    def headroom_s(self) -> float:
        """Seconds of every request's growth that the policy wants kept free."""
        ...

    def place(self, cluster: Cluster, request: Request, barred: Barred = NONE) -> Replica | None:
        """Where an arriving request goes without moving any other; None if it fits on no replica but `barred` ones.

        Changes nothing.
        """
        ...

    def rebalance(self, cluster: Cluster, changes: Changes) -> None:
        """React to an epoch's changes by `cluster.place`, `move`, `evict` and `open`.

        Whatever is still waiting afterwards is queued. Emptied replicas are left for the caller to close.
        """
        ...
