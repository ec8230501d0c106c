"""A request's size on each replica, where the blocks that it shares with the requests there count once."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from policies.cluster.replica import Replica
from policies.model import ReplicaId


@dataclass(frozen=True, slots=True)
class Size:
    """`tokens`, of which a replica's other requests have as many as in `shared`, none if it is not there."""

    tokens: int
    shared: Mapping[ReplicaId, int] = field(default_factory=dict)

    def on(self, replica: Replica) -> int:
        """The tokens that a replica needs for it."""
        return self.tokens - self.shared.get(replica.id, 0)

    def plus(self, tokens: int) -> "Size":
        """The size of a request that is larger by some tokens of its own."""
        return Size(self.tokens + tokens, self.shared)

    def groups(self) -> Iterable[tuple[int, Collection[ReplicaId]]]:
        """The replicas that share equally many tokens, and this number, the largest first."""
        found: dict[int, dict[ReplicaId, None]] = {}
        for replica, shared in self.shared.items():
            found.setdefault(shared, {})[replica] = None
        return sorted(found.items(), reverse=True, key=lambda group: group[0])


def choose(replicas: Iterable[Replica], size: Size, widest: bool) -> Replica | None:
    """The best or, with `widest`, the worst fit for a size, among replicas with room for it.

    The best fit shares most, of equals it has the least room; the worst fit is left with the most room.
    """
    if widest:
        return max(replicas, key=lambda r: (r.room - size.on(r), r.order), default=None)
    return min(replicas, key=lambda r: (size.on(r), r.room, r.order), default=None)
