"""Where new replicas come from: numbered slots on nodes, the lowest free one first."""

import heapq

from policies.model import ReplicaId


class Supply:
    """Up to `limit` replicas, `per_node` on each node; a slot that is given back is used again."""

    def __init__(self, per_node: int = 8, limit: int | None = None) -> None:
        self._per_node = per_node
        self._limit = limit
        self._free: list[int] = []
        self._taken: dict[ReplicaId, int] = {}

    @property
    def left(self) -> float:
        """How many replicas may still be opened."""
        return float("inf") if self._limit is None else self._limit - len(self._taken)

    def take(self) -> tuple[ReplicaId, str]:
        """The name and the node of a new replica. Raises `IndexError` when none is left."""
        if self.left <= 0:
            raise IndexError("every replica that is allowed is open")
        slot = heapq.heappop(self._free) if self._free else len(self._taken)
        name = ReplicaId(f"gpu-{slot}")
        self._taken[name] = slot
        return name, f"node-{slot // self._per_node}"

    def give_back(self, replica: ReplicaId) -> None:
        """That replica is closed; replicas that came from elsewhere are not kept."""
        slot = self._taken.pop(replica, None)
        if slot is not None:
            heapq.heappush(self._free, slot)
