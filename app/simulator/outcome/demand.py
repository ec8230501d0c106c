"""What a workload asks for, whatever the policy: every request on a replica of its own, in the idealised model.

Nothing waits, stalls or is moved there, so that the sizes of all requests are those the lower bound is about.
"""

from dataclasses import replace

from app.simulator.world.setup import Setup
from policies.cluster.changes import Changes
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.decision.limits import Limits
from policies.rules.policy import NONE, Barred


class Alone:
    """A policy that gives every request a replica of its own. No system would; it is what makes nobody wait."""

    headroom_s = 0.0

    def place(self, cluster: Cluster, request: Request, barred: Barred = NONE) -> Replica | None:
        """Never with others."""
        return None

    def rebalance(self, cluster: Cluster, changes: Changes) -> None:
        """Open a replica for every arrival."""
        for request in changes.waiting:
            replica = cluster.open()
            if replica is not None:
                cluster.place(request, replica)


def unlimited(setup: Setup) -> Setup:
    """The same setup, with as many replicas as are asked for and nothing that holds decisions back."""
    return replace(setup, max_gpus=None, batched=True, limits=Limits())
