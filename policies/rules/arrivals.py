"""What the baselines share about requests that need a replica: oldest first, and when another replica is opened."""

from collections.abc import Callable, Iterable
from operator import attrgetter

from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.model import ReplicaState


class Openings:
    """Opens replicas within one epoch. What fits nowhere waits for a replica that is starting, if there is one with
    room that nothing else waits for yet; only then another is opened.

    Such a reservation lasts for the epoch: in the next one the request is as free as any to go where room is by then.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._reserved: dict[Replica, list[Request]] = {
            r: [] for r in cluster.replicas.values() if r.state is ReplicaState.STARTING
        }

    def replica_for(self, request: Request) -> Replica | None:
        """A replica opened for the request. None: it waits, for one that starts or because none is left."""
        if self._reserve(request):
            return None
        replica = self._cluster.open()
        if replica is not None and replica.state is ReplicaState.STARTING:
            self._reserved[replica] = [request]
            return None
        return replica

    def _reserve(self, request: Request) -> bool:
        for replica, reserved in self._reserved.items():
            room = replica.room - sum(q.tokens + self._cluster.headroom for q in reserved)
            if room >= self._cluster.need(request.tokens) and len(reserved) < replica.max_requests:
                reserved.append(request)
                return True
        return False


def admit(
    cluster: Cluster, requests: Iterable[Request], choose: Callable[[Request], Replica | None], openings: Openings
) -> None:
    """Place requests that wait, oldest first; what finds no room lets younger ones pass that do."""
    for request in sorted(requests, key=attrgetter("order")):
        replica = choose(request) or openings.replica_for(request)
        if replica is not None:
            cluster.place(request, replica)
