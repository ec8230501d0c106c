"""What a policy is: two functions of the cluster, one for a single arrival and one for an epoch."""

from typing import Protocol

from policies.changes import Changes
from policies.cluster import Cluster
from policies.working import Replica, Request


class Policy(Protocol):
    """Decides where requests live. It keeps no state of its own: the same cluster and changes, the same outcome."""

    @property
    def headroom_s(self) -> float:
        """Seconds of every request's growth that the policy wants kept free."""
        ...

    def place(self, cluster: Cluster, request: Request) -> Replica | None:
        """Where an arriving request goes without moving any other; None if it fits nowhere. Changes nothing."""
        ...

    def rebalance(self, cluster: Cluster, changes: Changes) -> None:
        """React to an epoch's changes by `cluster.place`, `move`, `evict` and `open`.

        Whatever is still waiting afterwards is queued. Emptied replicas are left for the caller to close.
        """
        ...
