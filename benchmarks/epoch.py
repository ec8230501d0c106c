"""The processor time of one epoch's decision, by size of the cluster: `python -m benchmarks.epoch`.

A synthetic cluster in a steady state: on average 20 requests on each of N replicas. In every epoch all sizes change;
one request in 20 arrives, ends or grows into another class. Only `decide_pool` is timed, which takes the observation,
decides, and compares the outcome with the beginning; moves take no time. Times are processor time: other processes on
the machine count only by their effect on its caches.

With `--pools P` there are P pools of N replicas each instead, whose number stays. Each node has N replicas of different
pools, which share its memory: in every epoch it is divided, and all replicas report new sizes. `decide` is timed.
"""

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from benchmarks.load import percentile
from policies.cluster.changes import Arrival
from policies.cluster.cluster import Cluster
from policies.decision.deciding import SchedulerMemory, decide, decide_pool
from policies.decision.limits import Limits, Terms, as_given
from policies.decision.memory import PoolMemory
from policies.decision.observation import Device, DeviceSeat, Observation, Pool, PoolReport, Resident, Status
from policies.memory.plan import ModelMemory
from policies.model import (
    SOLE_POOL,
    Blocks,
    Bytes,
    Phase,
    PoolId,
    ReplicaId,
    ReplicaState,
    RequestId,
    RequestLoad,
    Tokens,
)
from policies.plan import Plan

CAPACITY = Tokens(40_000)
BLOCK = 16
DOCUMENT = 40
"""The blocks of a document."""
PER_REPLICA = 20
DECODE_RATE = 25.0
SETTLING = 30


@dataclass(frozen=True, slots=True)
class DecisionSpeed:
    """Milliseconds of processor time per epoch, and the size of the cluster, of all pools, at the end of the run."""

    policy: str
    pools: int
    replicas: int
    requests: int
    epochs: int
    moves_per_epoch: float
    p50_ms: float
    p99_ms: float
    worst_ms: float


@dataclass(frozen=True, slots=True)
class LoadChanges:
    """Changes of a load within a second: new sizes, and requests that ended and arrived."""

    sizes: Mapping[RequestId, Tokens]
    departed: Sequence[RequestId]
    arrived: Sequence[Arrival]


