"""Admission in the baselines: waiting requests in their order, and the opening of replicas for them."""

from collections.abc import Callable, Iterable
from operator import attrgetter

from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.cluster.search import needed_room
from policies.cluster.sizes import distinct_tokens
from policies.model import ReplicaState


class Openings:
    """Opens replicas within one epoch. A request without room reserves room on a replica that is starting; only if
    none has unreserved room left, another replica is opened.

    A reservation lasts for the epoch: in the next one the request may go wherever there is room.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._reserved: dict[Replica, list[Request]] = {
            r: [] for r in cluster.replicas.values() if r.state is ReplicaState.STARTING
        }

    def replica_for(self, request: Request) -> Replica | None:
        """A new replica for the request. None: the request waits for a replica to start, or the supply is exhausted.

        By a forecast, a request that is not late opens none beside others: it is over before that has started.
        """
        cluster = self._cluster
        if self._reserve(request) or (cluster.up() and not cluster.conditions.opens_for_requests):
            return None
        replica = cluster.decisions.open()
        if replica is not None and replica.state is ReplicaState.STARTING:
            self._reserved[replica] = [request]
            return None
        return replica

    def _reserve(self, request: Request) -> bool:
        for replica, reserved in self._reserved.items():
            cluster = self._cluster
            used = distinct_tokens(cluster, reserved)
            size = distinct_tokens(cluster, [*reserved, request]) - used
            room = replica.room - used - len(reserved) * cluster.conditions.headroom
            if room >= needed_room(cluster, size) and len(reserved) < replica.max_requests:
                reserved.append(request)
                return True
        return False


def admit(
    cluster: Cluster, requests: Iterable[Request], choose: Callable[[Request], Replica | None], openings: Openings
) -> None:
    """Place waiting requests in their order. A request without room does not block later ones that have room."""
    for request in sorted(requests, key=attrgetter("place_in_line")):
        replica = choose(request) or openings.replica_for(request)
        if replica is not None:
            cluster.decisions.place(request, replica)
