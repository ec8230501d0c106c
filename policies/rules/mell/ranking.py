"""The paper's two priorities (section VI-C), and a ranking of replicas that finds the first one with enough room.

A replica has a priority for an arrival, and another one as the partner of a given replica in a move.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from policies.cluster.replica import Replica


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights in a priority. The paper leaves them to the provider of the service.

    `memory` is the priority of an entirely free replica, `request` the reduction for each of its requests, and
    `same_node` the bonus for a replica on the same node.
    """

    memory: float
    request: float
    same_node: float

    def workload(self, replica: Replica) -> float:
        """A replica's priority for an arrival: higher with more free memory and fewer requests."""
        return self.memory * replica.free / replica.capacity - self.request * len(replica.requests)

    def toward(self, replica: Replica, other: Replica) -> float:
        """The priority of `other` as the partner of `replica` in a move: replicas on the same node come first."""
        return self.workload(other) + (self.same_node if other.node == replica.node else 0.0)


@dataclass(slots=True)
class Ranking:
    """Replicas by score; of equal scores the older replica comes first.

    `best` searches from the top, where room is most likely. A search without result has visited all replicas, so it
    stores the largest room as `_ceiling`, an upper bound that ends the next such search at once.
    """

    _entries: list[tuple[float, int, int, Replica]] = field(default_factory=list)
    _ceiling: int = 0

    def add(self, replica: Replica, score: float, room: int) -> None:
        """Add a replica that is not in the ranking."""
        insort(self._entries, (score, -replica.order, room, replica))
        if room > self._ceiling:
            self._ceiling = room

    def remove(self, replica: Replica, score: float) -> None:
        """Remove a replica that was added with that score."""
        del self._entries[bisect_left(self._entries, (score, -replica.order))]

    def best(self, need: int, accept: Callable[[Replica], bool] | None = None) -> Replica | None:
        """The replica of the highest score with room for `need` tokens for which `accept` is true."""
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
