"""The reaction of policies without migration to requests that outgrow their replica. The paper leaves it open."""

from enum import StrEnum
from operator import attrgetter

from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request

_IN_LINE = attrgetter("place_in_line")


class Overload(StrEnum):
    """EVICT: the last requests in line give up their KV blocks and are prefilled again where there is room.

    STALL: the policy does nothing; the engine preempts requests, and they wait on their replica, as in vLLM.
    """

    EVICT = "evict"
    STALL = "stall"


def relieve(cluster: Cluster, rule: Overload) -> list[Request]:
    """Evict the requests that the rule selects, and return them."""
    if rule is Overload.STALL:
        return []
    evicted = [request for replica in cluster.overloaded() for request in victims(replica)]
    for request in evicted:
        cluster.evict(request)
    return evicted


def victims(replica: Replica) -> list[Request]:
    """The movable requests last in line that together cure the overload, without those that turn out to be unnecessary.

    The order is vLLM's: without classes, the latest arrival is preempted first. Returns all movable requests if even
    these are too few.
    """
    over = replica.overload
    chosen: list[Request] = []
    for request in sorted(filter(attrgetter("movable"), replica.requests.values()), key=_IN_LINE, reverse=True):
        if over <= 0:
            break
        chosen.append(request)
        over -= request.tokens
    for request in reversed(chosen.copy()):
        if over + request.tokens <= 0:
            chosen.remove(request)
            over += request.tokens
    return chosen
