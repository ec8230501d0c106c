"""The paper's two priorities (section VI-C), and replicas ranked by them, to find the first one with enough room.

A replica has a priority for an arrival, and another one for a move from a given replica.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from policies.cluster.replica import Replica


@dataclass(frozen=True, slots=True)
class Weights:
    """What a priority is made of. The paper leaves the weights to the provider of the service.

    `memory` is for a replica that is all free, `request` is taken off for each request that it has, and `same_node`
    is added for a replica on the same node.
    """

    memory: float
    request: float
    same_node: float

    def workload(self, replica: Replica) -> float:
        """A replica's priority for an arrival: higher with more free memory and fewer requests."""
        return self.memory * replica.free / replica.capacity - self.request * len(replica.requests)

    def toward(self, replica: Replica, other: Replica) -> float:
        """The priority of `other` when `replica` looks for a partner of a move: nearer ones come first."""
        return self.workload(other) + (self.same_node if other.node == replica.node else 0.0)


@dataclass(slots=True)
class Ranking:
    """Replicas by score, the older one first where scores are equal.

    `best` looks from the top, where room is most likely. When nothing has the room it has seen them all: `_ceiling`
    keeps what it learnt, an upper bound of every room here, so that asking in vain again costs nothing.
    """

    _entries: list[tuple[float, int, int, Replica]] = field(default_factory=list)
    _ceiling: int = 0

    def add(self, replica: Replica, score: float, room: int) -> None:
        """Put in a replica that is not in."""
        insort(self._entries, (score, -replica.order, room, replica))
        if room > self._ceiling:
            self._ceiling = room

    def remove(self, replica: Replica, score: float) -> None:
        """Take out a replica that was put in with that score."""
        del self._entries[bisect_left(self._entries, (score, -replica.order))]

    def best(self, need: int, accept: Callable[[Replica], bool] | None = None) -> Replica | None:
        """The replica of the highest score among those with room for `need` tokens that `accept` agrees to."""
        if need > self._ceiling:
            return None
        most = 0
        for _, _, room, replica in reversed(self._entries):
            if room >= need and (accept is None or accept(replica)):
                return replica
            if room > most:
                most = room
        self._ceiling = most
        return None

    def __iter__(self) -> Iterator[Replica]:
        """Replicas, the highest score first."""
        return (entry[3] for entry in reversed(self._entries))
