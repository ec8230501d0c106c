"""Replicas in the order of their priority, asked for the first one with enough room."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from policies.cluster.replica import Replica


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
