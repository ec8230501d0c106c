"""A simulated pool, the replicas of one model: its requests between decisions, and the execution of its plans.

The costs determine the durations; without costs it is the paper's idealised model, where time is in slots (section
VI-A). A pool decides nothing: its replicas report to `policies.decision`, as live ones do, and it executes the plans.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import assert_never

from policies.causes import Cause
from policies.cluster.changes import Arrival
from policies.cluster.cluster import Cluster
from policies.cluster.supply import Supply
from policies.decision.deciding import place, placing_order
from policies.decision.disaggregation.roles import awaits_prefills
from policies.decision.memory import PoolMemory
from policies.decision.observation import Pool, PoolReport, Status
from policies.decision.placement import Decision, NoReplica, Place
from policies.memory.pairing import MemberMove
from policies.model import Bytes, PoolId, ReplicaId, ReplicaState, RequestId, Tokens
from policies.paths.prices import Profile
from policies.plan import Close, Eviction, Move, MoveReport, Open, Pair, Path, Placement, Plan, Reason, Unpair
from policies.prefix.copies import Fetch
from policies.rules.policy import Policy
from simulator.caches.cache import SimulatedCache
from simulator.costs.costs import Costs
from simulator.costs.steps import StepTimes
from simulator.workload.workload import Job, Succession
from simulator.world.crowding import DeviceTime
from simulator.world.devices import Housing, Occupant
from simulator.world.engine import Memory, SimulatedEngine
from simulator.world.evacuating import ClosingCopies
from simulator.world.live import Live, Stage
from simulator.world.loop import Loop, Turn
from simulator.world.moving import Mover
from simulator.world.observer import Observer, Transfer, TransferOutcome
from simulator.world.pairs import Groups
from simulator.world.replicas import Replicas
from simulator.world.reports import Reports
from simulator.world.returning import ReturningCopies
from simulator.world.setup import Setup
from simulator.world.terms import rate_of, terms_of


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A pool to simulate: replicas of one model. `observer` gets its events."""

    id: PoolId
    policy: Policy
    setup: Setup
    costs: Costs
    observer: Observer


