"""The search for room: the replicas on which a request fits, the tightest and the emptiest. Nothing here changes a
cluster.

A request fits where its size and its growth do: `needed_room`. Of the blocks that it shares with requests of a replica,
it needs no second copy there (`policies.cluster.sizes`).
"""

from collections.abc import Callable, Iterable, Iterator

from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.cluster.sizes import Size, choose, size_of, size_on

Accept = Callable[[Replica], object]
"""A filter: true for the replicas that a search considers."""


def needed_room(cluster: Cluster, tokens: int) -> int:
    """The room that a request of that size needs: its size and headroom, but no more than an empty replica has."""
    grown = tokens + cluster.conditions.headroom
    return grown if grown <= cluster.capacity else max(tokens, cluster.capacity)


def fits(cluster: Cluster, request: Request, replica: Replica) -> bool:
    """True if the replica accepts requests and has room for this one."""
    return replica.accepts and _has_room(cluster, replica, size_on(cluster, request, replica), request.tokens)


def fitting(cluster: Cluster, request: Request, replicas: Iterable[Replica]) -> Iterator[Replica]:
    """The replicas that accept requests and have room for this one, in the given order."""
    size = size_of(cluster, request)
    return (replica for replica in replicas if _takes(cluster, replica, size))


def tightest(cluster: Cluster, size: Size, accept: Accept | None = None) -> Replica | None:
    """Best fit: the replica with the least room in which a request of that size and its growth fit; of equals the
    oldest. Replicas that share more of it with others come first, however much room they have.

    Considers only replicas that accept requests and for which `accept` is true.
    """
    for found in _sharing(cluster, size, accept, False):
        return found
    return cluster.rooms().tightest(needed_room(cluster, size.tokens), accept)


def widest(cluster: Cluster, size: Size, accept: Accept | None = None) -> Replica | None:
    """Worst fit: the replica that is left with the most room, if a request of that size and its growth fit there;
    of equals the youngest.

    Considers only replicas that accept requests and for which `accept` is true.
    """
    found = cluster.rooms().widest(needed_room(cluster, size.tokens), accept)
    if size.prompt is None:
        return found
    sharing = list(_sharing(cluster, size, accept, True))
    return choose([*sharing, *([] if found is None else [found])], size, True)


def best_on_node(cluster: Cluster, node: str, size: Size, accept: Accept, emptiest: bool = False) -> Replica | None:
    """The best fit among the replicas of one node, or the worst fit with `emptiest`: see `tightest` and `widest`."""
    need = needed_room(cluster, size.tokens)
    on_node = cluster.rooms().on_node(node)
    if size.prompt is None:
        having_room = (r for r in on_node if r.accepts and r.room >= need and accept(r))
        return (max if emptiest else min)(having_room, key=lambda r: (r.room, r.order), default=None)
    return choose([r for r in on_node if _takes(cluster, r, size) and accept(r)], size, emptiest)


def roomiest(cluster: Cluster) -> Iterator[Replica]:
    """Running replicas in descending order of room, up to the cluster's next change."""
    return cluster.rooms().roomiest()


def _has_room(cluster: Cluster, replica: Replica, added: int, tokens: int) -> bool:
    """True if a replica has room for a request of `tokens` tokens that adds `added` ones to it."""
    if added == tokens:
        return replica.room >= needed_room(cluster, tokens)
    return replica.has_room(needed_room(cluster, added), needed_room(cluster, tokens))


def _takes(cluster: Cluster, replica: Replica, size: Size) -> bool:
    """True if a replica accepts requests and has room for one of that size."""
    return replica.accepts and _has_room(cluster, replica, size.on(replica), size.tokens)


def _sharing(cluster: Cluster, size: Size, accept: Accept | None, emptiest: bool) -> Iterator[Replica]:
    """The best replica with room of each of a size's groups, those first that share most."""

    def takes(replica: Replica) -> bool:
        return _takes(cluster, replica, size) and (accept is None or bool(accept(replica)))

    for shared, group in size.groups():
        if len(group) * len(group) <= len(cluster.replicas):
            replicas = [r for r in map(cluster.replicas.get, group) if r is not None and takes(r)]
            found = choose(replicas, size, emptiest)
        else:
            # Of a large group, the index finds one after a few looks.
            best = cluster.rooms().widest if emptiest else cluster.rooms().tightest
            found = best(needed_room(cluster, size.tokens - shared), takes, group)
        if found is not None:
            yield found
