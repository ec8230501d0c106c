"""The processor time of one epoch's decision, by size of the cluster: `python -m benchmarks.epoch`.

A synthetic cluster in a steady state: on average 20 requests on each of N replicas. In every epoch all sizes change;
one request in 20 arrives, ends or grows into another class. Only `step` is timed, which stores the new sizes, decides,
and compares the outcome with the beginning. Times are processor time: other processes on the machine count only by
their effect on its caches.
"""

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from benchmarks.load import percentile
from policies.cluster.changes import Arrival
from policies.cluster.cluster import Cluster
from policies.decision.epoch import Events, headroom, step
from policies.decision.limits import Limits
from policies.model import RequestId, Tokens
from policies.rules.policy import Policy
from policies.rules.registry import policy as named

CAPACITY = Tokens(40_000)
PER_REPLICA = 20
DECODE_RATE = 25.0
SETTLING = 30


@dataclass(frozen=True, slots=True)
class DecisionSpeed:
    """Milliseconds of processor time per epoch, and the cluster's size at the end of the run."""

    policy: str
    replicas: int
    requests: int
    epochs: int
    moves_per_epoch: float
    p50_ms: float
    p99_ms: float
    worst_ms: float


class SyntheticLoad:
    """Requests that arrive, grow by one second of decoding per epoch and end, in constant number."""

    def __init__(self, requests: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._target = requests
        self._sizes: dict[RequestId, Tokens] = {}
        self._ends: dict[RequestId, int] = {}
        self._made = 0

    def epoch(self) -> Events:
        """The events of the next second."""
        departed = [r for r, size in self._sizes.items() if size >= self._ends[r]]
        for request in departed:
            del self._sizes[request], self._ends[request]
        for request, size in self._sizes.items():
            self._sizes[request] = Tokens(size + round(DECODE_RATE))
        grown = dict(self._sizes)
        return Events(sizes=grown, departed=departed, arrived=self._arrive(self._target - len(grown)))

    def _arrive(self, count: int) -> list[Arrival]:
        first = not self._sizes
        return [self._start(self._random.random() if first else 0.0) for _ in range(count)]

    def _start(self, done: float) -> Arrival:
        """A new request, with 2,000 tokens on average over its life; twenty of them fill a replica."""
        self._made += 1
        request = RequestId(f"r{self._made}")
        prompt = 1 + int(self._random.expovariate(1 / 1375)) % (CAPACITY // 2)
        output = 1 + int(self._random.expovariate(1 / 1250)) % (CAPACITY // 2)
        size = Tokens(prompt + int(done * output))
        self._sizes[request], self._ends[request] = size, prompt + output
        return Arrival(request, size)


def measure(spec: str, replicas: int, epochs: int, seed: int = 0) -> DecisionSpeed:
    """Run one policy on a cluster of about `replicas` replicas."""
    chosen: Policy = named(spec)
    limits = Limits()
    cluster = Cluster(CAPACITY)
    cluster.reserve(headroom(chosen, limits, DECODE_RATE))
    load = SyntheticLoad(replicas * PER_REPLICA, seed)
    times, moves = [], 0
    for epoch in tqdm(range(SETTLING + epochs), desc=f"{spec}, {replicas} replicas", leave=False):
        events = load.epoch()
        began = time.process_time()
        plan = step(cluster, events, chosen, limits, epoch)
        if epoch >= SETTLING:
            times.append((time.process_time() - began) * 1e3)
            moves += len(plan.moves)
    return DecisionSpeed(
        policy=spec,
        replicas=len(cluster.replicas),
        requests=len(cluster.requests),
        epochs=epochs,
        moves_per_epoch=moves / epochs,
        p50_ms=statistics.median(times),
        p99_ms=percentile(times, 0.99),
        worst_ms=max(times),
    )


def add_options(parser: argparse.ArgumentParser, replicas: Sequence[int], epochs: int) -> None:
    """Add the options for policies, cluster sizes and epochs, with these defaults."""
    parser.add_argument("--policy", action="append", help="name of a policy, may be repeated (default: pack)")
    parser.add_argument("--replicas", type=int, nargs="+", default=replicas)
    parser.add_argument("--epochs", type=int, default=epochs, help="number of timed epochs (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the figures")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write the figures to --json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.epoch", description="Speed of one epoch's decision.")
    add_options(parser, [10, 100, 1000, 10_000], 200)
    options = parser.parse_args(argv)
    gc.freeze()
    speeds = [measure(spec, n, options.epochs) for spec in options.policy or ["pack"] for n in options.replicas]
    print(f"{'policy':24}{'replicas':>9}{'requests':>10}{'moves':>8}{'p50 ms':>9}{'p99 ms':>9}{'worst':>9}")
    for s in speeds:
        print(
            f"{s.policy:24}{s.replicas:9}{s.requests:10}{s.moves_per_epoch:8.1f}"
            f"{s.p50_ms:9.2f}{s.p99_ms:9.2f}{s.worst_ms:9.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(s) for s in speeds], indent=1) + "\n")


if __name__ == "__main__":
    main()
