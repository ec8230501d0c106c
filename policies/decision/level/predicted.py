"""The times that clients should get, by the step times of their replicas: for comparison with those that they get.

A first token is predicted where its request is placed; the wait of a request that queues for KV blocks is not included.
Gaps between tokens are predicted by replica and epoch: a batch gets a token per request and step, and the prefill of
every placed prompt lengthens the steps of its replica's batch.
"""

from collections.abc import Iterable
from math import ceil

from policies.cluster.replica import Replica
from policies.cost.latencies import ServiceWindow
from policies.cost.steps import PrefillChunk


class PredictedTimes:
    """The predictions of the newest minutes, and the state of the replicas in the last epoch.

    `slowest_step_s` is the longest decoding step of all replicas, in seconds, and `late_replicas` counts those on which
    an arrival would wait for too long. Times are in seconds of any monotonic clock.
    """

    def __init__(self) -> None:
        self.window = ServiceWindow()
        self.slowest_step_s = 0.0
        self.late_replicas = 0
        self._at: float | None = None
        self._prefills_s = 0.0

    def add_arrival(self, replica: Replica, tokens: int, first_token_s: float, now: float) -> None:
        """Add a request that is on the replica since now, and has its first token after `first_token_s` seconds.

        The replica prefills `tokens` tokens of it. Without step times do nothing.
        """
        if replica.speed is None:
            return
        speed, batch, context = replica.speed.speed, len(replica.requests) - 1, replica.load - tokens
        # It also waits for the end of the step under way, for half a step on average.
        under_way_s = speed.costs.step_s(batch, context) / 2 if batch else 0.0
        self.window.ttft.add(under_way_s + first_token_s, now)
        size = max(1, min(speed.chunk_tokens or tokens, tokens))
        steps, step_s = ceil(tokens / size), speed.costs.step_s(batch, context, (PrefillChunk(size, 0),))
        self.window.itl.add(step_s, now, steps * batch)
        self._prefills_s += steps * step_s

    def add_epoch(self, replicas: Iterable[Replica], now: float) -> None:
        """Add the steps of running replicas since the last epoch, by their present batches."""
        passed_s = 0.0 if self._at is None else now - self._at
        found = [(r, r.speed, r.speed.speed.costs.step_s(len(r.requests), r.load)) for r in replicas if r.speed]
        decoding_s = max(0.0, passed_s * len(found) - self._prefills_s) / max(1, len(found))
        for replica, _, step_s in found:
            if replica.requests and decoding_s and step_s:
                self.window.itl.add(step_s, now, len(replica.requests) * decoding_s / step_s)
        self.slowest_step_s = max((step_s for replica, _, step_s in found if replica.requests), default=0.0)
        self.late_replicas = sum(not speed.is_in_time(len(r.requests), r.load, r.backlog) for r, speed, _ in found)
        self._at, self._prefills_s = now, 0.0
