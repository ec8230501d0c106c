"""Growth-aware packing: Mell's own policy."""

from dataclasses import dataclass, field

from policies.cluster.capacity import is_starting, may_close, strained
from policies.cluster.changes import Changes
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.cluster.search import tightest
from policies.cluster.sizes import size_of
from policies.model import ReplicaState
from policies.plan import Reason
from policies.rules.arrivals import Openings
from policies.rules.even import even_out
from policies.rules.options import HEADROOM, about
from policies.rules.overload import relief
from policies.rules.pack.drain import drain
from policies.rules.pack.room import Seeker, by_rank, largest_below, smallest
from policies.rules.policy import NONE, Barred, outside


@dataclass(frozen=True, slots=True)
class Pack:
    """Packs requests tightly, leaves room for their growth, and empties replicas that take few moves.

    1. Overload: the smallest request that cures it, of the lowest rank, moves to the tightest replica with comfortable
       room; then to one with tight room; then to a replica on which an exchange makes room; last to a new replica.
    2. Arrivals go the same way in the order of their turns, so that scarce room does not keep old requests waiting.
    3. Drain: replicas are emptied one by one as long as few moves are enough, exchanges included.

    With a slack, which real clusters need since new replicas take time to start, each request goes to the replica in
    use with the most room instead. Replicas are then emptied only if the room left exceeds the slack by the factor
    `plenty`, so that the next rise in demand does not open them again. Otherwise loads are evened out; not by a
    forecast, since steps are then as fast as the service level wants them without it.

    There are no size classes. At the same number of replicas this policy makes fewer moves than the paper's (section
    VI): no move keeps a class pure or refills a hole; each one cures an overload or frees a replica.
    """

    knows_sharing = True

    headroom_s: float = field(default=2.0, metadata=about(HEADROOM, least=0))
    comfort: float = field(
        default=0.9,
        metadata=about("The growth of all requests together that comfortable room allows for, in replicas.", least=0),
    )
    drain_moves: int = field(default=8, metadata=about("The most moves for emptying one replica.", least=0))
    rest: float = field(
        default=5.0,
        metadata=about("The least time that comfortable room lasts, as a multiple of a decision's lead.", least=0),
    )
    evenness: float = field(
        default=0.2,
        metadata=about(
            "The least reduction of the gap between two loads by a move, as a share of the capacity.", least=0
        ),
    )
    plenty: float = field(
        default=1.5,
        metadata=about("The room to be left after emptying a replica, as a multiple of the slack.", least=1),
    )
    victims: int = field(
        default=12, metadata=about("The number of replicas tried for emptying, the least loaded first.", least=1)
    )
    reach: int = field(
        default=8,
        metadata=about("The number of replicas, those with the most room, that an exchange may involve.", least=0),
    )
    near: bool = field(
        default=False,
        metadata=about("Prefer the same node for moves into tight room, too, and not only into comfortable room."),
    )

    def place(self, cluster: Cluster, request: Request, barred: Barred = NONE) -> Replica | None:
        """The best replica with comfortable room, else with tight room, else an empty one."""
        found = self._seeker(cluster, barred).find(request)
        return found or tightest(cluster, size_of(cluster, request), outside(barred))

    def rebalance(self, cluster: Cluster, changes: Changes) -> None:
        """Cure, admit, drain."""
        seeker = self._seeker(cluster)
        openings = Openings(cluster)
        for replica in strained(cluster):
            _cure(seeker, replica, openings)
        for request in cluster.in_order():
            target = seeker.find(request) or _make_or_open(seeker, request, openings)
            if target is not None:
                cluster.decisions.place(request, target)
        if may_close(cluster, times=self.plenty):
            if not is_starting(cluster):
                drain(seeker, self.drain_moves, self.victims, self.plenty)
        elif cluster.conditions.forecast is None:
            even_out(cluster, self.evenness * cluster.capacity)

    def _seeker(self, cluster: Cluster, barred: Barred = NONE) -> Seeker:
        """A seeker with the comfort for this cluster.

        Room for growth costs replicas in proportion to the number of requests. Rounding up to whole replicas leaves
        half of one free anyway, so comfort that adds up to about half a replica is cheap in a cluster of any size. If
        moves take time, comfort also lasts for `rest` times the lead, so that a moved request rests for a while.
        """
        requests = max(1, len(cluster.requests))
        growth = max(
            2 * cluster.conditions.headroom,
            self.comfort * cluster.capacity / requests,
            self.rest * cluster.conditions.lead,
        )
        comfort = round((growth - cluster.conditions.headroom) * requests / max(1, len(cluster.replicas)))
        unused = not may_close(cluster)
        return Seeker(
            cluster, comfort, self.reach, unused or cluster.conditions.slack > 0, unused, self.near, barred=barred
        )


def _cure(seeker: Seeker, replica: Replica, openings: Openings) -> None:
    """Move requests away until the rest fits: the smallest one that is enough, else several smaller ones.

    Requests of higher ranks stay as long as one of a lower rank fits elsewhere.
    """
    cluster = seeker.cluster
    while replica.strain > 0 and len(replica.requests) > 1:
        request, target = _leaving(seeker, replica)
        if request is None:
            return
        target = target or _make_or_open(seeker, request, openings, replica)
        if target is None or not cluster.decisions.may_move(request):
            return
        cluster.decisions.move(request, target, Reason.OVERLOAD)


def _leaving(seeker: Seeker, replica: Replica) -> tuple[Request | None, Replica | None]:
    """The request to move away and a replica with room for it; without such a replica, the first choice.

    If the smallest sufficient request of a rank fits nowhere, no larger one does.
    """
    first: Request | None = None
    need, frees = replica.strain - replica.lead, relief(seeker.cluster, replica)
    for requests in by_rank(seeker.cluster, replica):
        for find in (smallest, largest_below):
            request = find(seeker.cluster, requests, need, frees)
            if request is None:
                continue
            if (target := seeker.find(request, replica)) is not None:
                return request, target
            first = first or request
    return first, None


def _make_or_open(seeker: Seeker, request: Request, openings: Openings, avoid: Replica | None = None) -> Replica | None:
    """Room for a request that fits on no replica in use: by an exchange, else on an empty or a new replica."""
    cluster = seeker.cluster
    if not cluster.holds and (made := seeker.make(request, avoid)) is not None:
        return made
    empty = tightest(cluster, size_of(cluster, request), lambda replica: replica is not avoid)
    slow = cluster.holds and cluster.starts_as is ReplicaState.STARTING
    # Moves make room long before a new replica has started.
    if empty is None and slow:
        if seeker.promised(request, avoid):
            return None
        if (made := seeker.prepare(request, avoid)) is not None:
            return None if made in seeker.promises else made
    return empty or openings.replica_for(request)
