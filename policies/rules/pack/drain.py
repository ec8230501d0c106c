"""Emptying replicas, the cheapest first; where nodes have several replicas, machine by machine.

A machine is free when its last replica is. So a replica of the node with the fewest replicas is emptied first, and of
these the cheapest. If fewer replicas are emptied in this order than without regard to machines, that regard is dropped.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice

from policies.cluster.capacity import closable, replicas_by_machine
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica
from policies.cluster.search import roomiest
from policies.plan import Reason
from policies.rules.pack.room import Seeker, by_size


def drain(seeker: Seeker, most: int, victims: int, times: float) -> None:
    """Empty replicas one by one, each with at most `most` moves, moves that make room elsewhere included.

    Each time, the cheapest in moves of the `victims` least loaded replicas is emptied; with `Cluster.by_machine`, of
    those on the machines with the fewest replicas. At least `times` the slack stays free.
    """
    cluster, mark = seeker.cluster, seeker.cluster.decisions.mark()
    emptied = _drain(seeker, most, victims, times, by_machine=False)
    machines = len(replicas_by_machine(cluster))
    if not (cluster.by_machine and emptied and 1 < machines < len(cluster.replicas)):
        return
    cluster.decisions.undo(mark)
    if _drain(seeker, most, victims, times, by_machine=True) < emptied:
        cluster.decisions.undo(mark)
        _drain(seeker, most, victims, times, by_machine=False)


def _drain(seeker: Seeker, most: int, victims: int, times: float, *, by_machine: bool) -> int:
    """Empty replicas with or without regard to machines. Returns their number."""
    cluster = seeker.cluster
    idle = [r for r in cluster.hosts() if not r.requests]
    emptied: list[Replica] = []
    while (capacity := closable(cluster, [*idle, *emptied], times)) >= 0:
        staying = replicas_by_machine(cluster, [*idle, *emptied]) if by_machine else Counter[str]()
        if (victim := _cheapest(seeker, most, victims, capacity, staying)) is None:
            break
        _empty(seeker, victim, most)
        emptied.append(victim)
    return len(emptied)


def _cheapest(seeker: Seeker, most: int, victims: int, capacity: float, staying: Mapping[str, int]) -> Replica | None:
    """The replica with up to that capacity that takes the fewest moves to empty; found by trial and undo.

    Of replicas on nodes with different numbers of `staying` replicas, one with the smallest number.
    """
    decisions = seeker.cluster.decisions
    best = None
    for replica in list(islice(_candidates(seeker, most, capacity, staying), victims)):
        if best is not None and staying.get(replica.node, 0) > staying.get(best.node, 0):
            break
        if most < 1 or len(replica.requests) > most:
            continue
        mark = decisions.mark()
        if _empty(seeker, replica, most):
            best = replica
            most = decisions.mark() - mark - 1
        decisions.undo(mark)
    return best


def _candidates(seeker: Seeker, most: int, capacity: float, staying: Mapping[str, int]) -> Iterator[Replica]:
    """Replicas with up to that capacity and at most `most` requests, all movable, that fit into the total room of the
    others, or may share blocks there; those on nodes with the fewest `staying` replicas first, then the least loaded.
    """
    cluster = seeker.cluster
    few = (r for r in cluster.hosts() if 0 < len(r.requests) <= most and r.capacity <= capacity)
    for replica in sorted(few, key=lambda r: (staying.get(r.node, 0), r.load - cluster.prompts.saved(r.id), r.order)):
        movable = map(cluster.decisions.may_move, replica.requests.values())
        if (_fits_elsewhere(cluster, replica) or _may_share(replica)) and all(movable):
            yield replica


def _fits_elsewhere(cluster: Cluster, replica: Replica) -> bool:
    """True if the load is at most the total room of the other replicas in use; looks at few of them if it is."""
    left = replica.load
    for other in roomiest(cluster):
        if left <= 0 or other.room <= 0:
            break
        if other.requests and not other.apart and other is not replica:
            left -= other.room
    return left <= 0


def _may_share(replica: Replica) -> bool:
    """True if a request of the replica shares blocks with others of the pool."""
    return any(q.prompt is not None and q.prompt.is_shared for q in replica.requests.values())


def _empty(seeker: Seeker, victim: Replica, most: int) -> bool:
    """Move all requests away, the largest first. False if that takes more than `most` moves, or fails; the caller then
    undoes the moves made so far.
    """
    cluster, decisions = seeker.cluster, seeker.cluster.decisions
    mark = decisions.mark()
    left = len(victim.requests)
    for request in sorted(victim.requests.values(), key=by_size, reverse=True):
        target = seeker.find(request, victim)
        if target is None and not cluster.holds and decisions.mark() - mark + left < most:
            target = seeker.make(request, victim)
        if target is None or decisions.mark() - mark + left > most or not decisions.may_move(request):
            return False
        decisions.move(request, target, Reason.DRAIN)
        left -= 1
    return True
