"""The search for room: replicas on which a request fits, and small exchanges that make it fit.

Requests grow, so a replica that is filled to the last token is overloaded a moment later. So there are two grades of
room: *tight* room leaves every request the cluster's headroom for growth, *comfortable* room leaves more. Comfort saves
moves, tightness saves replicas. Comfortable room is used before tight room, and tight room before a replica is opened,
since a replica costs more than a move.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.cluster.search import best_on_node, fits, needed_room, roomiest, tightest, widest
from policies.cluster.sizes import Size, size_of, size_on
from policies.plan import Reason
from policies.rules.overload import TOKENS, freeing
from policies.rules.policy import NONE, Barred


@dataclass(frozen=True, slots=True)
class Seeker:
    """Looks for room in one cluster. `comfort` is the difference between comfortable and tight room, in tokens.

    An exchange involves only the `reach` replicas with the most room. Replicas with more than `crowd` requests are not
    searched for swaps: among that many requests a single move is enough.

    With `spread` the replica with the most room is the best: with a slack, spreading the free room costs no replica,
    and smaller batches decode faster. With `unused` empty replicas are candidates, too, since none of them may close.

    A replica that requests are leaving is no candidate: it is overloaded, or is being emptied, so what goes there would
    have to leave again.

    With `near` a move prefers its own node even if room on another node fits better, unless only the other node's room
    is comfortable.

    If moves take time, the room that a move makes is there when the move is over. `promises` reserves it until then,
    in tokens by replica. `find` never returns a `barred` replica.
    """

    cluster: Cluster
    comfort: int
    reach: int
    spread: bool = False
    unused: bool = False
    near: bool = False
    crowd: int = 12
    promises: dict[Replica, int] = field(default_factory=dict)
    barred: Barred = NONE

    def find(self, request: Request, leaves: Replica | None = None) -> Replica | None:
        """The best replica in use with comfortable room for a request; if there is none, with tight room.

        For a request that `leaves` a replica, if moves take time, comfortable room on the same node comes before other
        comfortable room, and with `near` tight room on the same node before other tight room.
        """
        size = size_of(self.cluster, request)
        return self._choose(size.plus(self.comfort), leaves, near=True) or self._choose(size, leaves, near=self.near)

    def _choose(
        self, size: Size, leaves: Replica | None, avoid: Replica | None = None, *, near: bool
    ) -> Replica | None:
        """The best replica for a request that `leaves` one; with `near`, if moves take time, first on its own node."""

        def accept(replica: Replica) -> bool:
            return self._accepts(replica) and replica is not leaves and replica is not avoid

        if near and leaves is not None and self.cluster.holds:
            found = best_on_node(self.cluster, leaves.node, size, accept, emptiest=self.spread)
            if found is not None:
                return found
        best = widest if self.spread else tightest
        return best(self.cluster, size, accept)

    def _accepts(self, replica: Replica) -> bool:
        is_used = self.unused or bool(replica.requests)
        return is_used and not replica.held and replica.id not in self.barred

    def make(self, request: Request, avoid: Replica | None = None) -> Replica | None:
        """A replica on which one move, or else one swap of two requests, has just made room for a request.

        Only for instantaneous moves: a swap needs room on both sides at once.
        """
        hosts = self._hosts(avoid)
        return self._by_a_move(request, hosts, avoid) or self._by_a_swap(request, hosts)

    def prepare(self, request: Request, avoid: Replica | None = None) -> Replica | None:
        """The replica on which one move will make room for a request. None if no move does.

        It is promised to the request, unless it is there at once, since what moves was placed in this epoch.
        """
        host = self._by_a_move(request, self._hosts(avoid), avoid)
        if host is not None and (host in self.promises or not fits(self.cluster, request, host)):
            self._promise(host, request)
        return host

    def promised(self, request: Request, avoid: Replica | None = None) -> bool:
        """Promise room that moves under way will make and that is not promised yet. False if there is not enough."""
        cluster = self.cluster
        for replica in cluster.hosts():
            room = replica.later_room - self.promises.get(replica, 0)
            if replica is avoid or not replica.held:
                continue
            if room >= needed_room(cluster, size_on(cluster, request, replica)):
                self._promise(replica, request)
                return True
        return False

    def _promise(self, replica: Replica, request: Request) -> None:
        tokens = size_on(self.cluster, request, replica)
        self.promises[replica] = self.promises.get(replica, 0) + tokens + self.cluster.conditions.headroom

    def _hosts(self, avoid: Replica | None) -> list[Replica]:
        return [r for r in islice(roomiest(self.cluster), self.reach) if r.accepts and r.requests and r is not avoid]

    def _by_a_move(self, newcomer: Request, hosts: list[Replica], avoid: Replica | None) -> Replica | None:
        """Move the smallest request away whose departure makes the room, if it fits elsewhere. Returns its replica.

        A request of a lower rank comes before those of higher ones.
        """
        cluster = self.cluster
        shares = cluster.prompts.block_tokens > 0
        others = list(islice(roomiest(cluster), 3))
        size = size_of(cluster, newcomer)
        for host in hosts:
            # A request that leaves takes its headroom along.
            lack = needed_room(cluster, size.on(host)) - host.room - cluster.conditions.headroom
            # A cheap test first: on most hosts, no request is both large enough and fits into the widest other room.
            elsewhere = next((r.room for r in others if r is not host and r is not avoid), 0)
            if needed_room(cluster, lack) > elsewhere and not shares:
                continue
            for same_rank in by_rank(cluster, host):
                request = smallest(cluster, same_rank, lack, freeing(cluster))
                if request is None or (not shares and needed_room(cluster, request.tokens) > elsewhere):
                    continue
                # If the smallest sufficient request fits nowhere, no larger one of its rank does.
                target = self._choose(size_of(cluster, request), host, avoid, near=self.near)
                if target is not None and self._moves(((request, target),), newcomer, host):
                    return host
        return None

    def _by_a_swap(self, newcomer: Request, hosts: list[Replica]) -> Replica | None:
        """Swap the smallest pair of requests that makes the room; every replica keeps its number of requests.

        Requests that share blocks with others stay.
        """
        cluster = self.cluster
        size = size_of(cluster, newcomer)
        candidates = {r: _alone(r.requests.values()) for r in hosts if len(r.requests) <= self.crowd}
        best: tuple[int, Request, Request, Replica, Replica] | None = None
        for host, here in candidates.items():
            lack = needed_room(cluster, size.on(host)) - host.room
            for large in here:
                if large.tokens < lack or not cluster.decisions.may_move(large):
                    continue
                for other, there in candidates.items():
                    least = large.tokens - other.room
                    for small in there if other is not host else ():
                        weight = large.tokens + small.tokens
                        if (
                            least <= small.tokens <= large.tokens - lack
                            and (best is None or weight < best[0])
                            and cluster.decisions.may_move(small)
                        ):
                            best = (weight, large, small, host, other)
        if best is None or cluster.decisions.moves_left < 2:
            return None
        _, large, small, host, other = best
        return host if self._moves(((small, host), (large, other)), newcomer, host) else None

    def _moves(self, moves: Sequence[tuple[Request, Replica]], newcomer: Request, host: Replica) -> bool:
        """Make room on a host for a request by moves, of several as one unit.

        False, and nothing is moved, if these leave no room: what leaves may be what a request would have shared.
        """
        cluster, decisions = self.cluster, self.cluster.decisions
        mark = decisions.mark()
        unit = decisions.unit() if len(moves) > 1 else None
        for request, target in moves:
            decisions.move(request, target, Reason.MAKE_ROOM, unit)
        if cluster.holds or newcomer.prompt is None or fits(cluster, newcomer, host):
            return True
        decisions.undo(mark)
        return False


def _alone(requests: Collection[Request]) -> Collection[Request]:
    """The requests that share no blocks with others of the pool."""
    return [request for request in requests if request.prompt is None or not request.prompt.is_shared]


def by_rank(cluster: Cluster, replica: Replica) -> Iterator[Collection[Request]]:
    """The replica's requests by rank, the lowest first."""
    requests = replica.requests.values()
    if not cluster.has_ranks:
        yield requests
        return
    for rank in sorted({request.rank for request in requests}):
        yield [request for request in requests if request.rank == rank]


