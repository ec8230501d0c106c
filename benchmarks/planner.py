"""The processor time of the live scheduler's decisions, by size of the cluster: `python -m benchmarks.planner`.

`benchmarks.epoch` times a decision on an observation. The live scheduler makes that of the replicas' reports, chooses
paths for moves, and places every arrival in between. Here the same synthetic load runs on N replicas that send their
changes, with the scheduler's roster and memory; every ordered move has ended by the next epoch. Times are processor
time, without the part of replicas, Ray and the network.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from benchmarks.epoch import CAPACITY, PER_REPLICA, SyntheticLoad, add_options
from policies.cluster.changes import Arrival
from policies.decision.deciding import decide_pool, place
from policies.decision.limits import Limits, LiveLimits, Terms
from policies.decision.memory import PoolMemory
from policies.decision.observation import Pool
from policies.decision.placement import Place, Queue
from policies.decision.reports import Report, Reporter, Roster
from policies.model import Blocks, Phase, ReplicaId, ReplicaLoad, ReplicaState, RequestId, RequestLoad, Tokens
from policies.plan import Move, MoveReport

BLOCK = 16
SPARE = 1.3
"""Replicas per replica that the load fills: the planner packs the load, and opens and closes no replica."""

LIMITS = LiveLimits(Limits(cooldown_s=5.0), linger_s=1e9, foresight_s=0.0)


@dataclass(frozen=True, slots=True)
class PlannerSpeed:
    """Milliseconds of processor time: of an epoch's halves, to observe and to decide, and of placing one arrival."""

    policy: str
    replicas: int
    requests: int
    epochs: int
    moves_per_epoch: float
    see_p50_ms: float
    see_worst_ms: float
    decide_p50_ms: float
    decide_worst_ms: float
    place_p50_ms: float
    place_worst_ms: float


