"""The prefills that wait on replicas, in seconds of work by prediction.

Every placement adds work to its replica, which does it in order. A request's work moves with it, and is over when the
request decodes, ends or is handed over; until then it is over by prediction after the work before it and its own. So
the wait of an arrival is the time to the predicted end of all work, and no more than the sum of the work that is not
over.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import fsum

from policies.model import ReplicaId, RequestId


@dataclass(slots=True)
class _PrefillQueue:
    """The work of one replica: its predicted end, the seconds of each request, and their sum, which is rounded once, so
    that it depends on no order.
    """

    ends_at: float = 0.0
    seconds: dict[RequestId, float] = field(default_factory=dict)
    total_s: float = 0.0


class PrefillQueues:
    """The queues of all replicas. Times are in seconds of the caller's clock."""

    def __init__(self) -> None:
        self._queues: dict[ReplicaId, _PrefillQueue] = {}
        self._homes: dict[RequestId, ReplicaId] = {}

    def add(self, request: RequestId, replica: ReplicaId, seconds: float, now: float) -> None:
        """Add the work of a request. Earlier work of the same request is over."""
        self.end(request)
        queue = self._queues.setdefault(replica, _PrefillQueue())
        queue.ends_at = max(now, queue.ends_at) + seconds
        queue.seconds[request] = seconds
        queue.total_s = fsum(queue.seconds.values())
        self._homes[request] = replica

    def end(self, request: RequestId) -> None:
        """End the work of a request, if it has any left."""
        replica = self._homes.pop(request, None)
        if replica is None:
            return
        queue = self._queues[replica]
        del queue.seconds[request]
        queue.total_s = fsum(queue.seconds.values())
        if not queue.seconds:
            del self._queues[replica]

    def move(self, request: RequestId, replica: ReplicaId, now: float) -> None:
        """Have another replica do the work of a request, if it has any left. A repeated call changes nothing."""
        home = self._homes.get(request)
        if home is not None and home != replica:
            self.add(request, replica, self._queues[home].seconds[request], now)

    def of(self, replica: ReplicaId) -> Iterable[RequestId]:
        """The requests whose work waits on a replica."""
        queue = self._queues.get(replica)
        return () if queue is None else queue.seconds.keys()

    def forget(self, replica: ReplicaId) -> None:
        """Remove a replica with its work."""
        queue = self._queues.pop(replica, None)
        for request in queue.seconds if queue is not None else ():
            del self._homes[request]

    def wait_s(self, replica: ReplicaId, now: float) -> float:
        """Seconds until the replica's work is over."""
        queue = self._queues.get(replica)
        return 0.0 if queue is None else max(0.0, min(queue.ends_at - now, queue.total_s))

    def waiting(self) -> Iterable[RequestId]:
        """The requests whose work is not over."""
        return self._homes.keys()
