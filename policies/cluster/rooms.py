"""An index of replicas by room, so that best and worst fit need not look at all replicas.

The index is a sorted list, searched by bisection: at 10,000 replicas an insertion's memory move is still cheaper than
the pointers of a tree. `touch` marks a changed replica; the next query corrects its position in the list.

The list holds plain integers, which compare several times faster than tuples: the lowest `_BITS` bits are a replica's
order of activation, the bits above them its room.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

from policies.cluster.replica import Replica
from policies.model import ReplicaId

_BITS = 32
_ORDER = (1 << _BITS) - 1

_MANY = 16
"""The share of replicas, as 1 / n, from which on sorting all is cheaper than to insert each."""


def _key(replica: Replica) -> int:
    """The replica's sort key: by room, of equals by order of activation."""
    return (replica.room << _BITS) + replica.order


class Rooms:
    """RUNNING replicas by (room, order of activation)."""

    __slots__ = ("_by_order", "_key_of", "_keys", "_nodes", "_touched")

    def __init__(self, replicas: Iterable[Replica]) -> None:
        self._key_of = {replica: _key(replica) for replica in replicas}
        self._keys = sorted(self._key_of.values())
        self._by_order = {replica.order: replica for replica in self._key_of}
        self._touched: dict[Replica, None] = {}
        self._nodes: dict[str, list[Replica]] | None = None

    def add(self, replica: Replica) -> None:
        """Add a replica."""
        self._key_of[replica] = key = _key(replica)
        self._by_order[replica.order] = replica
        self._nodes = None
        insort(self._keys, key)

    def remove(self, replica: Replica) -> None:
        """Remove a replica, if it is in the index."""
        key = self._key_of.pop(replica, None)
        if key is not None:
            del self._keys[bisect_left(self._keys, key)], self._by_order[replica.order]
            self._touched.pop(replica, None)
            self._nodes = None

    def touch(self, replica: Replica) -> None:
        """Mark a replica whose room may have changed."""
        if replica in self._key_of:
            self._touched[replica] = None

    def tightest(
        self,
        need: int,
        accept: Callable[[Replica], object] | None = None,
        among: Container[ReplicaId] | None = None,
    ) -> Replica | None:
        """The replica with the least room that is at least `need` tokens; of equals the oldest. None: `among` all."""
        keys, by_order = self._sorted(), self._by_order
        for index in range(bisect_left(keys, need << _BITS), len(keys)):
            replica = by_order[keys[index] & _ORDER]
            if among is not None and replica.id not in among:
                continue
            if replica.accepts and (accept is None or accept(replica)):
                return replica
        return None

    def widest(
        self,
        need: int,
        accept: Callable[[Replica], object] | None = None,
        among: Container[ReplicaId] | None = None,
    ) -> Replica | None:
        """The replica with the most room, if that is at least `need` tokens; of equals the youngest. `among` is as in
        `tightest`.
        """
        for key in reversed(self._sorted()):
            if key >> _BITS < need:
                return None
            replica = self._by_order[key & _ORDER]
            if among is not None and replica.id not in among:
                continue
            if replica.accepts and (accept is None or accept(replica)):
                return replica
        return None

    def on_node(self, node: str) -> Sequence[Replica]:
        """The replicas on a node, in no particular order."""
        if self._nodes is None:
            self._nodes = {}
            for replica in self._key_of:
                self._nodes.setdefault(replica.node, []).append(replica)
        return self._nodes.get(node, ())

    def roomiest(self) -> Iterator[Replica]:
        """The replicas in descending order of room, up to the index's next change."""
        return (self._by_order[key & _ORDER] for key in reversed(self._sorted()))

    def check_integrity(self, running: Iterable[Replica]) -> None:
        """Raise `AssertionError` unless the index holds exactly these replicas by their current room."""
        found = [(key >> _BITS, key & _ORDER) for key in self._sorted()]
        assert found == sorted((r.room, r.order) for r in running), "the order by room is stale"

    def _sorted(self) -> list[int]:
        """The keys, after the correction of all touched replicas: of many at once by sorting anew."""
        if self._touched:
            keys, key_of = self._keys, self._key_of
            if len(self._touched) * _MANY > len(keys):
                key_of.update((replica, _key(replica)) for replica in self._touched)
                self._keys = sorted(key_of.values())
            else:
                for replica in self._touched:
                    was, key = key_of[replica], _key(replica)
                    if key != was:
                        del keys[bisect_left(keys, was)]
                        insort(keys, key)
                        key_of[replica] = key
            self._touched.clear()
        return self._keys