class SyntheticReplicas:
    """N replicas that decode: their requests and their reports."""

    def __init__(self, count: int, snapshots: bool) -> None:
        self._snapshots = snapshots
        self._reporters: dict[ReplicaId, Reporter] = {}
        self._hosts: dict[ReplicaId, dict[RequestId, Tokens]] = {ReplicaId(f"r{n:05}"): {} for n in range(count)}
        self._homes: dict[RequestId, ReplicaId] = {}
        self._since: dict[RequestId, float] = {}

    def start(self, request: RequestId, tokens: Tokens, replica: ReplicaId, now: float) -> None:
        """Start a request on a replica."""
        self._hosts[replica][request] = tokens
        self._homes[request], self._since[request] = replica, now

    def end(self, request: RequestId) -> None:
        """End a request."""
        del self._hosts[self._homes.pop(request)][request], self._since[request]

    def grow(self, request: RequestId, tokens: Tokens) -> None:
        """Set the number of a request's tokens."""
        self._hosts[self._homes[request]][request] = tokens

    def move(self, move: Move) -> None:
        """Move a request to its target."""
        self._hosts[move.target][move.request] = self._hosts[move.source].pop(move.request)
        self._homes[move.request] = move.target

    def reports(self, now: float, roster: Roster) -> list[Report]:
        """The report of every replica: a snapshot, or its changes since the version that the roster has."""
        return [self._report(replica, now, roster) for replica in self._hosts]

    def _report(self, replica: ReplicaId, now: float, roster: Roster) -> Report:
        version = None if self._snapshots else roster.version(replica)
        return self._reporters.setdefault(replica, Reporter()).report(self._load(replica, now), version)

    def _load(self, replica: ReplicaId, now: float) -> ReplicaLoad:
        held = self._hosts[replica]
        used = sum(-(-tokens // BLOCK) for tokens in held.values())
        return ReplicaLoad(
            id=replica,
            state=ReplicaState.RUNNING,
            node=replica[:-1],
            capacity_tokens=CAPACITY,
            block_size=BLOCK,
            free_blocks=Blocks(max(0, CAPACITY // BLOCK - used)),
            max_requests=256,
            requests=tuple(RequestLoad(q, q, n, Phase.DECODE, now - self._since[q], 0) for q, n in held.items()),
            model="m",
        )


def measure(spec: str, count: int, epochs: int, snapshots: bool = False, seed: int = 0) -> PlannerSpeed:
    """Run the scheduler's decisions with one policy on `count` replicas; the load fills all but the spare ones."""
    memory, roster = PoolMemory(Terms(spec, LIMITS, placement_ttl_s=10.0)), Roster()
    replicas = SyntheticReplicas(count, snapshots)
    load = SyntheticLoad(int(count / SPARE) * PER_REPLICA, seed)
    seeing, deciding, placing, requests = [], [], [], 0
    made: list[tuple[Move, ...]] = [()]
    for number in tqdm(range(epochs + 1), desc=f"{spec}, {count} replicas", leave=False):
        now = float(number)
        changes = load.epoch()
        for request in changes.departed:
            replicas.end(request)
        for request, tokens in changes.sizes.items():
            replicas.grow(request, tokens)
        reports = replicas.reports(now, roster)
        ended = tuple(MoveReport(m.request, m.source, m.target, moved=True, took_s=0.5) for m in made[-1])
        began = time.process_time()
        for report in reports:
            roster.take(report)
        seen = roster.observe(Pool(max_replicas=count), ended)
        saw = time.process_time()
        (plan,) = decide_pool(memory, seen, now)
        done = time.process_time()
        spent = [_place(memory, replicas, arrival, now) for arrival in changes.arrived]
        for move in plan.moves:
            replicas.move(move)
        made.append(plan.moves)
        if number:  # The first epoch finds an empty cluster.
            seeing.append(saw - began)
            deciding.append(done - saw)
            placing += spent
            requests = len(changes.sizes)
    (see, see_worst), (decide, decide_worst), (put, put_worst) = map(_summary, (seeing, deciding, placing))
    moves = sum(map(len, made[2:])) / epochs
    return PlannerSpeed(spec, count, requests, epochs, moves, see, see_worst, decide, decide_worst, put, put_worst)


def _place(memory: PoolMemory, replicas: SyntheticReplicas, arrival: Arrival, now: float) -> float:
    """Place one arrival; the seconds it takes."""
    began = time.process_time()
    decision = place(memory, arrival, now)
    took = time.process_time() - began
    assert isinstance(decision, Place | Queue)
    replicas.start(arrival.id, arrival.tokens, decision.replica, now)
    return took


def _summary(seconds: Sequence[float]) -> tuple[float, float]:
    """Median and largest, in milliseconds."""
    return statistics.median(seconds) * 1e3, max(seconds) * 1e3


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write the figures to --json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description="Speed of the live planner.")
    add_options(parser, [10, 100, 1000], 30)
    parser.add_argument("--snapshots", action="store_true", help="reports hold all requests instead of changes")
    options = parser.parse_args(argv)
    gc.freeze()
    speeds = [
        measure(spec, n, options.epochs, options.snapshots)
        for spec in options.policy or ["pack"]
        for n in options.replicas
    ]
    print(f"{'':42}{'see, ms':>16}{'decide, ms':>16}{'place one, ms':>16}")
    print(f"{'policy':16}{'replicas':>9}{'requests':>10}{'moves':>7}" + f"{'p50':>8}{'worst':>8}" * 3)
    for s in speeds:
        print(
            f"{s.policy:16}{s.replicas:9}{s.requests:10}{s.moves_per_epoch:7.1f}"
            f"{s.see_p50_ms:8.2f}{s.see_worst_ms:8.2f}{s.decide_p50_ms:8.2f}{s.decide_worst_ms:8.2f}"
            f"{s.place_p50_ms:8.3f}{s.place_worst_ms:8.3f}"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(s) for s in speeds], indent=1) + "\n")


if __name__ == "__main__":
    main()
