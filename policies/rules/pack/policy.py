"""Growth-aware packing: Mell's own policy."""

from dataclasses import dataclass, field

from policies.cluster.changes import Changes
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.model import ReplicaState
from policies.plan import Reason
from policies.rules.arrivals import Openings
from policies.rules.even import even_out
from policies.rules.options import HEADROOM, about
from policies.rules.pack.drain import drain
from policies.rules.pack.room import Seeker, largest_below, smallest
from policies.rules.policy import NONE, Barred, outside


@dataclass(frozen=True, slots=True)
class Pack:
    """Keeps replicas full to the brim of what their requests will need next, and empties those it can.

    1. Overload: the smallest request that cures it moves to the tightest replica with comfortable room; then to one
       with tight room; then to where an exchange makes room; last to a new replica.
    2. Arrivals go the same way, the oldest first: where room is short, nobody is to wait for all that come later.
    3. Drain: replicas are emptied while one can be with few moves, exchanges included.

    Where room is kept free in all, as real clusters must while new replicas take their time to start, each request
    goes to the replica in use that has the most of it instead, and replicas are emptied only while there is plenty:
    as much more than is kept as it takes not to open them again when demand next rises. Otherwise loads are evened out.

    There are no size classes. What makes this cheaper than the paper's policy (section VI) at the same number of
    replicas: nothing moves to keep a class pure or to refill a hole, only to cure an overload or to free a replica.
    """

    headroom_s: float = field(default=2.0, metadata=about(HEADROOM, least=0))
    comfort: float = field(
        default=0.9,
        metadata=about("What comfortable room leaves all requests together for growth, in replicas.", least=0),
    )
    drain_moves: int = field(default=8, metadata=about("Most moves that emptying one replica may cost.", least=0))
    rest: float = field(
        default=5.0,
        metadata=about("For how many times the lead of a decision comfortable room lasts at least.", least=0),
    )
    evenness: float = field(
        default=0.2,
        metadata=about("By how much a move must even out loads, in replicas, where none is to be emptied.", least=0),
    )
    plenty: float = field(
        default=1.5,
        metadata=about("How many times the room that is kept free must be left when a replica is emptied.", least=1),
    )
    victims: int = field(default=12, metadata=about("How many replicas are tried, the least loaded first.", least=1))
    reach: int = field(
        default=8, metadata=about("How many replicas, those with the most room, an exchange may involve.", least=0)
    )
    near: bool = field(
        default=False,
        metadata=about("Whether a move stays on its node for tight room, too, and not only for comfortable room."),
    )

    def place(self, cluster: Cluster, request: Request, barred: Barred = NONE) -> Replica | None:
        """The best replica with comfortable room, else with tight room, else an empty one."""
        found = self._seeker(cluster, barred).find(request.tokens)
        return found or cluster.tightest(request.tokens, outside(barred))

    def rebalance(self, cluster: Cluster, changes: Changes) -> None:
        """Cure, admit, drain."""
        seeker = self._seeker(cluster)
        openings = Openings(cluster)
        for replica in cluster.strained():
            _cure(seeker, replica, openings)
        for request in cluster.in_order():
            target = seeker.find(request.tokens) or _make_or_open(seeker, request, openings)
            if target is not None:
                cluster.place(request, target)
        if cluster.may_close(times=self.plenty):
            if not cluster.is_starting():
                drain(seeker, self.drain_moves, self.victims, self.plenty)
        else:
            even_out(cluster, self.evenness * cluster.capacity)

    def _seeker(self, cluster: Cluster, barred: Barred = NONE) -> Seeker:
        """Growth kept free costs replicas in proportion to the number of requests. Rounding up to whole replicas leaves
        half of one free anyway, so comfort that adds up to about that is cheap in a cluster of any size. Where moves
        take time, it is also so much that a request which has moved rests for some times as long.
        """
        requests = max(1, len(cluster.requests))
        growth = max(2 * cluster.headroom, self.comfort * cluster.capacity / requests, self.rest * cluster.lead)
        comfort = round((growth - cluster.headroom) * requests / max(1, len(cluster.replicas)))
        unused = not cluster.may_close()
        return Seeker(cluster, comfort, self.reach, unused or cluster.slack > 0, unused, self.near, barred=barred)


def _cure(seeker: Seeker, replica: Replica, openings: Openings) -> None:
    """Move requests away until the rest fits: the smallest that is enough, or else several that are smaller."""
    cluster = seeker.cluster
    while replica.strain > 0 and len(replica.requests) > 1:
        need = replica.strain - replica.lead
        # The smallest that is enough: where it fits nowhere, no larger one does.
        request = smallest(cluster, replica, need)
        target = None if request is None else seeker.find(request.tokens, replica)
        if target is None and (less := largest_below(cluster, replica, need)) is not None:
            target = seeker.find(less.tokens, replica)
            request = less if target is not None else request or less
        if request is None:
            return
        target = target or _make_or_open(seeker, request, openings, replica)
        if target is None or not cluster.may_move(request):
            return
        cluster.move(request, target, Reason.OVERLOAD)


def _make_or_open(seeker: Seeker, request: Request, openings: Openings, avoid: Replica | None = None) -> Replica | None:
    """Room for a request that has none as things are: by an exchange, or else on an empty replica or a new one."""
    cluster = seeker.cluster
    if not cluster.holds and (made := seeker.make(request.tokens, avoid)) is not None:
        return made
    empty = cluster.tightest(request.tokens, lambda replica: replica is not avoid)
    slow = cluster.holds and cluster.starts_as is ReplicaState.STARTING
    # Room that moves are making is there long before a new replica is.
    if empty is None and slow and (seeker.promised(request.tokens, avoid) or seeker.prepare(request.tokens, avoid)):
        return None
    return empty or openings.replica_for(request)
