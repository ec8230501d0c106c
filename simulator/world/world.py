"""The simulated world: requests between decisions, and the execution of decisions.

The costs determine the durations in this world; without costs it is the paper's idealised model, where time is in slots
(section VI-A). The world decides nothing: its replicas report to `policies.decision`, as live ones do, and it executes
the plans.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import assert_never

from policies.causes import Cause
from policies.cluster.changes import Arrival
from policies.cluster.cluster import Cluster
from policies.cluster.supply import Supply
from policies.cost.service import ReplicaSpeed
from policies.cost.steps import StepCosts
from policies.decision.deciding import decide_pool, place, placing_order
from policies.decision.disaggregation.roles import awaits_prefills
from policies.decision.limits import LiveLimits, Terms
from policies.decision.memory import PoolMemory
from policies.decision.observation import Pool, PoolReport, Status
from policies.decision.placement import Decision, NoReplica, Place
from policies.model import SOLE_POOL, Bytes, ReplicaId, ReplicaState, RequestId, Tokens
from policies.paths.estimates import Boundaries
from policies.paths.prices import Profile
from policies.plan import Close, Eviction, Move, MoveReport, Open, Path, Placement, Plan
from policies.prefix.copies import Fetch
from policies.rules.policy import Policy
from simulator.caches.cache import SimulatedCache
from simulator.costs.costs import Costs, PathChoice
from simulator.costs.steps import StepTimes
from simulator.workload.workload import Job, Succession
from simulator.world.engine import Memory, SimulatedEngine
from simulator.world.evacuating import ClosingCopies
from simulator.world.live import Live, Stage
from simulator.world.loop import Loop, Timer, Turn
from simulator.world.moving import Mover
from simulator.world.observer import Observer, Transfer, TransferOutcome
from simulator.world.replicas import Replicas
from simulator.world.reports import Reports
from simulator.world.returning import ReturningCopies
from simulator.world.setup import Setup

EARLIEST_S = 0.1
"""Minimum seconds between an epoch and an early next one, as in the live scheduler."""


def simulate(jobs: Sequence[Job], policy: Policy, setup: Setup, costs: Costs, observer: Observer) -> None:
    """Play `jobs`, sorted by arrival, through `policy` until the horizon; `observer` gets the events."""
    World(policy, setup, costs, observer).run(jobs)


class World:
    """One simulation. `lives` are the requests in the scheduler's memory, in the order of their arrival."""

    def __init__(self, policy: Policy, setup: Setup, costs: Costs, observer: Observer) -> None:
        self.lives: dict[RequestId, Live] = {}
        self.loop = Loop()
        self._setup = setup
        self._costs = costs
        self._observer = observer
        self._times = StepTimes(costs.compute, _rate(setup, costs))
        self._memory = PoolMemory(terms_of(setup, costs), policy)
        pool = Pool(SOLE_POOL, capacity=setup.capacity, min_replicas=setup.min_replicas, max_replicas=setup.max_gpus)
        self._reports = Reports(pool, costs.slots)
        self.replicas = Replicas(self.loop, self._times, _memory(costs), self)
        self.mover = Mover(self.loop, costs.migration, self) if costs.migration else None
        copies = self.mover if setup.copies and setup.block_tokens else None
        self._closing_copies = ClosingCopies(self.loop, copies, self.replicas.engines) if copies else None
        returns = self.mover if setup.returns and setup.block_tokens else None
        self._returning_copies = (
            ReturningCopies(self.loop, returns, self.replicas.engines, Tokens(setup.block_tokens)) if returns else None
        )
        self._succession = Succession(())
        self._arrived = 0
        self._starting: set[ReplicaId] = set()
        self._next_epoch: Timer | None = None
        self._next_epoch_s = 0.0
        self._last_epoch_s = 0.0

    @property
    def cluster(self) -> Cluster:
        """The scheduler's model of the cluster."""
        return self._memory.cluster

    def run(self, jobs: Sequence[Job]) -> None:
        """Run the arrivals of `jobs`, and an epoch every `epoch_s` seconds, until the horizon."""
        self._open_first()
        if not self._costs.slots:
            self._decide(0.0)
        self._succession = Succession(jobs)
        self._await(self._succession.first, 0)
        self._await_epoch(self._setup.epoch_s)
        self.loop.run(self._setup.horizon_s)

    # --- events of engines and moves ----------------------------------------------------------------------

    def stepped(self, step_s: float, tokens: float) -> None:
        """See `EngineObserver`."""
        self._observer.stepped(self.loop.now, step_s, tokens)

    def prefilling(self, live: Live) -> None:
        """See `EngineObserver`."""
        self._change(live)

    def filling(self, live: Live) -> None:
        """See `EngineObserver`."""
        if self.mover:
            self.mover.filling(live)

    def decoding(self, live: Live) -> None:
        """See `EngineObserver`."""
        self._change(live)
        if self.mover:
            self.mover.decoding(live)

    def over(self, live: Live) -> None:
        """See `EngineObserver`."""
        if self.mover:
            self.mover.over(live)
        if self._returning_copies:
            self._returning_copies.add(live)
        self._reports.over.append(live)
        engine = self.replicas.engines.get(live.at) if live.at is not None else None
        if engine is not None and engine.cache is not None:
            engine.cache.remember(live.job.context, self.loop.now)
        alone = self._times.alone(live.job.prompt, live.job.output, self._costs.ingress_s)
        self._observer.finished(self.loop.now, live.life(self.loop.now, alone))
        if (job := self._succession.ended(live.id, self.loop.now)) is not None:
            self.loop.at(job.arrival_s + self._costs.ingress_s, Turn.ARRIVAL, partial(self._take, (job,)))

    def preempted(self, live: Live) -> None:
        """See `EngineObserver`."""
        self._change(live)
        self._observer.preempted(self.loop.now, live.need)
        if self.mover:
            self.mover.preempted(live)
        self._ask_early()

    def refused(self, request: RequestId) -> None:
        """See `EngineObserver`."""
        if self.mover:
            self.mover.refused(request)

    def touch(self, engine: SimulatedEngine) -> None:
        """See `MoveObserver`."""
        self.replicas.touch(engine)

    def settle(self) -> None:
        """See `MoveObserver`."""
        self.replicas.settle()

    def reported(self, live: Live, report: MoveReport) -> None:
        """See `MoveObserver`."""
        self._reports.moves.append(report)
        if live.stage is not Stage.OVER:
            self._reports.changed[live] = None

    def transferred(self, transfer: Transfer) -> None:
        """See `MoveObserver`."""
        self._observer.transferred(self.loop.now, transfer)

    def _change(self, live: Live) -> None:
        """Note a change of a request's phase, which the idealised model does not report."""
        if not self._costs.slots:
            self._reports.changed[live] = None

    # --- arrivals -----------------------------------------------------------------------------------------

    def _await(self, jobs: Sequence[Job], index: int) -> None:
        if index < len(jobs):
            self.loop.at(
                jobs[index].arrival_s + self._costs.ingress_s, Turn.ARRIVAL, partial(self._arrive, jobs, index)
            )

    def _arrive(self, jobs: Sequence[Job], index: int) -> None:
        """Take all arrivals of this time; the live scheduler gets such a batch in one call."""
        end = index
        while end < len(jobs) and jobs[end].arrival_s <= jobs[index].arrival_s:
            end += 1
        self._take(jobs[index:end])
        self._await(jobs, end)

    def _take(self, jobs: Sequence[Job]) -> None:
        """Take requests that arrive together."""
        for job in jobs:
            live = Live(job, self._arrived, self._setup.classes.turn(job.precedence))
            self._arrived += 1
            self.lives[live.id] = live
            self._reports.changed[live] = None
        if self._costs.slots:
            for job in jobs:
                self._memory.router.take_names(job.id, job.names)
        else:
            arrivals = [Arrival(job.id, job.prompt, job.names, job.session, job.precedence) for job in jobs]
            for arrival in placing_order(self._memory, arrivals, self.loop.now):
                self._place(arrival)

    def _place(self, arrival: Arrival) -> None:
        """Place an arrival at once. If it does not fit, an early epoch has to find room for it."""
        live = self.lives[arrival.id]
        placing = self._decide_placement(arrival)
        if not isinstance(placing, Place):
            self._ask_early()
        self._await_prefills()
        if not isinstance(placing, NoReplica):
            live.matched = placing.matched
            fetch = placing.fetch if isinstance(placing, Place) else None
            if fetch is None or not self._fetch(live, placing.replica, fetch):
                self._put(live, placing.replica)
            if isinstance(placing, Place) and placing.then is not None:
                live.returns_to = placing.replica if placing.returns else None
                self._move(live, placing.then)

    def _decide_placement(self, arrival: Arrival) -> Decision:
        return place(self._memory, arrival, self.loop.now)

    def _put(self, live: Live, replica: ReplicaId) -> None:
        """Queue a placed request, unless its replica has gone: then the next epoch places it."""
        if replica in self.replicas.engines:
            self.replicas.place(live, replica)
            self.replicas.settle()

    def _fetch(self, live: Live, replica: ReplicaId, fetch: Fetch) -> bool:
        """Copy the first blocks of a prompt to a replica, and queue the request then. False without blocks to copy.

        The request waits for the copy no longer than a live one does.
        """
        target, donor = self.replicas.engines[replica], self.replicas.engines.get(fetch.donor)
        if self.mover is None or donor is None or donor.cache is None or target.cache is None:
            return False
        size = self._setup.block_tokens
        names = live.job.context[: fetch.tokens // size]
        names = names[: donor.cache.leading(names)]
        missing = len(names) - target.cache.leading(names)
        if missing <= 0:
            return False

        def arrived() -> None:
            deadline.cancel()
            if self.replicas.engines.get(replica) is target:
                target.take_in(names, self.loop.now)
            self._put(live, replica)

        def late() -> None:
            give_up()
            self._put(live, replica)

        give_up = self.mover.copy(donor, target, Tokens(missing * size), arrived)
        deadline = self.loop.at(self.loop.now + fetch.within_s, Turn.LINK, late)
        return True

    # --- replicas -----------------------------------------------------------------------------------------

    def _open_first(self) -> None:
        """Open the minimum number of replicas, already running."""
        supply = Supply(self._setup.gpus_per_node, self._setup.max_gpus)
        for _ in range(self._setup.min_replicas):
            if supply.left > 0:
                self._open(*supply.take(), ReplicaState.RUNNING)

    def _open(self, replica: ReplicaId, node: str, state: ReplicaState) -> None:
        capacity, block_tokens = self._setup.capacity, self._setup.block_tokens
        self.replicas.open(replica, node, capacity, SimulatedCache(block_tokens) if block_tokens else None)
        self._reports.statuses[replica] = self._status(replica, state, node)
        if state is ReplicaState.STARTING:
            self._starting.add(replica)
        if self._costs.migration:
            self._reports.profiles[replica] = Profile(node, "simulated", self._costs.migration.kv_bytes)

    def _status(self, replica: ReplicaId, state: ReplicaState, node: str) -> Status:
        capacity = self.replicas.engines[replica].capacity
        return Status(replica, state, node, capacity, self._setup.block_tokens or 1, nominal=self._setup.capacity)

    def resize(self, replica: ReplicaId, capacity: Tokens) -> None:
        """Have an engine change its capacity now: requests that no longer fit are preempted, unless they move away."""
        self.replicas.resize(replica, capacity)
        self._reports.statuses[replica] = replace(self._known_status(replica), capacity=capacity)

    def _known_status(self, replica: ReplicaId) -> Status:
        state = ReplicaState.STARTING if replica in self._starting else ReplicaState.RUNNING
        node = self.replicas.engines[replica].node
        return self._reports.statuses.get(replica) or self._status(replica, state, node)

    def _start(self, engine: SimulatedEngine) -> None:
        """Report a replica as running. If requests wait, an early epoch follows."""
        if self.replicas.engines.get(engine.replica) is engine:
            self._starting.discard(engine.replica)
            status = self._status(engine.replica, ReplicaState.RUNNING, engine.node)
            self._reports.statuses[engine.replica] = status
            if self.cluster.waiting:
                self._ask_early()

    # --- epochs -------------------------------------------------------------------------------------------

    def _await_epoch(self, time: float) -> None:
        """Schedule the next epoch for a time, in place of the one scheduled before."""
        if self._next_epoch is not None:
            self._next_epoch.cancel()
        self._next_epoch_s = time
        self._next_epoch = self.loop.at(time, Turn.EPOCH, self._epoch)

    def _ask_early(self) -> None:
        """Have the next epoch as early as possible."""
        time = max(self.loop.now, self._last_epoch_s + EARLIEST_S)
        if not self._costs.slots and time < self._next_epoch_s:
            self._await_epoch(time)

    def _epoch(self) -> None:
        """Decide, and schedule the next epoch `epoch_s` seconds later, even if this one was early."""
        self._last_epoch_s = self.loop.now
        self._await_epoch(self.loop.now + self._setup.epoch_s)
        # The time of a slot is its beginning.
        now = self.loop.now - self._setup.epoch_s * self._costs.slots
        plans = self._decide(now)
        self.replicas.settle(decided=True)
        closing = 0 if self._closing_copies is None else self._closing_copies.count
        self._observer.decided(now, self.cluster, plans, closing)
        self._await_prefills()

    def _await_prefills(self) -> None:
        """Ask for an early epoch while a prefill waits for its move."""
        if awaits_prefills(self._memory):
            self._ask_early()

    def _decide(self, now: float) -> Sequence[Plan]:
        plans = decide_pool(self._memory, self._observed(), now)
        for plan in plans:
            self._carry_out(plan)
        return plans

    def _observed(self) -> PoolReport:
        batches = [engine.batch for engine in self.replicas.engines.values()]
        if self.mover:
            self._reports.moves += self.mover.reports()
            for moving in self.mover.under_way.values():
                self._change(moving.live)
        if self._setup.caps:
            self._reports.pool = replace(self._reports.pool, max_replicas=self._setup.most_gpus(self.loop.now))
        self._reports.caches = self.replicas.cache_changes()
        if self._setup.block_tokens:
            self._count_free_blocks()
        return self._reports.take(self.lives, batches, self.loop.now)

    def _count_free_blocks(self) -> None:
        """Report the free blocks of running replicas, as live ones do."""
        for name, engine in self.replicas.engines.items():
            if name not in self._starting:
                free = engine.free_blocks(self.loop.now)
                self._reports.statuses[name] = replace(self._known_status(name), free_blocks=free)

    def _carry_out(self, plan: Plan) -> None:
        for action in plan.actions:
            match action:
                case Open():
                    self._open_by_plan(action)
                case Eviction():
                    self._evict(self.lives[action.request], action.source)
                case Move():
                    self._move(self.lives[action.request], action)
                case Placement():
                    self._start_request(action)
                case Close():
                    self._close(action.replica)
                case _:
                    assert_never(action)
        for move in plan.deferred:
            self._note(move, TransferOutcome.DEFERRED)

    def _open_by_plan(self, action: Open) -> None:
        state = ReplicaState.STARTING if self._costs.startup_s else ReplicaState.RUNNING
        self._open(action.replica, action.node, state)
        if self._costs.startup_s:
            start = partial(self._start, self.replicas.engines[action.replica])
            self.loop.at(self.loop.now + self._costs.startup_s, Turn.START, start)

    def _start_request(self, action: Placement) -> None:
        live = self.lives[action.request]
        self._reports.changed[live] = None
        live.at = action.replica
        self.replicas.place(live, action.replica)

    def _close(self, replica: ReplicaId) -> None:
        engine = self.replicas.close(replica)
        if self._closing_copies is not None and replica not in self._starting:
            running = [other for name, other in self.replicas.engines.items() if name not in self._starting]
            self._closing_copies.begin(engine, running, self._memory.router.tree)
        self._starting.discard(replica)
        self._reports.lost.append(replica)
        self._reports.statuses.pop(replica, None)

    def _evict(self, live: Live, source: ReplicaId) -> None:
        if self.mover:
            self.mover.land(live)
        self._reports.changed[live] = None
        live.at = None
        self.replicas.evict(live, source)

    def _move(self, live: Live, move: Move) -> None:
        """Begin a move, or execute it at once. The move of a request that has just ended fails."""
        self._reports.changed[live] = None
        source, target = self.replicas.engines[move.source], self.replicas.engines[move.target]
        if self.mover is None:
            live.at = target.replica
            self.replicas.move(live, source, target)
            self._note(move, TransferOutcome.MOVED)
        elif live.stage is Stage.OVER:
            cause = Cause.REQUEST_ENDED
            self._reports.moves.append(MoveReport(live.id, move.source, move.target, False, cause=cause))
        else:
            path = move.path or Path.TOKENS
            self.mover.begin(live, source, target, move.reason, path, move.predicted_s or 0.0)

    def _note(self, move: Move, outcome: TransferOutcome) -> None:
        """Pass the outcome of an instantaneous or deferred move on to the observer."""
        now = self.loop.now
        moved = outcome is TransferOutcome.MOVED
        kv_s, tokens_s = (math.inf if s is None else s for s in (move.kv_s, move.tokens_s))
        path = None if moved else Path.KV if kv_s <= tokens_s else Path.TOKENS
        source, target = (self.replicas.engines[end].node for end in (move.source, move.target))
        self.transferred(
            Transfer(
                path,
                move.tokens,
                Bytes(0),
                began_s=now,
                ended_s=now,
                stall_s=0.0,
                same_node=source == target,
                completed=moved,
                outcome=outcome,
                reason=move.reason,
                resumed_s=now if moved else None,
            )
        )


def terms_of(setup: Setup, costs: Costs) -> Terms:
    """The limits of decisions in the simulated world."""
    limits, migration = setup.limits, costs.migration
    measures_lead = (migration is not None or not costs.slots) and not limits.lead_s
    boundaries = Boundaries()
    if migration is not None:
        only = None if migration.path is PathChoice.ADAPTIVE else Path(migration.path.value)
        boundaries = Boundaries(migration.time_limit_s, migration.slowdown, only, migration.consensus)
    rate = _rate(setup, costs) if costs.compute is None or not costs.compute.decode else None
    follows = setup.service is not None or bool(setup.classes.levels)
    return Terms(
        limits=LiveLimits(
            limits,
            limits.linger_s or (None if follows else 0.0),
            limits.foresight_s or (None if follows else 0.0),
            lead_s=None if measures_lead else limits.lead_s,
            slack=limits.slack or None,
        ),
        epoch_s=setup.epoch_s,
        boundaries=boundaries,
        moves_at_once=setup.moves_at_once,
        moves_per_replica=setup.moves_per_replica,
        placement_ttl_s=2 * setup.epoch_s,
        moves_take_time=migration is not None,
        starts_take_time=bool(costs.startup_s),
        may_wait_nowhere=costs.slots,
        batched=setup.batched,
        decode_rate=rate,
        per_node=setup.gpus_per_node,
        service=setup.service,
        speed=speed_of(costs) if follows else speed_of(costs) or _prefill_speed(setup, costs),
        routing=setup.routing,
        sizes=setup.sizes,
        copies=setup.copies and migration is not None,
        classes=setup.classes,
        prefill_replicas=setup.prefill_gpus if migration is not None else 0,
        returns=setup.returns and setup.prefill_gpus > 0 and migration is not None,
        auto_prefills=setup.auto_prefills and migration is not None,
    )


def speed_of(costs: Costs) -> ReplicaSpeed | None:
    """The step times of replicas; None without costs of decoding and of prefills."""
    compute = costs.compute
    if compute is None or not (compute.decode and compute.prefill):
        return None
    return ReplicaSpeed(compute.steps, 0.0, compute.chunk_tokens)


def _prefill_speed(setup: Setup, costs: Costs) -> ReplicaSpeed:
    """The times of prefills where decoding has none; a prefill without time of its own takes one step of decoding."""
    compute = costs.compute
    if compute is None or not compute.prefill:
        return ReplicaSpeed(StepCosts(((1, 1 / _rate(setup, costs)),)))
    return ReplicaSpeed(compute.steps, 0.0, compute.chunk_tokens)


def _rate(setup: Setup, costs: Costs) -> float:
    """Tokens per second and request for costs without decode times; with slots, a whole number of tokens per slot."""
    if costs.slots:
        return max(1, round(setup.decode_rate * setup.epoch_s)) / setup.epoch_s
    return setup.decode_rate


def _memory(costs: Costs) -> Memory:
    if not costs.preemption:
        return Memory.UNBOUNDED
    return Memory.SLOTS if costs.slots else Memory.STRICT
