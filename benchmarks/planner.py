"""The processor time of the live scheduler's decisions, by size of the cluster: `python -m benchmarks.planner`.

`benchmarks.epoch` times a decision on an observation. The live scheduler makes that of the replicas' reports, chooses
paths for moves, and places every arrival in between. Here the same synthetic load runs on N replicas that report their
changes; every ordered move has ended by the next epoch. First the parts of an epoch are timed, one after the other.
Then the live loop runs, with its gatherer, roster, memory and dispatch: reports are decoded as they arrive, and a
request is placed in every turn of the event loop. The time from the end of one placement to the end of the next is the
longest that a request can have waited for its turn and its placement.

With `--documents`, prompts share blocks, and sizes are marginal.

Times are processor time, without the part of replicas, Ray and the network. The first two epochs fill the cluster and
are not counted.
"""

import argparse
import asyncio
import gc
import json
import statistics
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass

import msgspec
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from benchmarks.epoch import BLOCK, CAPACITY, PER_REPLICA, LoadChanges, SyntheticLoad, add_options
from deployments.api.calls import MoveAccepted, MoveAnswer, PlaceCall
from deployments.api.protocols import CONTROL_METHODS
from deployments.api.report import Gauges, ReplicaReport
from deployments.config import SchedulerConfig
from deployments.metrics.telemetry import Telemetry
from deployments.processes.heap import YOUNG_IN_PERIODS, freeze_heap
from deployments.replica.reporting import ReplicaReporter
from deployments.scheduler.dispatch import Dispatch
from deployments.scheduler.epochs import Epochs
from deployments.scheduler.gatherer import Gatherer
from deployments.scheduler.pool import LivePool
from deployments.scheduler.records import Records
from deployments.scheduler.sleepers import Sleeping
from migration.protocol.record import MigrationRecord, Outcome
from migration.run.source import Order
from policies.cluster.changes import Arrival
from policies.decision.deciding import SchedulerMemory, decide_pool, place
from policies.decision.limits import Limits, LiveLimits, Sizes, Terms
from policies.decision.memory import PoolMemory
from policies.decision.observation import Pool, Status
from policies.decision.placement import Place, Queue
from policies.decision.reports import Roster
from policies.model import (
    SOLE_POOL,
    Blocks,
    Phase,
    ReplicaId,
    ReplicaLoad,
    ReplicaState,
    RequestId,
    RequestLoad,
    Tokens,
)
from policies.plan import Move, MoveReport, Path
from policies.prefix.sharing import ActivePrompt, ActivePrompts

SPARE = 1.3
"""Replicas per replica that the load fills: the planner packs the load, and opens and closes no replica."""

FILLING = 2
"""The number of epochs before the first that is counted: the cluster is empty, then all of its requests are new."""

REMEMBERED = 256
"""Ended migrations that a replica remembers, as in `deployments.replica.moves`."""

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


@dataclass(frozen=True, slots=True)
class LiveSpeed:
    """Milliseconds of processor time: of an epoch of the live loop, of the longest waits for a placement in it, and of
    the collection of garbage after it (`deployments.processes.heap`).
    """

    policy: str
    replicas: int
    requests: int
    epochs: int
    epoch_p50_ms: float
    epoch_worst_ms: float
    wait_p50_ms: float
    wait_worst_ms: float
    freeze_p50_ms: float
    freeze_worst_ms: float


