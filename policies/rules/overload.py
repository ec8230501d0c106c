"""What a policy that does not migrate does when requests outgrow their replica. The paper leaves it open."""

from enum import StrEnum
from operator import attrgetter

from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request


class Overload(StrEnum):
    """EVICT: the youngest requests give up their KV blocks and are prefilled again where there is room.

    STALL: nothing is done; the engine preempts requests, and they wait on their replica, as in vLLM.
    """

    EVICT = "evict"
    STALL = "stall"


def relieve(cluster: Cluster, rule: Overload) -> list[Request]:
    """Evict what the rule demands, and return it."""
    if rule is Overload.STALL:
        return []
    evicted = [request for replica in cluster.overloaded() for request in victims(replica)]
    for request in evicted:
        cluster.evict(request)
    return evicted


def victims(replica: Replica) -> list[Request]:
    """The youngest requests that may leave, as many as cure the overload, and of those only the ones that it takes.

    The order is vLLM's: the last to come is preempted first. Where even all of them would not do, all are returned.
    """
    over = replica.overload
    chosen: list[Request] = []
    for request in sorted(filter(attrgetter("movable"), replica.requests.values()), key=lambda q: -q.order):
        if over <= 0:
            break
        chosen.append(request)
        over -= request.tokens
    for request in reversed(chosen.copy()):
        if over + request.tokens <= 0:
            chosen.remove(request)
            over += request.tokens
    return chosen
