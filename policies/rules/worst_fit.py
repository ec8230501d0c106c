"""Worst fit: MELL's baseline "WF" (section VIII-B), without migration."""

from dataclasses import dataclass, field

from policies.cluster.changes import Changes
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.cluster.search import widest
from policies.cluster.sizes import size_of
from policies.rules.arrivals import Openings, admit
from policies.rules.options import HEADROOM, about
from policies.rules.overload import Overload, relieve
from policies.rules.policy import NONE, Barred, outside


@dataclass(frozen=True, slots=True)
class WorstFit:
    """Each request goes to the emptiest replica, and stays there."""

    knows_sharing = True

    headroom_s: float = field(default=0.0, metadata=about(HEADROOM, least=0))
    overload: Overload = field(
        default=Overload.EVICT, metadata=about("The reaction to requests that outgrow their replica.")
    )

    def place(self, cluster: Cluster, request: Request, barred: Barred = NONE) -> Replica | None:
        """See `Policy.place`."""
        return widest(cluster, size_of(cluster, request), outside(barred))

    def rebalance(self, cluster: Cluster, changes: Changes) -> None:
        """See `Policy.rebalance`."""
        waiting = [*relieve(cluster, self.overload), *changes.waiting]
        admit(cluster, waiting, lambda request: self.place(cluster, request), Openings(cluster))