class SyntheticLoad:
    """Requests that arrive, grow by one second of decoding per epoch and end, in constant number.

    With `documents`, every prompt that is long enough begins with one of them.
    """

    def __init__(self, requests: int, seed: int, documents: int = 0) -> None:
        self._random = random.Random(seed)
        self._documents = documents
        self._target = requests
        self._sizes: dict[RequestId, Tokens] = {}
        self._ends: dict[RequestId, int] = {}
        self._made = 0

    def epoch(self) -> LoadChanges:
        """The changes of the next second."""
        departed = [r for r, size in self._sizes.items() if size >= self._ends[r]]
        for request in departed:
            del self._sizes[request], self._ends[request]
        for request, size in self._sizes.items():
            self._sizes[request] = Tokens(size + round(DECODE_RATE))
        grown = dict(self._sizes)
        return LoadChanges(grown, departed, self._arrive(self._target - len(grown)))

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
        return Arrival(request, size, self._names(prompt // BLOCK) if self._documents else ())

    def _names(self, blocks: int) -> tuple[int, ...]:
        """The names of a prompt's blocks: those of a document, if it is long enough, and its own."""
        document, own = self._random.randrange(self._documents), self._documents + self._made
        begins = DOCUMENT if blocks > DOCUMENT else 0
        return tuple((document if block < begins else own) << 32 | block for block in range(blocks))


TERMS = Terms(
    limits=as_given(Limits()),
    moves_take_time=False,
    starts_take_time=False,
    may_wait_nowhere=True,
    decode_rate=DECODE_RATE,
)


class SyntheticReports:
    """Reports of replicas that carry plans out at once.

    Without `names` the plans open and close them; with names, there are these.
    """

    def __init__(self, pool: PoolId = SOLE_POOL, names: Collection[ReplicaId] = ()) -> None:
        count = len(names) or None
        self._pool = Pool(pool, CAPACITY, min_replicas=count or 0, max_replicas=count)
        self.resize(dict.fromkeys(names, CAPACITY))
        self._homes: dict[RequestId, ReplicaId | None] = {}
        self._changed: dict[RequestId, None] = {}
        self._closed: tuple[ReplicaId, ...] = ()

    def resize(self, capacities: Mapping[ReplicaId, Tokens]) -> None:
        """Have replicas report these capacities next."""
        self._opened = [
            Status(name, ReplicaState.RUNNING, "", capacity, nominal=CAPACITY) for name, capacity in capacities.items()
        ]

    def report(self, changes: LoadChanges) -> PoolReport:
        """The report of a second."""
        for request in changes.departed:
            self._changed.pop(request, None)
        sizes = {**changes.sizes, **{arrival.id: arrival.tokens for arrival in changes.arrived}}
        new = dict.fromkeys(arrival.id for arrival in changes.arrived)
        residents = tuple(self._resident(request, sizes[request]) for request in (*self._changed, *new))
        opened = tuple(self._opened)
        self._changed, self._opened = {}, []
        return PoolReport(self._pool, opened, self._closed, residents, tuple(changes.departed), changes.sizes)

    def carry_out(self, plan: Plan) -> None:
        """Apply the plan to the cluster."""
        for opening in plan.opened:
            self._opened.append(Status(opening.replica, ReplicaState.RUNNING, opening.node, CAPACITY))
        for move in plan.moves:
            self._homes[move.request] = move.target
            self._changed[move.request] = None
        for placement in plan.placements:
            self._homes[placement.request] = placement.replica
            self._changed[placement.request] = None
        self._closed = plan.closed

    def _resident(self, request: RequestId, tokens: Tokens) -> Resident:
        return Resident(self._homes.get(request), RequestLoad(request, "", tokens, Phase.DECODE, 0.0, 0))


def measure(spec: str, replicas: int, epochs: int, seed: int = 0) -> DecisionSpeed:
    """Run one policy on a cluster of about `replicas` replicas."""
    memory = PoolMemory(replace(TERMS, policy=spec))
    cluster = memory.cluster
    load, reports = SyntheticLoad(replicas * PER_REPLICA, seed), SyntheticReports()
    times, moves = [], 0
    for epoch in tqdm(range(SETTLING + epochs), desc=f"{spec}, {replicas} replicas", leave=False):
        report = reports.report(load.epoch())
        began = time.process_time()
        (plan,) = decide_pool(memory, report, float(epoch))
        if epoch >= SETTLING:
            times.append((time.process_time() - began) * 1e3)
            moves += len(plan.moves)
        reports.carry_out(plan)
    return _speed(spec, (cluster,), moves, times)


MODEL = ModelMemory(Bytes(0), Bytes(0), Bytes(0), Bytes(1 << 20), Blocks(400))
"""A block of 1 MiB; what a division does depends on blocks alone."""


def measure_pools(spec: str, count: int, replicas: int, epochs: int) -> DecisionSpeed:
    """Run one policy on `count` pools of `replicas` replicas each, whose nodes have `replicas` of them each.

    Requests fill three quarters of the nominal capacity, and a node has memory for that of all its replicas.
    """
    memory = SchedulerMemory(replace(TERMS, policy=spec))
    pools = {PoolId(f"p{p}"): [ReplicaId(f"p{p}-{number}") for number in range(replicas)] for p in range(count)}
    loads = [SyntheticLoad(replicas * PER_REPLICA * 3 // 4, seed) for seed in range(count)]
    reports = [SyntheticReports(pool, names) for pool, names in pools.items()]
    everybody = [name for names in zip(*pools.values(), strict=True) for name in names]
    blocks = dict.fromkeys(everybody, Blocks(CAPACITY // BLOCK))
    times, moves = [], 0
    for epoch in tqdm(range(SETTLING + epochs), desc=f"{spec}, {count} pools of {replicas}", leave=False):
        nodes = [everybody[first : first + replicas] for first in range(0, len(everybody), replicas)]
        devices = tuple(_device(str(number), names, blocks) for number, names in enumerate(nodes))
        seen = tuple(each.report(load.epoch()) for each, load in zip(reports, loads, strict=True))
        began = time.process_time()
        plans = decide(memory, Observation(float(epoch), seen, devices))
        took = time.process_time() - began
        blocks |= {size.replica: size.blocks for sizes in memory.division.newest.values() for size in sizes}
        for each, (pool, names) in zip(reports, pools.items(), strict=True):
            (plan,) = plans[pool]
            each.carry_out(plan)
            each.resize({name: Tokens(blocks[name] * BLOCK) for name in names})
            moves += len(plan.moves) if epoch >= SETTLING else 0
        if epoch >= SETTLING:
            times.append(took * 1e3)
    return _speed(spec, [memory.pool(pool).cluster for pool in pools], moves, times)


def _device(id: str, names: Sequence[ReplicaId], blocks: Mapping[ReplicaId, Blocks]) -> Device:
    nominal = Blocks(CAPACITY // BLOCK)
    seats = (DeviceSeat(name, 1.0, MODEL, BLOCK, Blocks(3 * nominal), blocks[name]) for name in names)
    return Device(id, Bytes(len(names) * nominal * MODEL.block), tuple(seats))


def _speed(spec: str, clusters: Sequence[Cluster], moves: int, times: Sequence[float]) -> DecisionSpeed:
    return DecisionSpeed(
        policy=spec,
        pools=len(clusters),
        replicas=sum(len(cluster.replicas) for cluster in clusters),
        requests=sum(len(cluster.requests) for cluster in clusters),
        epochs=len(times),
        moves_per_epoch=moves / len(times),
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
    parser.add_argument("--pools", type=int, help="pools of --replicas each, which share the memory of nodes")
    options = parser.parse_args(argv)
    gc.freeze()
    speeds = [
        measure(spec, n, options.epochs)
        if options.pools is None
        else measure_pools(spec, options.pools, n, options.epochs)
        for spec in options.policy or ["pack"]
        for n in options.replicas
    ]
    print(f"{'policy':24}{'pools':>6}{'replicas':>9}{'requests':>10}{'moves':>8}{'p50 ms':>9}{'p99 ms':>9}{'worst':>9}")
    for s in speeds:
        print(
            f"{s.policy:24}{s.pools:6}{s.replicas:9}{s.requests:10}{s.moves_per_epoch:8.1f}"
            f"{s.p50_ms:9.2f}{s.p99_ms:9.2f}{s.worst_ms:9.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(s) for s in speeds], indent=1) + "\n")


if __name__ == "__main__":
    main()
