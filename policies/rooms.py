"""Replicas ordered by the room they have, so that best and worst fit need not look at all of them.

A sorted list, searched by bisection: at 10,000 replicas the insertion's memory move is still cheaper than a tree's
pointers. Whoever changes a replica says so with `touch`; its place in the list is corrected when somebody looks.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable

from policies.working import Replica

Entry = tuple[int, int, Replica]
"""A replica behind its room and its order of activation."""


class Rooms:
    """RUNNING replicas by (room, order of activation)."""

    __slots__ = ("_entries", "_known", "_touched")

    def __init__(self, replicas: Iterable[Replica]) -> None:
        self._entries: list[Entry] = sorted((replica.room, replica.order, replica) for replica in replicas)
        self._known = {replica: room for room, _, replica in self._entries}
        self._touched: dict[Replica, None] = {}

    def add(self, replica: Replica) -> None:
        """Put a replica in."""
        self._known[replica] = room = replica.room
        insort(self._entries, (room, replica.order, replica))

    def remove(self, replica: Replica) -> None:
        """Take a replica out, if it is in."""
        room = self._known.pop(replica, None)
        if room is not None:
            del self._entries[bisect_left(self._entries, (room, replica.order))]
            self._touched.pop(replica, None)

    def touch(self, replica: Replica) -> None:
        """Its room may have changed."""
        if replica in self._known:
            self._touched[replica] = None

    def tightest(self, need: int, accept: Callable[[Replica], bool] | None = None) -> Replica | None:
        """The replica with the least room that is at least `need` tokens; of equals the oldest."""
        entries = self._sorted()
        for index in range(bisect_left(entries, (need,)), len(entries)):
            replica = entries[index][2]
            if replica.accepts and (accept is None or accept(replica)):
                return replica
        return None

    def widest(self, need: int, accept: Callable[[Replica], bool] | None = None) -> Replica | None:
        """The replica with the most room, if that is at least `need` tokens; of equals the youngest."""
        for room, _, replica in reversed(self._sorted()):
            if room < need:
                return None
            if replica.accepts and (accept is None or accept(replica)):
                return replica
        return None

    def roomiest(self, count: int) -> list[Replica]:
        """Up to `count` replicas with the most room, that with the most first."""
        return [replica for _, _, replica in self._sorted()[: -count - 1 : -1]]

    def check_integrity(self, running: Iterable[Replica]) -> None:
        """Raise `AssertionError` unless it holds just these replicas, by the room that they have now."""
        assert self._sorted() == sorted((r.room, r.order, r) for r in running), "the order by room is stale"

    def _sorted(self) -> list[Entry]:
        """The entries, corrected."""
        if self._touched:
            for replica in self._touched:
                was, room = self._known[replica], replica.room
                if room != was:
                    del self._entries[bisect_left(self._entries, (was, replica.order))]
                    insort(self._entries, (room, replica.order, replica))
                    self._known[replica] = room
            self._touched.clear()
        return self._entries