class SyntheticReplicas:
    """N replicas that decode: their requests, their migrations and their reports."""

    def __init__(self, count: int, snapshots: bool) -> None:
        self._snapshots = snapshots
        self._reporters: dict[ReplicaId, ReplicaReporter] = {}
        self._hosts: dict[ReplicaId, dict[RequestId, Tokens]] = {ReplicaId(f"r{n:05}"): {} for n in range(count)}
        self._homes: dict[RequestId, ReplicaId] = {}
        self._since: dict[RequestId, float] = {}
        self._records: dict[ReplicaId, list[MigrationRecord]] = {}
        self._shared = ActivePrompts(BLOCK)
        self._prompts: dict[RequestId, ActivePrompt] = {}

    def start(self, arrival: Arrival, replica: ReplicaId, now: float) -> None:
        """Start a request on a replica."""
        request = arrival.id
        self._hosts[replica][request] = arrival.tokens
        self._homes[request], self._since[request] = replica, now
        prompt = self._shared.begin(arrival.names, arrival.tokens)
        if prompt is not None:
            self._prompts[request] = prompt
            self._shared.enter(prompt, replica)

    def apply(self, changes: LoadChanges) -> None:
        """End and resize requests."""
        for request in changes.departed:
            home, prompt = self._homes.pop(request), self._prompts.pop(request, None)
            del self._hosts[home][request], self._since[request]
            if prompt is not None:
                self._shared.leave(prompt, home)
                self._shared.end(prompt)
        for request, tokens in changes.sizes.items():
            self._hosts[self._homes[request]][request] = tokens

    def move(self, record: MigrationRecord) -> None:
        """Move a request to its target. Its record is part of the source's reports from then on."""
        request = record.request_id
        if self._homes.get(request) == record.source:
            self._hosts[record.target][request] = self._hosts[record.source].pop(request)
            self._homes[request] = record.target
            if (prompt := self._prompts.get(request)) is not None:
                self._shared.leave(prompt, record.source)
                self._shared.enter(prompt, record.target)
        self._records.setdefault(record.source, []).insert(0, record)

    def reports(self, now: float, roster: Roster) -> dict[ReplicaId, ReplicaReport]:
        """The report of every replica: a snapshot, or its changes since the version that the roster has."""
        return {replica: self._report(replica, now, roster) for replica in self._hosts}

    def _report(self, replica: ReplicaId, now: float, roster: Roster) -> ReplicaReport:
        version = None if self._snapshots else roster.version(replica)
        reporter = self._reporters.setdefault(replica, ReplicaReporter())
        records = self._records.get(replica, [])[:REMEMBERED]
        return reporter.report(self._load(replica, now), Gauges((1, 2, 3)), records, version, now)

    def _load(self, replica: ReplicaId, now: float) -> ReplicaLoad:
        held = self._hosts[replica]
        used = sum(-(-tokens // BLOCK) for tokens in held.values()) - self._shared.saved(replica) // BLOCK
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


# --- the parts of an epoch, one after the other -------------------------------------------------------


def measure(
    spec: str, count: int, epochs: int, snapshots: bool = False, documents: int = 0, seed: int = 0
) -> PlannerSpeed:
    """Run the scheduler's decisions with one policy on `count` replicas; the load fills all but the spare ones."""
    memory, roster = PoolMemory(Terms(spec, LIMITS, placement_ttl_s=10.0, sizes=_sizes(documents))), Roster()
    replicas = SyntheticReplicas(count, snapshots)
    load = SyntheticLoad(int(count / SPARE) * PER_REPLICA, seed, documents)
    seeing, deciding, placing, requests = [], [], [], 0
    made: list[tuple[Move, ...]] = [()]
    for number in tqdm(range(epochs + FILLING), desc=f"{spec}, {count} replicas", leave=False):
        now = float(number)
        changes = load.epoch()
        replicas.apply(changes)
        reports = replicas.reports(now, roster)
        ended = tuple(MoveReport(m.request, m.source, m.target, moved=True, took_s=0.5) for m in made[-1])
        began = time.process_time()
        for report in reports.values():
            roster.take(report.report)
        seen = roster.observe(Pool(SOLE_POOL, max_replicas=count), ended)
        saw = time.process_time()
        (plan,) = decide_pool(memory, seen, now)
        done = time.process_time()
        spent = [_place(memory, replicas, arrival, now) for arrival in changes.arrived]
        for move in plan.moves:
            replicas.move(record_of(str(number), move, Outcome.COMMITTED))
        made.append(plan.moves)
        if number >= FILLING:
            seeing.append(saw - began)
            deciding.append(done - saw)
            placing += spent
            requests = len(changes.sizes)
    (see, see_worst), (decide, decide_worst), (put, put_worst) = map(_summary, (seeing, deciding, placing))
    moves = sum(map(len, made[1 + FILLING :])) / epochs
    return PlannerSpeed(spec, count, requests, epochs, moves, see, see_worst, decide, decide_worst, put, put_worst)


def _sizes(documents: int) -> Sizes:
    """Marginal ones where prompts share blocks."""
    return Sizes.MARGINAL if documents else Sizes.BLIND


def _place(memory: PoolMemory, replicas: SyntheticReplicas, arrival: Arrival, now: float) -> float:
    """Place one arrival; the seconds it takes."""
    began = time.process_time()
    decision = place(memory, arrival, now)
    took = time.process_time() - began
    assert isinstance(decision, Place | Queue)
    replicas.start(arrival, decision.replica, now)
    return took


def record_of(id: str, move: Move, outcome: Outcome | None) -> MigrationRecord:
    """The record of a move that has begun or ended."""
    return MigrationRecord(
        id, move.request, "", move.source, move.target, Path.TOKENS, "", "", move.reason, outcome, duration_s=0.5
    )


# --- the live scheduler -------------------------------------------------------------------------------


class LivePath:
    """The scheduler's loop over synthetic replicas. Their answers are prepared, and decoded when they arrive.

    Implements `Reporters` and `Sources`.
    """

    def __init__(self, spec: str, count: int, snapshots: bool, documents: int, seed: int) -> None:
        self.now = 0.0
        self.replicas = SyntheticReplicas(count, snapshots)
        self.roster = Roster()
        self.requests = 0
        self.work: list[float] = []
        self.waits: list[float] = []
        self.freezing: list[float] = []
        self._load = SyntheticLoad(int(count / SPARE) * PER_REPLICA, seed, documents)
        self._answers: dict[ReplicaId, bytes] = {}
        self._ordered: list[MigrationRecord] = []
        self._arrived: list[Arrival] = []
        sizes = _sizes(documents)
        config = SchedulerConfig(policy=spec, bounds=(1, count), linger_s=1e9, foresight_s=0.0, sizes=sizes)
        telemetry = Telemetry(SOLE_POOL)
        dispatch = Dispatch(self, Records(telemetry))

        def keep(fresh: Iterable[MigrationRecord]) -> None:
            for record in fresh:
                dispatch.take(record)

        clock = lambda: self.now  # noqa: E731
        gatherer = Gatherer(self, self.roster, clock, config.report_timeout_s, keep, lambda: None)
        scaler = SteadyScaler(count)
        pool = LivePool(SOLE_POOL, 1, SteadyListing(count), gatherer, self.roster, dispatch, scaler, telemetry)
        self._epochs = Epochs(config, (pool,), SchedulerMemory(config.terms), clock)

    def serving(self) -> Iterable[ReplicaId]:
        """See `Reporters.serving`."""
        return self._answers

    async def report(self, replica: ReplicaId, version: int | None) -> ReplicaReport:
        """See `Reporters.report`."""
        await asyncio.sleep(0)
        report: ReplicaReport = CONTROL_METHODS["report"].result.decode(self._answers[replica])
        return report

    def forget(self, replica: ReplicaId) -> None:
        """See `Reporters.forget`."""

    async def move(self, source: ReplicaId, order: Order, target: ReplicaId) -> MigrationRecord:
        """See `Sources.move`: the move has ended by the next epoch."""
        move = Move(order.request, source, target, Tokens(0), order.reason, 0)
        self._ordered.append(record_of(order.id, move, Outcome.COMMITTED))
        return record_of(order.id, move, None)

    async def epoch(self) -> None:
        """Run one epoch, and place arrivals in each turn that the event loop has meanwhile."""
        self.now += 1.0
        changes = self._load.epoch()
        self.replicas.apply(changes)
        for record in self._ordered:
            self.replicas.move(record)
        self._ordered.clear()
        self._answers = {
            r: msgspec.msgpack.encode(report) for r, report in self.replicas.reports(self.now, self.roster).items()
        }
        self._arrived, self.requests, placing = list(changes.arrived), len(changes.sizes), 0.0
        began = before = time.process_time()
        epoch = asyncio.create_task(self._epochs.epoch())
        while not epoch.done():
            await asyncio.sleep(0)
            turned = time.process_time()
            if self._arrived and self._epochs.ready.is_set():
                self._place(self._arrived.pop())
            after = time.process_time()
            placing += after - turned
            self.waits.append(after - before)
            before = after
        freeze_heap(YOUNG_IN_PERIODS)
        self.freezing.append(time.process_time() - before)
        self.work.append(before - began - placing)
        await epoch
        for arrival in self._arrived:
            self._place(arrival)

    def _place(self, arrival: Arrival) -> None:
        decision = self._epochs.place(PlaceCall(SOLE_POOL, arrival, "", ()), ())
        assert isinstance(decision, Place | Queue)
        self.replicas.start(arrival, decision.replica, self.now)


class SteadyListing:
    """Implements `Listing`: Serve lists all replicas, and stops none."""

    listed = is_current = True
    deployed_at: float | None = None

    def __init__(self, count: int) -> None:
        self.wanted_by_serve = count

    async def refresh(self) -> None:
        """See `Listing.refresh`."""

    def lists(self, replica: ReplicaId) -> bool:
        """See `Listing.lists`."""
        return True

    def runs(self, replica: ReplicaId) -> bool:
        """See `Listing.runs`."""
        return True

    def stopping(self) -> tuple[ReplicaId, ...]:
        """See `Listing.stopping`."""
        return ()

    def leaving(self) -> tuple[ReplicaId, ...]:
        """See `Listing.leaving`."""
        return ()

    def others(self, reported: Collection[ReplicaId]) -> tuple[Status, ...]:
        """See `Listing.others`."""
        return ()


class SteadyScaler:
    """Implements `Scaler`: all replicas stay."""

    opening = 0
    scales = True

    def __init__(self, count: int) -> None:
        self.sleeping: Sleeping | None = None
        self.wanted = self.max_replicas = count
        self.min_replicas = 1

    def set_bounds(self, bounds: tuple[int, int]) -> None:
        """See `Scaler.set_bounds`."""

    def publish(self) -> None:
        """See `Scaler.publish`."""

    def open(self, count: int) -> None:
        """See `Scaler.open`."""

    def mark_emptying(self, replicas: Collection[ReplicaId]) -> None:
        """See `Scaler.mark_emptying`."""

    def close(self, replicas: Iterable[ReplicaId], fence: int) -> None:
        """See `Scaler.close`."""

    def close_drained(self, empty: Iterable[ReplicaId], fence: int) -> None:
        """See `Scaler.close_drained`."""

    def put_to_sleep(self, idle: Sequence[ReplicaId], fence: int) -> None:
        """See `Scaler.put_to_sleep`."""

    def spare(self, idle: Sequence[ReplicaId]) -> Sequence[ReplicaId]:
        """See `Scaler.spare`."""
        return ()

    @property
    def closing(self) -> Collection[ReplicaId]:
        """See `Scaler.closing`."""
        return ()

    def measure_freed(self, filled: Collection[ReplicaId]) -> None:
        """See `Scaler.measure_freed`."""

    async def drain(self, replica: ReplicaId, fence: int) -> None:
        """See `Scaler.drain`."""

    def follow_sleep(self) -> None:
        """See `Scaler.follow_sleep`."""

    async def sleep(self, replica: ReplicaId) -> MoveAnswer:
        """See `Scaler.sleep`."""
        return MoveAccepted(replica)

    async def wake(self, replica: ReplicaId) -> MoveAnswer:
        """See `Scaler.wake`."""
        return MoveAccepted(replica)


async def measure_live(
    spec: str, count: int, epochs: int, snapshots: bool = False, documents: int = 0, seed: int = 0
) -> LiveSpeed:
    """Run the live scheduler's loop with one policy on `count` replicas."""
    live = LivePath(spec, count, snapshots, documents, seed)
    for number in tqdm(range(FILLING + epochs), desc=f"{spec}, {count} replicas, live", leave=False):
        await live.epoch()
        if number < FILLING:
            live.work.clear()
            live.waits.clear()
            live.freezing.clear()
    return LiveSpeed(
        spec, count, live.requests, epochs, *_summary(live.work), *_summary(live.waits), *_summary(live.freezing)
    )


# --- the command --------------------------------------------------------------------------------------


def _summary(seconds: Sequence[float]) -> tuple[float, float]:
    """Median and largest, in milliseconds."""
    return statistics.median(seconds) * 1e3, max(seconds) * 1e3


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print tables, and write the figures to --json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description="Speed of the live planner.")
    add_options(parser, [10, 100, 1000], 30)
    parser.add_argument("--snapshots", action="store_true", help="reports hold all requests instead of changes")
    parser.add_argument("--documents", type=int, default=0, help="number of documents that prompts begin with; 0: none")
    options = parser.parse_args(argv)
    gc.freeze()
    cases = [
        (spec, n, options.epochs, options.snapshots, options.documents)
        for spec in options.policy or ["pack"]
        for n in options.replicas
    ]
    speeds = [measure(*case) for case in cases]
    lives = [asyncio.run(measure_live(*case)) for case in cases]
    print(f"{'':42}{'see, ms':>16}{'decide, ms':>16}{'place one, ms':>16}")
    print(f"{'policy':16}{'replicas':>9}{'requests':>10}{'moves':>7}" + f"{'p50':>8}{'worst':>8}" * 3)
    for s in speeds:
        print(
            f"{s.policy:16}{s.replicas:9}{s.requests:10}{s.moves_per_epoch:7.1f}"
            f"{s.see_p50_ms:8.2f}{s.see_worst_ms:8.2f}{s.decide_p50_ms:8.2f}{s.decide_worst_ms:8.2f}"
            f"{s.place_p50_ms:8.3f}{s.place_worst_ms:8.3f}"
        )
    print(f"\n{'the live loop':42}{'epoch, ms':>16}{'arrival waits, ms':>18}{'collection, ms':>16}")
    for live in lives:
        print(
            f"{live.policy:16}{live.replicas:9}{live.requests:10}{'':7}{live.epoch_p50_ms:8.2f}{live.epoch_worst_ms:8.2f}"
            f"{live.wait_p50_ms:10.2f}{live.wait_worst_ms:8.2f}{live.freeze_p50_ms:8.2f}{live.freeze_worst_ms:8.2f}"
        )
    if options.json:
        figures = {"parts": [asdict(s) for s in speeds], "live": [asdict(live) for live in lives]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
