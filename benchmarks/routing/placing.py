"""The processor time of one placement by content, by size of the cluster.

Every replica decodes `RUNNING` requests and has the blocks of as many documents as fill its cache; each document is in
the caches of `HOLDERS` replicas. An arrival is a document and some new tokens. Every hundred arrivals an epoch reports
the prompts as computed, and the requests as ended. Only `place` is timed: the match in the tree, the scores of all
replicas, copies between replicas included, the policy's choice, and the promises. Times are processor time.
"""

import gc
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.load import percentile
from policies.cluster.changes import Arrival
from policies.cost.service import ReplicaSpeed
from policies.cost.steps import StepCosts, proportional
from policies.decision.deciding import decide_pool, place
from policies.decision.limits import Terms
from policies.decision.memory import PoolMemory
from policies.decision.observation import Pool, PoolReport, Resident, Status
from policies.decision.placement import NoReplica
from policies.model import SOLE_POOL, Phase, ReplicaId, ReplicaState, RequestId, RequestLoad, Tokens
from policies.prefix.change import CacheChange, Tier
from policies.prefix.routing import Routing

BLOCK = 16
DOCUMENT = 256
"""Blocks of a document: 4,096 tokens."""
NEW = 16
"""Blocks of an arrival behind its document."""
RUNNING = 10
HOLDERS = 8
CAPACITY = Tokens(500_000)
_OWN = 1 << 60
"""The first name of a block that no document has."""
EPOCH = 100
"""Arrivals between two epochs."""


@dataclass(frozen=True, slots=True)
class PlacementSpeed:
    """Microseconds of processor time per placement, and the number of different blocks in the tree."""

    routing: Routing
    replicas: int
    blocks: int
    p50_us: float
    p99_us: float


def measure(routing: Routing, replicas: int, arrivals: int, documents: int = 60, seed: int = 0) -> PlacementSpeed:
    """Place arrivals on a cluster with `documents` documents per replica."""
    dice = random.Random(seed)
    ids = [ReplicaId(f"replica-{number}") for number in range(replicas)]
    texts = [range(n << 20, (n << 20) + DOCUMENT) for n in range(documents * replicas // HOLDERS)]
    caches: dict[ReplicaId, list[int]] = {replica: [] for replica in ids}
    for text in texts:
        for replica in dice.sample(ids, min(HOLDERS, replicas)):
            caches[replica] += text
    speed = ReplicaSpeed(StepCosts(proportional(5e-5), 0.005), 0.0, 2048)
    memory = PoolMemory(Terms(routing=routing, copies=True, speed=speed))
    running = [
        Resident(replica, RequestLoad(RequestId(f"{replica}-{n}"), "", Tokens(2000), Phase.DECODE, 0.0, 0))
        for replica in ids
        for n in range(RUNNING)
    ]
    pool = Pool(SOLE_POOL, capacity=CAPACITY, min_replicas=replicas, max_replicas=replicas)
    statuses = tuple(Status(replica, ReplicaState.RUNNING, "node", CAPACITY, BLOCK) for replica in ids)
    changes = {replica: CacheChange({Tier.HBM: tuple(names)}, {}, True) for replica, names in caches.items()}
    decide_pool(memory, PoolReport(pool, statuses, requests=tuple(running), caches=changes), 0.0)
    gc.collect()
    times: list[float] = []
    placed: list[tuple[Arrival, ReplicaId]] = []
    for number in range(arrivals):
        names = (*dice.choice(texts), *range(_OWN + number * NEW, _OWN + (number + 1) * NEW))
        arrival = Arrival(RequestId(f"r{number}"), Tokens(len(names) * BLOCK + 5), names)
        began = time.process_time()
        decision = place(memory, arrival, number / EPOCH)
        times.append(1e6 * (time.process_time() - began))
        assert not isinstance(decision, NoReplica)
        placed.append((arrival, decision.replica))
        if len(placed) == EPOCH:
            decide_pool(memory, _computed(pool, placed), (number + 1) / EPOCH)
            placed = []
    return PlacementSpeed(
        routing, replicas, memory.router.tree.copies()[0], percentile(times, 0.5), percentile(times, 0.99)
    )


def _computed(pool: Pool, placed: Sequence[tuple[Arrival, ReplicaId]]) -> PoolReport:
    """The report that these prompts are in their replicas' caches, and that their requests have ended."""
    stored: dict[ReplicaId, list[int]] = {}
    for arrival, replica in placed:
        stored.setdefault(replica, []).extend(arrival.names)
    load = [Resident(replica, RequestLoad(a.id, "", a.tokens, Phase.DECODE, 0.0, 0)) for a, replica in placed]
    return PoolReport(
        pool,
        requests=tuple(load),
        gone=tuple(arrival.id for arrival, _ in placed),
        caches={r: CacheChange({Tier.HBM: tuple(dict.fromkeys(names))}, {}, False) for r, names in stored.items()},
    )


def show_placements(sizes: Sequence[int], arrivals: int) -> None:
    """Measure clusters of these numbers of replicas, and print a table."""
    print(f"{'routing':<12}{'replicas':>9}{'blocks':>9}{'p50 us':>9}{'p99 us':>9}")
    for replicas in sizes:
        for routing in Routing.LEAST_LOAD, Routing.TREE:
            found = measure(routing, replicas, arrivals)
            print(f"{routing:<12}{replicas:>9}{found.blocks:>9,}{found.p50_us:>9.0f}{found.p99_us:>9.0f}")
