"""Load balancing by migration: MELL's baseline "LB" (section VIII-B), after Llumnix (OSDI '24).

Llumnix sends an arrival to the instance with the most room, pairs the most loaded instances with the least loaded
ones at intervals to even them out, and stops an instance when the average room exceeds a configured threshold.
Here a replica's load is the size of its requests once all moves are over, without Llumnix's division by batch size.
"""

from dataclasses import dataclass, field

from policies.cluster.capacity import is_starting, strained
from policies.cluster.changes import Changes
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.cluster.search import widest
from policies.cluster.sizes import size_of
from policies.plan import Reason
from policies.rules.arrivals import Openings, admit
from policies.rules.even import even_out, free_when_settled
from policies.rules.options import HEADROOM, about
from policies.rules.overload import relief
from policies.rules.policy import NONE, Barred, outside


@dataclass(frozen=True, slots=True)
class LoadBalance:
    """Each request goes to the emptiest replica; the fullest replicas pass requests to the emptiest ones.

    An epoch cures overloads, places waiting requests, moves one request off the replica that is being emptied, and
    one in each pair of a full and an empty replica. No replica is in two pairs.
    """

    knows_sharing = True

    headroom_s: float = field(default=0.0, metadata=about(HEADROOM, least=0))
    threshold: float = field(
        default=0.2,
        metadata=about(
            "The least reduction of the gap between two loads by a move, as a share of the capacity.", least=0
        ),
    )
    drain: bool = field(default=False, metadata=about("Empty the least loaded replica while there is room to spare."))
    spare: float = field(
        default=0.1, metadata=about("The mean free share of replicas above which one is emptied.", least=0, most=1)
    )

    def place(self, cluster: Cluster, request: Request, barred: Barred = NONE) -> Replica | None:
        """See `Policy.place`. With `drain` this looks at every replica; `rebalance` does so once for all arrivals."""
        leaving = self._leaving(cluster)
        others = barred if leaving is None else barred | {leaving.id}
        size = size_of(cluster, request)
        return widest(cluster, size, outside(others)) or widest(cluster, size, outside(barred))

    def rebalance(self, cluster: Cluster, changes: Changes) -> None:
        """See `Policy.rebalance`."""
        openings = Openings(cluster)
        leaving = self._leaving(cluster)
        for replica in strained(cluster):
            _cure(cluster, replica, leaving, openings)
        admit(cluster, changes.waiting, lambda request: _emptiest(cluster, request, leaving), openings)
        if leaving is not None:
            _empty(cluster, leaving)
        even_out(cluster, max(self.threshold * cluster.capacity, 1), leaving)

    def _leaving(self, cluster: Cluster) -> Replica | None:
        """The replica to empty: the least loaded one, while the mean free share of all replicas exceeds `spare`.

        A replica stays the least loaded while it is emptied, so the choice needs no memory.
        """
        running = cluster.hosts() if self.drain and not is_starting(cluster) else []
        free = sum(free_when_settled(r) for r in running)
        if free <= self.spare * sum(r.capacity for r in running):
            return None
        emptiable = (r for r in running if not any(q.pinned for q in r.requests.values()))
        return min(emptiable, key=lambda r: (r.load, -r.order), default=None)


def _emptiest(cluster: Cluster, request: Request, leaving: Replica | None) -> Replica | None:
    """The emptiest replica with room; the replica that is being emptied only if no other has room."""
    return _elsewhere(cluster, request, leaving) or widest(cluster, size_of(cluster, request))


def _elsewhere(cluster: Cluster, request: Request, leaving: Replica | None) -> Replica | None:
    return widest(cluster, size_of(cluster, request), lambda replica: replica is not leaving)


def _cure(cluster: Cluster, replica: Replica, leaving: Replica | None, openings: Openings) -> None:
    """Move the smallest request whose departure cures the overload; if there is none, the largest, and repeat.

    Requests of higher ranks stay while a lower one can move. A request that would have to wait for a replica to start
    stays, and the engine preempts until then.
    """
    decisions = cluster.decisions
    while replica.strain > 0:
        movable = list(filter(decisions.may_move, replica.requests.values()))
        movable.sort(key=lambda q: (q.rank, q.tokens, q.order))
        movable = [q for q in movable if q.rank == movable[0].rank]
        if not movable:
            return
        frees = relief(cluster, replica)
        request = next((q for q in movable if frees(q) + replica.lead >= replica.strain), movable[-1])
        target = _emptiest(cluster, request, leaving) or openings.replica_for(request)
        if target is None:
            return
        decisions.move(request, target, Reason.OVERLOAD)


def _empty(cluster: Cluster, leaving: Replica) -> None:
    """Move the largest request that fits elsewhere off the replica: one per epoch, like a pair of replicas."""
    movable = filter(cluster.decisions.may_move, leaving.requests.values())
    for request in sorted(movable, key=lambda q: (-q.tokens, q.order)):
        target = _elsewhere(cluster, request, leaving)
        if target is not None:
            cluster.decisions.move(request, target, Reason.DRAIN)
            return
