"""The demand of a workload without any policy: every request on its own replica, in the idealised model.

No request waits, stalls or moves, so the sizes over time depend on the workload alone: the input of the lower bound.
"""

from dataclasses import replace

from policies.cluster.changes import Changes
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.decision.limits import Limits
from policies.rules.policy import NONE, Barred
from simulator.world.setup import Setup


class Alone:
    """A policy that gives every request its own replica, so that no request waits."""

    headroom_s = 0.0
    knows_sharing = False

    def place(self, cluster: Cluster, request: Request, barred: Barred = NONE) -> Replica | None:
        """None: requests never share a replica."""
        return None

    def rebalance(self, cluster: Cluster, changes: Changes) -> None:
        """Open a replica for every arrival."""
        for request in changes.waiting:
            replica = cluster.decisions.open()
            if replica is not None:
                cluster.decisions.place(request, replica)


def unlimited(setup: Setup) -> Setup:
    """The same setup without a maximum number of replicas and without limits on decisions."""
    return replace(setup, max_gpus=None, batched=True, limits=Limits())