class SimulatedPool:
    """One pool. `lives` are the requests in the scheduler's memory, in the order of their arrival.

    Pools share the `loop` and the `devices`, but no links: a pool's transfers do not slow those of other pools down.
    `ask_early` asks for an epoch as early as possible. `lacks_device` is True from an opening without a free device to
    the next opening with one. With `device_time` the replicas of several pools share devices, and openings are carried
    out by `open_decided`, once the plans of all pools are: they may put replicas without requests to sleep.
    """

    def __init__(
        self,
        spec: PoolSpec,
        loop: Loop,
        devices: Housing,
        ask_early: Callable[[], None],
        device_time: DeviceTime | None = None,
    ) -> None:
        setup, costs = spec.setup, spec.costs
        self.id = spec.id
        self.lives: dict[RequestId, Live] = {}
        self.lacks_device = False
        self._loop = loop
        self._devices = devices
        self._ask_early = ask_early
        self._setup = setup
        self._costs = costs
        self._observer = spec.observer
        self._times = StepTimes(costs.compute, rate_of(setup, costs))
        self.memory = PoolMemory(terms_of(setup, costs), spec.policy)
        pool = Pool(spec.id, capacity=setup.capacity, min_replicas=setup.min_replicas)
        self._reports = Reports(pool, costs.slots)
        self.replicas = Replicas(loop, self._times, _memory(costs), self, device_time)
        self.mover = Mover(loop, costs.migration, self) if costs.migration else None
        copies = self.mover if setup.copies and setup.block_tokens else None
        self._closing_copies = ClosingCopies(loop, copies, self.replicas.engines) if copies else None
        returns = self.mover if setup.returns and setup.block_tokens else None
        self._returning_copies = (
            ReturningCopies(loop, returns, self.replicas.engines, Tokens(setup.block_tokens)) if returns else None
        )
        self.groups = Groups(loop, setup, costs, self) if setup.pairs is not None else None
        self._succession = Succession(())
        self._arrived = 0
        self._starting: set[ReplicaId] = set()
        self._opens_last = device_time is not None
        self._openings: list[Open] = []

    @property
    def cluster(self) -> Cluster:
        """The scheduler's model of the cluster."""
        return self.memory.cluster

    def await_jobs(self, jobs: Sequence[Job]) -> None:
        """Schedule the arrivals of `jobs`, sorted by arrival."""
        self._succession = Succession(jobs)
        self._await(self._succession.first, 0)

    # --- events of engines and moves ----------------------------------------------------------------------

    def stepped(self, step_s: float, tokens: float) -> None:
        """See `EngineObserver`."""
        self._observer.stepped(self._loop.now, step_s, tokens)

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
        if self.groups:
            self.groups.over(live)
        if self._returning_copies:
            self._returning_copies.add(live)
        self._reports.over.append(live)
        engine = self.replicas.engines.get(live.at) if live.at is not None else None
        if engine is not None and engine.cache is not None:
            engine.cache.remember(live.job.context, self._loop.now)
        alone = self._times.alone(live.job.prompt, live.job.output, self._costs.ingress_s)
        self._observer.finished(self._loop.now, live.life(self._loop.now, alone))
        if (job := self._succession.ended(live.id, self._loop.now)) is not None:
            self._loop.at(job.arrival_s + self._costs.ingress_s, Turn.ARRIVAL, partial(self._take, (job,)))

    def preempted(self, live: Live) -> None:
        """See `EngineObserver`."""
        self._change(live)
        self._observer.preempted(self._loop.now, live.need)
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
        self._observer.transferred(self._loop.now, transfer)

    def _change(self, live: Live) -> None:
        """Note a change of a request's phase, which the idealised model does not report."""
        if not self._costs.slots:
            self._reports.changed[live] = None

    # --- arrivals -----------------------------------------------------------------------------------------

    def _await(self, jobs: Sequence[Job], index: int) -> None:
        if index < len(jobs):
            self._loop.at(
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
            if self.groups:
                self.groups.arrived(live)
        if self._costs.slots:
            for job in jobs:
                self.memory.router.take_names(job.id, job.names)
        else:
            arrivals = [Arrival(job.id, job.prompt, job.names, job.session, job.precedence) for job in jobs]
            for arrival in placing_order(self.memory, arrivals, self._loop.now):
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
        return place(self.memory, arrival, self._loop.now)

    def _put(self, live: Live, replica: ReplicaId) -> None:
        """Queue a placed request, unless its replica has gone: then the next epoch places it."""
        if replica in self.replicas.engines:
            self.replicas.place(live, replica)
            self.replicas.settle()
        elif self._opens_last:
            self._ask_early()

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
                target.take_in(names, self._loop.now)
            self._put(live, replica)

        def late() -> None:
            give_up()
            self._put(live, replica)

        give_up = self.mover.copy(donor, target, Tokens(missing * size), arrived)
        deadline = self._loop.at(self._loop.now + fetch.within_s, Turn.LINK, late)
        return True

    # --- replicas -----------------------------------------------------------------------------------------

    def open_first(self) -> None:
        """Open the minimum number of replicas, already running, as far as there are devices."""
        supply = Supply(self._setup.gpus_per_node, self._setup.max_gpus)
        for _ in range(self._setup.min_replicas):
            if supply.left > 0:
                self._open(*supply.take(), runs=True)
        if self.groups:
            self.groups.begin()

    def _most_replicas(self) -> int | None:
        """The maximum number of replicas now, by the set-up and the free devices; None without a maximum."""
        own, free = self._setup.most_gpus(self._loop.now), self._devices.free
        if free is None:
            return own
        shared = len(self.replicas.engines) + free
        return shared if own is None else min(own, shared)

    def _open(self, replica: ReplicaId, wished: str, runs: bool = False) -> bool:
        """Open a replica on a device, if possible of the node that is `wished`; it starts unless it `runs` already.

        False if there is no place for it.
        """
        taken = self._devices.take(Occupant(self.id, replica), wished)
        if taken is None:
            return False
        capacity = self._setup.capacity if taken.capacity is None else taken.capacity
        startup_s = self._costs.startup_s if taken.startup_s is None else taken.startup_s
        block_tokens, node = self._setup.block_tokens, taken.node
        cache = SimulatedCache(block_tokens) if block_tokens else None
        self.replicas.open(replica, node, capacity, cache, taken.device)
        state = ReplicaState.RUNNING if runs or not startup_s else ReplicaState.STARTING
        self._reports.statuses[replica] = self._status(replica, state, node)
        if state is ReplicaState.STARTING:
            self._starting.add(replica)
            start = partial(self._start, self.replicas.engines[replica])
            self._loop.at(self._loop.now + startup_s, Turn.START, start)
        if self._costs.migration:
            self._reports.profiles[replica] = Profile(node, "simulated", self._costs.migration.kv_bytes)
        return True

    def _status(self, replica: ReplicaId, state: ReplicaState, node: str) -> Status:
        capacity = self.replicas.engines[replica].capacity
        return Status(replica, state, node, capacity, self._setup.block_tokens or 1, nominal=self._setup.capacity)

    def resize(self, replica: ReplicaId, capacity: Tokens, held: Tokens | None = None) -> None:
        """Change a replica's capacity now; its engine still has `held` tokens (None: the capacity).

        Requests that do not fit into these are preempted, unless they move away.
        """
        self.replicas.resize(replica, capacity if held is None else held)
        self._reports.statuses[replica] = replace(self._known_status(replica), capacity=capacity)

    def is_starting(self, replica: ReplicaId) -> bool:
        """True while a replica starts or wakes."""
        return replica in self._starting

    def lose(self, replica: ReplicaId) -> None:
        """Close a replica without requests that the pool has not closed; the next report has it as lost."""
        self._close(replica)

    def level(self, move: MemberMove) -> None:
        """See `GroupedPool`."""
        live = self.lives[move.request]
        tokens = Tokens(round(live.tokens(self._loop.now)))
        self._move(live, Move(live.id, move.source, move.target, tokens, Reason.BALANCE, 0, Path.KV))

    @property
    def is_quiet(self) -> bool:
        """True without requests, replicas and changes to report: there is nothing to decide."""
        return not (self.lives or self.replicas.engines or self._reports.lost)

    @property
    def newest(self) -> ReplicaId | None:
        """The replica that was opened last."""
        return next(reversed(self.replicas.engines), None)

    @property
    def waiting_tokens(self) -> int:
        """The tokens of the requests without a replica."""
        return sum(live.need for live in self.lives.values() if live.at is None and live.stage is Stage.NOWHERE)

    @property
    def waits_since(self) -> float:
        """The arrival of the oldest request without a replica, in seconds; infinite without one."""
        return next((live.job.arrival_s for live in self.lives.values() if live.at is None), math.inf)

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

    def observed(self) -> PoolReport:
        """The report on the changes since the last one."""
        batches = [engine.batch for engine in self.replicas.engines.values()]
        if self.mover:
            self._reports.moves += self.mover.reports()
            for moving in self.mover.under_way.values():
                self._change(moving.live)
        self._reports.pool = replace(self._reports.pool, max_replicas=self._most_replicas())
        self._reports.caches = self.replicas.cache_changes()
        if self._setup.block_tokens:
            self._count_free_blocks()
        return self._reports.take(self.lives, batches, self._loop.now)

    def carry_out(self, plans: Sequence[Plan]) -> None:
        """Execute the plans of an epoch."""
        for plan in plans:
            self._carry_out(plan)

    def open_decided(self) -> None:
        """Carry the openings of the plans out, if they come last."""
        openings, self._openings = self._openings, []
        for opening in openings:
            self._open_by_plan(opening)

    def end_epoch(self, now: float, plans: Sequence[Plan]) -> None:
        """Have the engines follow the plans of the epoch at `now`, which are carried out."""
        self.replicas.settle(decided=True)
        closing = () if self._closing_copies is None else self._closing_copies.donors
        engines = (*self.replicas.engines.values(), *closing)
        machines = len({engine.node for engine in engines}) if self._setup.by_machine else None
        self._observer.decided(now, self.cluster, plans, len(closing), machines)
        if self.groups:
            self.groups.decide()
        self._await_prefills()

    def _await_prefills(self) -> None:
        """Ask for an early epoch while a prefill waits for its move."""
        if awaits_prefills(self.memory):
            self._ask_early()

    def _count_free_blocks(self) -> None:
        """Report the free blocks of running replicas, as live ones do."""
        for name, engine in self.replicas.engines.items():
            if name not in self._starting:
                free = engine.free_blocks(self._loop.now)
                self._reports.statuses[name] = replace(self._known_status(name), free_blocks=free)

    def _carry_out(self, plan: Plan) -> None:
        for action in plan.actions:
            match action:
                case Open() if self._opens_last:
                    self._openings.append(action)
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
                case Pair() | Unpair():
                    raise AssertionError("`Groups` decides on pairs")
                case _:
                    assert_never(action)
        for move in plan.deferred:
            self._note(move, TransferOutcome.DEFERRED)

    def _open_by_plan(self, action: Open) -> None:
        """Open a replica. If another pool has just taken the last device, the replica is reported as lost."""
        self.lacks_device = not self._open(action.replica, action.node)
        if self.lacks_device:
            self._reports.lost.append(action.replica)

    def _start_request(self, action: Placement) -> None:
        live = self.lives[action.request]
        self._reports.changed[live] = None
        live.at = action.replica
        self.replicas.place(live, action.replica)

    def _close(self, replica: ReplicaId) -> None:
        engine = self.replicas.close(replica)
        self._devices.give_back(Occupant(self.id, replica))
        if self._closing_copies is not None and replica not in self._starting:
            running = [other for name, other in self.replicas.engines.items() if name not in self._starting]
            self._closing_copies.begin(engine, running, self.memory.router.tree)
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
        now = self._loop.now
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


def _memory(costs: Costs) -> Memory:
    if not costs.preemption:
        return Memory.UNBOUNDED
    return Memory.SLOTS if costs.slots else Memory.STRICT
