"""The cost of an epoch without decisions, a lower bound for `benchmarks.epoch`: `python -m benchmarks.floor`.

The load is that of `benchmarks.epoch`. In every epoch, the bare loop looks up each request that has a new size, stores
it, and adds the difference to its replica's load; `numpy` uses arrays, with a dictionary from request to row. `out` and
`in` remove ended requests from these dictionaries, and add arrived ones. No replica is chosen, nothing moves, and there
are no size classes, marks or plans. Times are milliseconds of processor time.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from benchmarks.epoch import DECODE_RATE, PER_REPLICA, SETTLING, LoadChanges, SyntheticLoad
from benchmarks.load import percentile
from policies.model import RequestId


class BareReplica:
    """A replica's requests, and the sum of their tokens."""

    __slots__ = ("load", "requests")

    def __init__(self) -> None:
        self.load = 0
        self.requests: dict[RequestId, BareRequest] = {}


class BareRequest:
    """A request's tokens and replica."""

    __slots__ = ("replica", "tokens")

    def __init__(self, replica: BareReplica, tokens: int) -> None:
        self.replica = replica
        self.tokens = tokens


class BareCluster:
    """A cluster without decisions: requests go to the replicas in turn."""

    def __init__(self, replicas: int, epochs: int) -> None:
        self._replicas = [BareReplica() for _ in range(replicas)]
        self._requests: dict[RequestId, BareRequest] = {}
        self._rows: dict[RequestId, int] = {}
        self._made = 0
        self._tokens = np.zeros(2 * replicas * PER_REPLICA + epochs * replicas * PER_REPLICA // int(DECODE_RATE), int)
        self._hosts = np.zeros_like(self._tokens)

    def steps(self, events: LoadChanges) -> dict[str, Callable[[], None]]:
        """The parts of an epoch, by name."""
        return {
            "out": lambda: self._out(events),
            "sizes": lambda: self._sizes(events),
            "sizes, numpy": lambda: self._sizes_by_array(events),
            "in": lambda: self._in(events),
        }

    def _out(self, events: LoadChanges) -> None:
        for request_id in events.departed:
            request = self._requests.pop(request_id)
            del self._rows[request_id]
            del request.replica.requests[request_id]
            request.replica.load -= request.tokens

    def _sizes(self, events: LoadChanges) -> None:
        requests = self._requests
        for request_id, tokens in events.sizes.items():
            request = requests[request_id]
            request.replica.load += tokens - request.tokens
            request.tokens = tokens

    def _sizes_by_array(self, events: LoadChanges) -> None:
        count = len(events.sizes)
        rows = np.fromiter(map(self._rows.__getitem__, events.sizes), int, count)
        self._tokens[rows] = np.fromiter(events.sizes.values(), int, count)
        np.bincount(self._hosts[rows], self._tokens[rows], len(self._replicas))

    def _in(self, events: LoadChanges) -> None:
        for arrival in events.arrived:
            row, index = self._made, self._made % len(self._replicas)
            self._made += 1
            replica = self._replicas[index]
            self._requests[arrival.id] = replica.requests[arrival.id] = BareRequest(replica, arrival.tokens)
            replica.load += arrival.tokens
            self._rows[arrival.id], self._hosts[row] = row, index


def measure(replicas: int, epochs: int, seed: int = 0) -> dict[str, list[float]]:
    """Milliseconds of each part of an epoch, for every epoch."""
    load, bare = SyntheticLoad(replicas * PER_REPLICA, seed), BareCluster(replicas, SETTLING + epochs)
    times: dict[str, list[float]] = {}
    for epoch in tqdm(range(SETTLING + epochs), desc=f"{replicas} replicas", leave=False):
        for name, act in bare.steps(load.epoch()).items():
            began = time.process_time()
            act()
            if epoch >= SETTLING:
                times.setdefault(name, []).append((time.process_time() - began) * 1e3)
    return times


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.floor", description="Cost of an epoch without decisions."
    )
    parser.add_argument("--replicas", type=int, default=1000, help="replicas with 20 requests each (default: 1000)")
    parser.add_argument("--epochs", type=int, default=200, help="number of timed epochs (default: 200)")
    options = parser.parse_args(argv)
    gc.freeze()
    print(f"{options.replicas * PER_REPLICA} requests{'':6}{'p50 ms':>9}{'p99 ms':>9}")
    for name, times in measure(options.replicas, options.epochs).items():
        print(f"{name:20}{statistics.median(times):9.2f}{percentile(times, 0.99):9.2f}")


if __name__ == "__main__":
    main()
