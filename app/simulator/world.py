"""The simulated world: what really happens to requests between decisions, and what decisions do to them.

There is one world. Costs say what takes time in it; without any it is the paper's idealised model, where time is in
slots (section VI-A). The decisions are the live scheduler's own functions.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from app.simulator.boundaries import Boundaries
from app.simulator.costs import Costs
from app.simulator.engine import Engine, Memory
from app.simulator.execution import Execution
from app.simulator.job import Job
from app.simulator.live import Live
from app.simulator.loop import Loop, Timer, Turn
from app.simulator.moving import Mover
from app.simulator.news import News
from app.simulator.observer import Observer, Transfer
from app.simulator.replicas import Replicas
from app.simulator.setup import Setup
from app.simulator.steps import StepTimes
from policies.cluster.cluster import Cluster
from policies.cluster.supply import Supply
from policies.decision import epoch
from policies.decision.experience import Lead
from policies.model import ReplicaState, RequestId
from policies.plan import Plan
from policies.rules.policy import Policy

EARLIEST_S = 0.1
"""Seconds from one epoch until the next one may be, when one is asked for early."""


def simulate(jobs: Sequence[Job], policy: Policy, setup: Setup, costs: Costs, observer: Observer) -> None:
    """Play `jobs`, sorted by arrival, through `policy` until the horizon; `observer` is told what happens."""
    World(policy, setup, costs, observer).run(jobs)


class World:
    """One simulation. `lives` are the requests that the scheduler knows of, in the order of their arrival."""

    def __init__(self, policy: Policy, setup: Setup, costs: Costs, observer: Observer) -> None:
        self.lives: dict[RequestId, Live] = {}
        self.loop = Loop()
        self._policy = policy
        self._setup = setup
        self._costs = costs
        self._observer = observer
        self._times = StepTimes(costs.compute, _rate(setup, costs))
        self._news = News(costs.slots)
        self.replicas = Replicas(self.loop, self._times, _memory(costs), self)
        self.cluster = Cluster(setup.capacity, Supply(setup.gpus_per_node, setup.max_gpus))
        self.cluster.holds = costs.migration is not None
        self.cluster.starts_as = ReplicaState.STARTING if costs.startup_s else ReplicaState.RUNNING
        self.mover = Mover(self.loop, costs.migration, self) if costs.migration else None
        boundaries = Boundaries(costs.migration, self._times, setup.epoch_s) if costs.migration else None
        self._execution = Execution(
            self.loop, self.cluster, self.lives, self.replicas, self.mover, boundaries, self.transferred
        )
        self._epochs = 0
        self._last_epoch_s = 0.0
        self._early: Timer | None = None
        self._lead = Lead(setup.epoch_s)

    def run(self, jobs: Sequence[Job]) -> None:
        """Let `jobs` arrive, and an epoch be decided every `epoch_s` seconds, until the horizon."""
        self._open_first()
        self._await(jobs, 0)
        self._await_epoch()
        self.loop.run(self._setup.horizon_s)

    # --- what engines and moves tell ----------------------------------------------------------------------

    def decoding(self, live: Live) -> None:
        """See `Witness`."""
        if self.mover:
            self.mover.land(live)

    def over(self, live: Live) -> None:
        """See `Witness`."""
        if self.mover:
            self.mover.over(live)
        self._news.over.append(live)
        alone = self._times.alone(live.job.prompt, live.job.output)
        self._observer.finished(self.loop.now, live.life(self.loop.now, alone))

    def preempted(self, live: Live) -> None:
        """See `Witness`."""
        self._observer.preempted(self.loop.now, live.need)
        if self.mover:
            self.mover.preempted(live)
        self._ask_early()

    def refused(self, request: RequestId) -> None:
        """See `Witness`."""
        if self.mover:
            self.mover.refused(request)

    def touch(self, engine: Engine) -> None:
        """See `Floor`."""
        self.replicas.touch(engine)

    def settle(self) -> None:
        """See `Floor`."""
        self.replicas.settle()

    def moved(self, request: RequestId) -> None:
        """See `Floor`."""
        self._news.moved.append(request)

    def stayed(self, request: RequestId) -> None:
        """See `Floor`."""
        self._news.stayed.append(request)

    def transferred(self, transfer: Transfer) -> None:
        """See `Floor`."""
        if transfer.completed:
            self._lead.observe(transfer.ended_s - transfer.began_s)
        self._observer.transferred(self.loop.now, transfer)

    # --- arrivals -----------------------------------------------------------------------------------------

    def _await(self, jobs: Sequence[Job], index: int) -> None:
        if index < len(jobs):
            self.loop.at(jobs[index].arrival_s, Turn.ARRIVAL, partial(self._arrive, jobs, index))

    def _arrive(self, jobs: Sequence[Job], index: int) -> None:
        live = Live(jobs[index], index)
        self.lives[live.id] = live
        if self._costs.slots:
            self._news.arrived.append(live)
        else:
            self._place(live)
        self._await(jobs, index + 1)

    def _place(self, live: Live) -> None:
        """Place an arrival at once; if it fits nowhere, an epoch has to find room for it."""
        request = self.cluster.add_request(live.id, live.job.prompt)
        target = self._policy.place(self.cluster, request)
        if target is None:
            self._ask_early()
            return
        self.cluster.place(request, target)
        self.cluster.settle()
        self.replicas.place(live, target.id)
        self.replicas.settle()

    def _open_first(self) -> None:
        """The replicas that are always up are up from the start."""
        for _ in range(self._setup.limits.min_replicas):
            if (first := self.cluster.open()) is not None:
                self.cluster.update_replica(first, ReplicaState.RUNNING, first.capacity, first.max_requests)
                self.replicas.open(first.id, first.node, self._setup.capacity)
        self.cluster.settle()

    # --- epochs -------------------------------------------------------------------------------------------

    def _await_epoch(self) -> None:
        self._epochs += 1
        self.loop.at(self._epochs * self._setup.epoch_s, Turn.EPOCH, self._regular_epoch)

    def _regular_epoch(self) -> None:
        self._await_epoch()
        self._epoch()

    def _ask_early(self) -> None:
        """Have an epoch before the next regular one, if there is time for it."""
        time = max(self.loop.now, self._last_epoch_s + EARLIEST_S)
        if not self._costs.slots and self._early is None and time < self._epochs * self._setup.epoch_s:
            self._early = self.loop.at(time, Turn.EPOCH, self._epoch)

    def _epoch(self) -> None:
        if self._early:
            self._early.cancel()
            self._early = None
        self._last_epoch_s = self.loop.now
        # A slot is named by its beginning.
        now = self.loop.now - self._setup.epoch_s * self._costs.slots
        plans = self._execution.carry_out(self._decide(now))
        self._await_starts(plans)
        self.replicas.settle(decided=True)
        self._observer.decided(now, self.cluster, plans)

    def _decide(self, now: float) -> list[Plan]:
        batches = [engine.batch for engine in self.replicas.engines.values()]
        events = self._news.take(self.lives, batches, self.loop.now)
        limits = self._setup.limits
        if (self.mover or not self._costs.slots) and not limits.lead_s:
            limits = replace(limits, lead_s=self._lead.seconds)
        rate = self.replicas.decode_rate()
        self.cluster.reserve(epoch.headroom(self._policy, limits, rate), epoch.lead(limits, rate))
        if self._setup.batched:
            plans = [epoch.step(self.cluster, events, self._policy, limits, now)]
        else:
            plans = epoch.step_each(self.cluster, events, self._policy, limits, now)
        return plans

    def _await_starts(self, plans: Sequence[Plan]) -> None:
        if self._costs.startup_s:
            for opening in (opening for plan in plans for opening in plan.opened):
                # Opened and closed in one epoch, a replica never starts.
                if engine := self.replicas.engines.get(opening.replica):
                    due = self.loop.now + self._costs.startup_s
                    self.loop.at(due, Turn.START, partial(self._start, engine))

    def _start(self, engine: Engine) -> None:
        """A replica takes requests from now on; if some wait, that is worth an early epoch."""
        if self.replicas.engines.get(engine.replica) is engine:
            self._news.started.append(engine.replica)
            if self.cluster.waiting:
                self._ask_early()


def _rate(setup: Setup, costs: Costs) -> float:
    """Tokens per second and request where the costs do not say; in slots, a whole number of tokens per slot."""
    if costs.slots:
        return max(1, round(setup.decode_rate * setup.epoch_s)) / setup.epoch_s
    return setup.decode_rate


def _memory(costs: Costs) -> Memory:
    if not costs.preemption:
        return Memory.UNBOUNDED
    return Memory.SLOTS if costs.slots else Memory.STRICT
