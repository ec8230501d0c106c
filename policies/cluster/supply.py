"""The supply of new replicas, and the rises in demand that they have to meet."""

import heapq
from collections import deque

from policies.model import ReplicaId

WINDOW_S = 600.0
"""The time for which a rise counts. A longer one keeps replicas open for past bursts, a shorter one forgets them."""

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
        """The number of replicas that may still be opened."""
        return float("inf") if self._limit is None else self._limit - len(self._taken)

    def allow(self, more: float) -> None:
        """Allow `more` replicas to be opened."""
        self._limit = len(self._taken) + more

    def take(self) -> tuple[ReplicaId, str]:
        """The name and the node of a new replica. Raises `IndexError` if no slot is left."""
        if self.left <= 0:
            raise IndexError("the limit of replicas is reached")
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot, self._next = self._next, self._next + 1
        name = ReplicaId(f"{_PREFIX}{slot}")
        self._taken[name] = slot
        return name, f"node-{slot // self._per_node}"

    def claim(self, replica: ReplicaId) -> None:
        """Take the slot of a replica that exists already, if its name is that of a slot."""
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
        """Free the slot of a closed replica, if it has one."""
        slot = self._taken.pop(replica, None)
        if slot is not None:
            heapq.heappush(self._free, slot)


class RecentMaximum:
    """The largest of the values of the last seconds; times are in seconds of any monotonic clock."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, int]] = deque()

    def observe(self, now: float, value: int, within_s: float) -> None:
        """Add the value at `now`, and forget those of more than `within_s` seconds before."""
        # A smaller value before a larger one will never be the largest again.
        while self._values and self._values[-1][1] <= value:
            self._values.pop()
        self._values.append((now, value))
        while self._values[0][0] < now - within_s:
            self._values.popleft()

    @property
    def value(self) -> int:
        """The largest value; 0 before the first one."""
        return self._values[0][1] if self._values else 0


class Demand:
    """The total size of all requests over time; times are in seconds of any monotonic clock."""

    def __init__(self) -> None:
        self._totals: deque[tuple[float, int]] = deque()
        self._rises = RecentMaximum()

    def observe(self, now: float, tokens: int, within_s: float) -> None:
        """Add the demand at `now`, in tokens, and its rise above the minimum of the last `within_s` seconds."""
        self._totals.append((now, tokens))
        while self._totals[0][0] < now - within_s:
            self._totals.popleft()
        self._rises.observe(now, tokens - min(total for _, total in self._totals), WINDOW_S)

    @property
    def rise(self) -> int:
        """The largest rise within `within_s` seconds during the last `WINDOW_S`, in tokens."""
        return self._rises.value
