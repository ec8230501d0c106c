"""A fleet: replicas behind a router, under an autoscaler, in virtual time.

The engines are those of the simulated world, with the same costs and caches. No request moves: a replica that is to
stop takes no more requests and ends with its last one. As in Ray Serve, replicas that are starting stop first, then the
newest; where machines are counted, those on the machine with the fewest running replicas, of these the newest.

    router      chooses a replica by the rule's `FleetRouter`. Replicas with `max_ongoing` requests are left out;
                without any replica, requests queue at the router, first come first served
    autoscaler  samples the load, and applies the rule, every `TICK_S`

The router has no delays and no stale queue lengths, which favours these autoscalers. An autoscaler that looks ahead is
given the loads of a fleet whose replicas start at once. With as many replicas at least as at most, the number is
constant.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from random import Random
from typing import Protocol

from policies.model import SOLE_POOL, ReplicaId, RequestId, Tokens
from simulator.autoscaling.rule import Autoscaler, FleetRouter, LoadMeasure, ScalingRule
from simulator.caches.cache import SimulatedCache
from simulator.costs.costs import Costs
from simulator.costs.steps import StepTimes
from simulator.workload.workload import Job, Succession
from simulator.world.devices import Devices, Occupant
from simulator.world.engine import Memory, SimulatedEngine
from simulator.world.live import Live
from simulator.world.loop import Loop, Turn
from simulator.world.observer import Life
from simulator.world.replicas import Replicas
from simulator.world.setup import Setup

TICK_S = 0.5
"""Seconds between two samples of the load. Serve samples every 2 s and applies its rule every 0.1 s."""


class FleetObserver(Protocol):
    """The events of a fleet for its measurement. `now` is in seconds of virtual time."""

    def counted(self, now: float, gpus: int, machines: int | None = None) -> None:
        """Observe the number of GPUs from `now` on, starting and stopping replicas included, and of their machines.

        None if machines are not counted.
        """
        ...

    def stepped(self, now: float, step_s: float, tokens: float) -> None:
        """Observe tokens of decoding requests, which have followed the tokens before them after `step_s` seconds."""
        ...

    def preempted(self, now: float, tokens: Tokens) -> None:
        """Observe a preemption of a request with `tokens` tokens."""
        ...

    def finished(self, now: float, life: Life) -> None:
        """Observe the end of a request."""
        ...


@dataclass(slots=True, eq=False)
class FleetMember:
    """One replica of the fleet: its engine, the number of its requests, and its stage."""

    engine: SimulatedEngine
    running: bool
    stopping: bool = False
    ongoing: int = 0


class SimulatedFleet:
    """One simulation of a fleet. Equal seeds give equal choices of the router.

    `loads` are the samples of the load so far, `TICK_S` apart. `foreseen` are those of another fleet with the same
    requests, for a rule that looks ahead. `to_zero` allows a set-up without a minimum to have no replicas.
    """

    def __init__(
        self,
        rule: ScalingRule,
        setup: Setup,
        costs: Costs,
        observer: FleetObserver,
        tick: Callable[[float], None],
        seed: int = 0,
        foreseen: Sequence[float] = (),
        to_zero: bool = False,
    ) -> None:
        self.loop = Loop()
        self.loads: list[float] = []
        self._foreseen = foreseen
        self._ticks_ahead = ceil((costs.startup_s + rule.lag_s) / TICK_S)
        self._rule = rule
        self._setup = setup
        self._costs = costs
        self._observer = observer
        self._tick = tick
        self._times = StepTimes(costs.compute, setup.decode_rate)
        memory = Memory.STRICT if costs.preemption else Memory.UNBOUNDED
        self._replicas = Replicas(self.loop, self._times, memory, self)
        self._members: dict[ReplicaId, FleetMember] = {}
        self._queue: deque[Live] = deque()
        self._chance = Random(f"{seed}-router")
        least = setup.min_replicas if to_zero else max(1, setup.min_replicas)
        self._autoscaler = Autoscaler(rule, least, setup.max_gpus)
        self._opened = 0
        self._devices = Devices(setup.gpus_per_node, by_machine=setup.by_machine)
        self._succession = Succession(())
        self._arrived = 0

    def run(self, jobs: Sequence[Job]) -> None:
        """Run the arrivals of `jobs`, sorted by time, until the setup's horizon."""
        for _ in range(self._autoscaler.wanted):
            self._open(running=True)
        self._succession = Succession(jobs)
        self._await(self._succession.first, 0)
        self._control()
        self.loop.run(self._setup.horizon_s)

    # --- events of engines --------------------------------------------------------------------------------

    def stepped(self, step_s: float, tokens: float) -> None:
        """See `EngineObserver`."""
        self._observer.stepped(self.loop.now, step_s, tokens)

    def prefilling(self, live: Live) -> None:
        """See `EngineObserver`. The router is not concerned."""

    def filling(self, live: Live) -> None:
        """See `EngineObserver`. The router is not concerned."""

    def decoding(self, live: Live) -> None:
        """See `EngineObserver`. The router is not concerned."""

    def over(self, live: Live) -> None:
        """See `EngineObserver`."""
        assert live.at is not None
        member = self._members[live.at]
        member.ongoing -= 1
        now = self.loop.now
        alone = self._times.alone(live.job.prompt, live.job.output, self._costs.ingress_s)
        self._observer.finished(now, live.life(now, alone))
        if (job := self._succession.ended(live.id, now)) is not None:
            self.loop.at(job.arrival_s + self._costs.ingress_s, Turn.ARRIVAL, partial(self._take, job))
        self._end(member)
        self._route()

    def preempted(self, live: Live) -> None:
        """See `EngineObserver`."""
        self._observer.preempted(self.loop.now, live.need)

    def refused(self, request: RequestId) -> None:
        """See `EngineObserver`. No room is promised where no request moves."""

    # --- the router ---------------------------------------------------------------------------------------

    def _await(self, jobs: Sequence[Job], index: int) -> None:
        if index < len(jobs):
            time = jobs[index].arrival_s + self._costs.ingress_s
            self.loop.at(time, Turn.ARRIVAL, partial(self._arrive, jobs, index))

    def _arrive(self, jobs: Sequence[Job], index: int) -> None:
        self._take(jobs[index])
        self._await(jobs, index + 1)

    def _take(self, job: Job) -> None:
        self._queue.append(Live(job, self._arrived))
        self._arrived += 1
        self._route()
        self._replicas.settle()

    def _route(self) -> None:
        """Send queued requests to replicas, in their order, until none accepts the next one."""
        while self._queue and (member := self._chosen()) is not None:
            member.ongoing += 1
            self._replicas.place(self._queue.popleft(), member.engine.replica)

    def _chosen(self) -> FleetMember | None:
        most = self._rule.max_ongoing
        taking = [m for m in self._members.values() if m.running and not m.stopping]
        accepting = taking if most is None else [m for m in taking if m.ongoing < most]
        if not accepting:
            return None
        if self._rule.router is FleetRouter.LEAST_KV:
            return min(accepting, key=lambda member: self._kv(member))
        pair = self._chance.sample(accepting, 2) if len(accepting) > 1 else accepting
        return min(pair, key=lambda member: member.ongoing)

    def _kv(self, member: FleetMember) -> float:
        """Tokens of KV in use and of queued prompts."""
        engine = member.engine
        return engine.capacity - engine.free(self.loop.now) + sum(live.held for live in engine.scheduler.waiting)

    # --- the autoscaler -----------------------------------------------------------------------------------

    def _control(self) -> None:
        now = self.loop.now
        running = sum(m.running and not m.stopping for m in self._members.values())
        number = len(self.loads)
        coming = self._foreseen[number : number + self._ticks_ahead + 1]
        self.loads.append(self._load())
        self._apply(self._autoscaler.observe(now, max(self.loads[-1], *coming, 0.0), running))
        self._replicas.settle()
        self._tick(now)
        self.loop.at(now + TICK_S, Turn.EPOCH, self._control)

    def _load(self) -> float:
        """The load by the rule's measure, in the router's queue and in replicas that are not stopping.

        Serve leaves out stopping replicas, too. It also drops their earlier samples, which are still visible here for
        the look-back period.
        """
        members = [member for member in self._members.values() if not member.stopping]
        if self._rule.measure is LoadMeasure.REQUESTS:
            return len(self._queue) + sum(member.ongoing for member in members)
        queued = sum(live.held for live in self._queue)
        return (queued + sum(self._kv(member) for member in members)) / self._setup.capacity

    def _apply(self, wanted: int) -> None:
        """Open or stop replicas until the wanted number is running or starting."""
        up = [member for member in self._members.values() if not member.stopping]
        for _ in range(wanted - len(up)):
            self._open(running=not self._costs.startup_s)
        # Members are in the order of their opening.
        for member in sorted(reversed(up), key=self._stop_order(up))[: max(0, len(up) - wanted)]:
            member.stopping = True
            self._end(member)

    def _stop_order(self, up: Sequence[FleetMember]) -> Callable[[FleetMember], tuple[bool, int, str]]:
        """A sort key: starting replicas first and, where machines are counted, the machine with the fewest running."""
        if not self._setup.by_machine:
            return lambda member: (member.running, 0, "")
        running = Counter(member.engine.node for member in up if member.running)
        return lambda member: (member.running, running[member.engine.node], member.engine.node)

    def _open(self, running: bool) -> None:
        replica = ReplicaId(f"gpu-{self._opened}")
        self._opened += 1
        taken = self._devices.take(Occupant(SOLE_POOL, replica), "node-0")
        assert taken is not None, "the devices have no limit"
        block_tokens = self._setup.block_tokens
        cache = SimulatedCache(block_tokens) if block_tokens else None
        self._replicas.open(replica, taken.node, self._setup.capacity, cache)
        member = FleetMember(self._replicas.engines[replica], running)
        self._members[replica] = member
        if not running:
            self.loop.at(self.loop.now + self._costs.startup_s, Turn.START, partial(self._start, member))
        self._count()
        if running:
            self._route()

    def _start(self, member: FleetMember) -> None:
        if member.engine.replica in self._members:
            member.running = True
            self._route()
            self._replicas.settle()

    def _end(self, member: FleetMember) -> None:
        """Close a replica that is to stop and has no requests left."""
        if member.stopping and not member.ongoing:
            del self._members[member.engine.replica]
            self._replicas.close(member.engine.replica)
            self._devices.give_back(Occupant(SOLE_POOL, member.engine.replica))
            self._count()

    def _count(self) -> None:
        """Report the numbers of GPUs and of machines."""
        nodes = {member.engine.node for member in self._members.values()}
        self._observer.counted(self.loop.now, len(self._members), len(nodes) if self._setup.by_machine else None)


def requests_per_replica(jobs: Sequence[Job], capacity: Tokens) -> int:
    """The number of requests of mean size, half of their output generated, that fill a replica's KV cache."""
    tokens = sum(job.prompt + job.output / 2 for job in jobs) / max(1, len(jobs))
    return max(1, ceil(capacity / max(1.0, tokens)))
