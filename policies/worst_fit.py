"""Worst fit: MELL's baseline "WF" (section VIII-B), without migration."""

from dataclasses import dataclass, field

from policies.arrivals import Openings, admit
from policies.changes import Changes
from policies.cluster import Cluster
from policies.options import HEADROOM, about
from policies.overload import Overload, relieve
from policies.working import Replica, Request


@dataclass(frozen=True, slots=True)
class WorstFit:
    """Each request goes to the emptiest replica, and stays there."""

    headroom_s: float = field(default=0.0, metadata=about(HEADROOM, least=0))
    overload: Overload = field(
        default=Overload.EVICT, metadata=about("What happens when requests outgrow their replica.")
    )

    def place(self, cluster: Cluster, request: Request) -> Replica | None:
        """See `Policy.place`."""
        return cluster.widest(request.tokens)

    def rebalance(self, cluster: Cluster, changes: Changes) -> None:
        """See `Policy.rebalance`."""
        waiting = [*relieve(cluster, self.overload), *changes.waiting]
        admit(cluster, waiting, lambda request: self.place(cluster, request), Openings(cluster))
