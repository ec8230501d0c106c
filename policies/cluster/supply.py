"""Where new replicas come from, and how fast the demand for them rises."""

import heapq
from collections import deque

from policies.model import ReplicaId

WINDOW_S = 600.0
"""How long a rise is remembered. Longer holds replicas open for bursts of the past, shorter forgets the last one."""

_PREFIX = "gpu-"


class Supply:
    """Numbered slots on nodes, the lowest free one first: up to `limit` replicas, `per_node` on each node.

    A slot that is given back is used again.
    """

    def __init__(self, per_node: int = 8, limit: float | None = None) -> None:
        self._per_node = per_node
        self._limit = limit
        self._free: list[int] = []
        self._next = 0
        self._taken: dict[ReplicaId, int] = {}

    @property
    def left(self) -> float:
        """How many replicas may still be opened."""
        return float("inf") if self._limit is None else self._limit - len(self._taken)

    def allow(self, more: float) -> None:
        """So many more replicas may be opened."""
        self._limit = len(self._taken) + more

    def take(self) -> tuple[ReplicaId, str]:
        """The name and the node of a new replica. Raises `IndexError` when none is left."""
        if self.left <= 0:
            raise IndexError("every replica that is allowed is open")
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot, self._next = self._next, self._next + 1
        name = ReplicaId(f"{_PREFIX}{slot}")
        self._taken[name] = slot
        return name, f"node-{slot // self._per_node}"

    def claim(self, replica: ReplicaId) -> None:
        """A replica of that name is there: if it is in one of the slots, that is taken."""
        number = replica.removeprefix(_PREFIX)
        if replica in self._taken or number == replica or not number.isdigit():
            return
        slot = int(number)
        if slot >= self._next:
            for free in range(self._next, slot):
                heapq.heappush(self._free, free)
            self._next = slot + 1
        else:
            self._free.remove(slot)
            heapq.heapify(self._free)
        self._taken[replica] = slot

    def give_back(self, replica: ReplicaId) -> None:
        """That replica is closed; replicas that came from elsewhere are not kept."""
        slot = self._taken.pop(replica, None)
        if slot is not None:
            heapq.heappush(self._free, slot)


class Demand:
    """The tokens that all requests hold, over time; times in seconds of any monotonic clock."""

    def __init__(self) -> None:
        self._totals: deque[tuple[float, int]] = deque()
        self._rises: deque[tuple[float, int]] = deque()

    def observe(self, now: float, tokens: int, within_s: float) -> None:
        """Demand is `tokens` now; note how much more that is than at any time in the last `within_s` seconds."""
        self._totals.append((now, tokens))
        while self._totals[0][0] < now - within_s:
            self._totals.popleft()
        rise = tokens - min(total for _, total in self._totals)
        # Smaller rises before a larger one will never be the largest again.
        while self._rises and self._rises[-1][1] <= rise:
            self._rises.pop()
        self._rises.append((now, rise))
        while self._rises[0][0] < now - WINDOW_S:
            self._rises.popleft()

    @property
    def rise(self) -> int:
        """The largest rise within so many seconds that has been seen lately, in tokens."""
        return self._rises[0][1] if self._rises else 0
