"""Replicas ordered by the room they have, so that best and worst fit need not look at all of them.

A sorted list, searched by bisection: at 10,000 replicas the insertion's memory move is still cheaper than a tree's
pointers. Whoever changes a replica says so with `touch`; its place in the list is corrected when somebody looks.

The list holds plain numbers, which compare several times faster than tuples: a replica's room above `_BITS` bits, its
order of activation in them.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable

from policies.cluster.replica import Replica

_BITS = 32
_ORDER = (1 << _BITS) - 1


def _key(replica: Replica) -> int:
    """Where the replica belongs: by its room, of equals by its order of activation."""
    return (replica.room << _BITS) + replica.order


class Rooms:
    """RUNNING replicas by (room, order of activation)."""

    __slots__ = ("_by_order", "_keys", "_known", "_touched")

    def __init__(self, replicas: Iterable[Replica]) -> None:
        self._known = {replica: _key(replica) for replica in replicas}
        self._keys = sorted(self._known.values())
        self._by_order = {replica.order: replica for replica in self._known}
        self._touched: dict[Replica, None] = {}

    def add(self, replica: Replica) -> None:
        """Put a replica in."""
        self._known[replica] = key = _key(replica)
        self._by_order[replica.order] = replica
        insort(self._keys, key)

    def remove(self, replica: Replica) -> None:
        """Take a replica out, if it is in."""
        key = self._known.pop(replica, None)
        if key is not None:
            del self._keys[bisect_left(self._keys, key)], self._by_order[replica.order]
            self._touched.pop(replica, None)

    def touch(self, replica: Replica) -> None:
        """Its room may have changed."""
        if replica in self._known:
            self._touched[replica] = None

    def tightest(self, need: int, accept: Callable[[Replica], object] | None = None) -> Replica | None:
        """The replica with the least room that is at least `need` tokens; of equals the oldest."""
        keys, by_order = self._sorted(), self._by_order
        for index in range(bisect_left(keys, need << _BITS), len(keys)):
            replica = by_order[keys[index] & _ORDER]
            if replica.accepts and (accept is None or accept(replica)):
                return replica
        return None

    def widest(self, need: int, accept: Callable[[Replica], object] | None = None) -> Replica | None:
        """The replica with the most room, if that is at least `need` tokens; of equals the youngest."""
        for key in reversed(self._sorted()):
            if key >> _BITS < need:
                return None
            replica = self._by_order[key & _ORDER]
            if replica.accepts and (accept is None or accept(replica)):
                return replica
        return None

    def roomiest(self, count: int) -> list[Replica]:
        """Up to `count` replicas with the most room, that with the most first."""
        return [self._by_order[key & _ORDER] for key in self._sorted()[: -count - 1 : -1]]

    def check_integrity(self, running: Iterable[Replica]) -> None:
        """Raise `AssertionError` unless it holds just these replicas, by the room that they have now."""
        found = [(key >> _BITS, key & _ORDER) for key in self._sorted()]
        assert found == sorted((r.room, r.order) for r in running), "the order by room is stale"

    def _sorted(self) -> list[int]:
        """The keys, corrected."""
        if self._touched:
            keys, known = self._keys, self._known
            for replica in self._touched:
                was, key = known[replica], _key(replica)
                if key != was:
                    del keys[bisect_left(keys, was)]
                    insort(keys, key)
                    known[replica] = key
            self._touched.clear()
        return self._keys
