"""The probability with which demand may exceed its forecast, adapted to the share of late first tokens.

A fixed probability is right for one kind of traffic: where a queue that is short of room drains within the time that
requests may wait, few first tokens are late although demand often exceeds its forecast; where bursts come faster than
replicas start, each excess makes many late. So the probability follows what it causes, as in adaptive conformal
inference (Gibbs and Candès, NeurIPS 2021): it rises with time and falls with each late first token, in balance at the
share `LATE`. It changes by factors, since a useful range spans several powers of ten.

Late first tokens at the beginning of a service teach nothing: see `YOUNG_STARTS`.
"""

from collections.abc import Callable

from policies.cost.service import TAIL
from policies.model import RequestId

LATE = 0.003
"""The share of late first tokens at which the probability stays as it is. Late ones come in episodes, a few in an hour;
the rest of the level's 1 % is for an episode that is longer than those before it."""
DOUBLING_S = 600.0
"""The time in which the probability doubles without late first tokens, in seconds."""
LEAST, MOST = 0.0005, 0.5
"""The range of the probability: that of the middle forecast is the largest."""
YOUNG_STARTS = 2
"""The age of a service, in starts of a replica, from which on its late first tokens count. The first start brings what
the first arrivals open, and the past of the first forecast; the replicas of that forecast serve after the second."""


class AdaptedRisk:
    """The probability `value` of one pool, at first the share of requests that a level leaves out.

    Times are in seconds of any monotonic clock.
    """

    def __init__(self) -> None:
        self.value = TAIL
        self.late: frozenset[RequestId] = frozenset()
        """The requests that still wait, though their first token is late: without a level of it, all that wait."""
        self._since: dict[RequestId, float] = {}
        """The arrival times of requests that have not been seen with a first token."""
        self._first_arrival: float | None = None
        self._adapted_at: float | None = None

    def arrived(self, request: RequestId, now: float) -> None:
        """Add an arrival. Another try of one has the time of the first."""
        if self._first_arrival is None:
            self._first_arrival = now
        if request not in self._since and request not in self.late:
            self._since[request] = now

    def observe(
        self, waits: Callable[[RequestId], bool], ttft_s: float | None, startup_s: float, rate: float, now: float
    ) -> None:
        """Adapt the probability in an epoch.

        A request that still `waits` for its first token is late after `ttft_s` seconds. A start takes `startup_s`
        seconds, and `rate` is the present number of arrivals per second. Without a level of first tokens (None), and
        without arrivals, the probability stays as it is.
        """
        waiting = {request: at for request, at in self._since.items() if waits(request)}
        late = {request: at for request, at in waiting.items() if ttft_s is None or now - at > ttft_s}
        self.late = frozenset(filter(waits, self.late)).union(late)
        self._since = {request: at for request, at in waiting.items() if request not in late}
        passed_s, self._adapted_at = 0.0 if self._adapted_at is None else now - self._adapted_at, now
        if not rate or ttft_s is None or self._first_arrival is None:
            return
        grown_up = self._first_arrival + YOUNG_STARTS * startup_s
        count = sum(at >= grown_up for at in late.values())
        doublings = (passed_s - count / LATE / rate) / DOUBLING_S
        self.value = min(MOST, max(LEAST, self.value * 2.0 ** min(10.0, max(-1000.0, doublings))))
