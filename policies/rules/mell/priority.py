"""The paper's two priorities (section VI-C): of a replica for an arrival, and of one replica for another."""

from dataclasses import dataclass

from policies.cluster.replica import Replica


@dataclass(frozen=True, slots=True)
class Weights:
    """What a priority is made of. The paper leaves the weights to the provider of the service.

    `memory` is for a replica that is all free, `request` is taken off for each request that it has, and `same_node`
    is added for a replica on the same node.
    """

    memory: float
    request: float
    same_node: float

    def workload(self, replica: Replica) -> float:
        """A replica's priority for an arrival: higher with more free memory and fewer requests."""
        return self.memory * replica.free / replica.capacity - self.request * len(replica.requests)

    def toward(self, replica: Replica, other: Replica) -> float:
        """The priority of `other` when `replica` looks for a partner of a move: nearer ones come first."""
        return self.workload(other) + (self.same_node if other.node == replica.node else 0.0)
