"""The probability with which demand may exceed its forecast, adapted to the share of late first tokens.

A fixed probability is right for one kind of traffic: where a queue that is short of room drains within the time that
requests may wait, few first tokens are late although demand often exceeds its forecast; where bursts come faster than
replicas start, each excess makes many late. So the probability follows what it causes, as in adaptive conformal
inference (Gibbs and Candès, NeurIPS 2021): it rises while first tokens are in time and falls with each late one, in
balance at the share `LATE`. It changes by factors, since a useful range spans several powers of ten.
"""

from collections.abc import Callable

from policies.cost.service import TAIL
from policies.model import RequestId

LATE = 0.003
"""The share of late first tokens at which the probability stays as it is. Late ones come in episodes, a few in an hour;
the rest of the level's 1 % is for an episode that is longer than those before it."""
DOUBLING_S = 300.0
"""The time in which the probability doubles without late first tokens, in seconds of mean traffic."""
LEAST, MOST = 0.0005, 0.5
"""The range of the probability: the past knows no smaller one, and the larger one is that of the middle forecast."""


class AdaptedRisk:
    """The probability `value` of one pool, at first the share of requests that a level leaves out.

    Times are in seconds of any monotonic clock.
    """

    def __init__(self) -> None:
        self.value = TAIL
        self.late: frozenset[RequestId] = frozenset()
        """The requests that still wait, though their first token is late: without a level of it, all that wait."""
        self._arrived = 0
        self._since: dict[RequestId, float] = {}
        """The arrival times of requests that have not been seen with a first token."""

    def arrived(self, request: RequestId, now: float) -> None:
        """Add an arrival. Another try of one has the time of the first."""
        if request not in self._since and request not in self.late:
            self._arrived += 1
            self._since[request] = now

    def observe(self, waits: Callable[[RequestId], bool], ttft_s: float | None, rate: float, now: float) -> None:
        """Adapt the probability in an epoch.

        A request that still `waits` for its first token is late after `ttft_s` seconds. `rate` is the present number of
        arrivals per second. Without a level of first tokens (None) the probability stays as it is.
        """
        waiting = {request: at for request, at in self._since.items() if waits(request)}
        late = [request for request, at in waiting.items() if ttft_s is None or now - at > ttft_s]
        for request in late:
            del waiting[request]
        self.late = frozenset(filter(waits, self.late)).union(late)
        new, self._arrived, self._since = self._arrived, 0, waiting
        if rate and ttft_s is not None:
            doublings = (new - len(late) / LATE) / rate / DOUBLING_S
            self.value = min(MOST, max(LEAST, self.value * 2.0 ** min(10.0, max(-1000.0, doublings))))
