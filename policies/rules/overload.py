"""The reaction of policies without migration to requests that outgrow their replica. The paper leaves it open."""

from collections.abc import Callable, Collection
from enum import StrEnum
from operator import attrgetter

from policies.cluster.capacity import overloaded
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.cluster.sizes import distinct_tokens, size_on

_IN_LINE = attrgetter("place_in_line")
TOKENS: Callable[[Request], int] = attrgetter("tokens")
"""The size of a request by itself."""


class Overload(StrEnum):
    """EVICT: the last requests in line give up their KV blocks and are prefilled again where there is room.

    STALL: the policy does nothing; the engine preempts requests, and they wait on their replica, as in vLLM.
    """

    EVICT = "evict"
    STALL = "stall"


def relief(cluster: Cluster, replica: Replica) -> Callable[[Request], int]:
    """The tokens by which the departure of one of a replica's requests reduces its strain.

    That is the KV that no other request there uses. If only steps are too slow, it is the whole context.
    """
    return TOKENS if replica.is_slow_alone else freeing(cluster)


def freeing(cluster: Cluster) -> Callable[[Request], int]:
    """The tokens of KV that the departure of a request frees on its replica: those that no other one there uses."""
    if not cluster.prompts.block_tokens:
        return TOKENS
    return lambda request: request.tokens if request.replica is None else size_on(cluster, request, request.replica)


def relieve(cluster: Cluster, rule: Overload) -> list[Request]:
    """Evict the requests that the rule selects, and return them."""
    if rule is Overload.STALL:
        return []
    evicted = [request for replica in overloaded(cluster) for request in victims(cluster, replica)]
    for request in evicted:
        cluster.decisions.evict(request)
    return evicted


def victims(cluster: Cluster, replica: Replica) -> list[Request]:
    """The movable requests last in line that together cure the overload, without those that turn out to be unnecessary.

    The order is vLLM's: without classes, the latest arrival is preempted first. Returns all movable requests if even
    these are too few.
    """
    chosen: list[Request] = []
    for request in sorted(filter(attrgetter("movable"), replica.requests.values()), key=_IN_LINE, reverse=True):
        if _freed(cluster, replica, chosen) >= replica.overload:
            break
        chosen.append(request)
    for request in reversed(chosen.copy()):
        others = [each for each in chosen if each is not request]
        if _freed(cluster, replica, others) >= replica.overload:
            chosen = others
    return chosen


def _freed(cluster: Cluster, replica: Replica, evicted: Collection[Request]) -> int:
    """The tokens that the eviction of these requests frees."""
    if not cluster.prompts.block_tokens:
        return sum(request.tokens for request in evicted)
    staying = (request for request in replica.requests.values() if request not in evicted)
    return distinct_tokens(cluster, replica.requests.values()) - distinct_tokens(cluster, staying)