def smallest(
    cluster: Cluster, requests: Iterable[Request], tokens: int, frees: Callable[[Request], int] = TOKENS
) -> Request | None:
    """The smallest movable request of at least `tokens` tokens; of equals the oldest.

    A request counts for what its departure `frees`. An inner loop of every decision, like `largest_below`; so the
    expensive check, `may_move`, comes last.
    """
    best: Request | None = None
    least: float = inf
    for request in requests:
        size = frees(request)
        if (
            tokens <= size <= least
            and (size < least or best is None or request.order < best.order)
            and cluster.decisions.may_move(request)
        ):
            best, least = request, size
    return best


def largest_below(
    cluster: Cluster, requests: Iterable[Request], tokens: int, frees: Callable[[Request], int] = TOKENS
) -> Request | None:
    """The largest movable request of fewer than `tokens` tokens; of equals the youngest. Sizes are as in `smallest`."""
    best: Request | None = None
    most: float = -inf
    for request in requests:
        size = frees(request)
        if (
            most <= size < tokens
            and (size > most or best is None or request.order > best.order)
            and cluster.decisions.may_move(request)
        ):
            best, most = request, size
    return best


def by_size(request: Request) -> tuple[int, int]:
    """A sort key: the smallest first, of equals the oldest."""
    return (request.tokens, request.order)
