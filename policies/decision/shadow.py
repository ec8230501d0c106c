"""The dry run: decisions without actions, on a shadow of the cluster in which all plans are carried out.

Decisions on the real cluster would repeat the same moves in every epoch, since nobody makes them. So the shadow carries
plans out on an idealised cluster of its own, in which moves and starts take no time, and decides on observations of it.
It begins as a copy of the real cluster. Afterwards it takes only the requests and their sizes from there. A
whole report has it begin again, with the figures so far.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from policies.cluster.cluster import Cluster
from policies.cluster.supply import Supply
from policies.cost.service import ServiceLevel
from policies.decision.deciding import decide_pool
from policies.decision.experience import Experience
from policies.decision.level.hindsight import HOUR_S, Hindsight, ShadowSample, hindsight
from policies.decision.level.service import ServiceReport
from policies.decision.limits import Mode, Terms
from policies.decision.memory import PoolMemory
from policies.decision.observation import Pool, PoolReport, Resident, Status
from policies.model import UP, Bytes, Phase, ReplicaId, ReplicaState, RequestId, RequestLoad, Tokens
from policies.plan import Plan
from policies.rules.policy import Policy


@dataclass(frozen=True, slots=True)
class DryRun:
    """The figures of a dry run of `since_s` seconds.

    `replicas_now` is the number of real replicas, `replicas_needed` that of the shadow, and `requests_waiting` the
    number of its requests without a replica. The GPU-seconds are the integrals of both numbers of replicas over time:
    a replica counts as one GPU. `moves` and `moved_tokens` are those of the shadow's moves, and `moved_bytes` is the
    size of their KV, None before a replica has reported the size of a token. `hindsight` is None without a service
    level, and in the first minute.
    """

    since_s: float
    replicas_now: int
    replicas_needed: int
    requests_waiting: int
    gpu_seconds_real: float
    gpu_seconds_needed: float
    moves: int
    moved_tokens: Tokens
    moved_bytes: Bytes | None = None
    hindsight: Hindsight | None = None

    @property
    def gpu_seconds_saved(self) -> float:
        """The GPU-seconds saved by `act`; below zero if it adds replicas for requests that queue in reality."""
        return self.gpu_seconds_real - self.gpu_seconds_needed

    def to_json(self) -> dict[str, Any]:
        """All figures, by name."""
        figures = asdict(self) | {"gpu_seconds_saved": self.gpu_seconds_saved}
        return figures | {"hindsight": None if self.hindsight is None else self.hindsight.to_json()}


class Shadow:
    """Follows the reports of one pool: equal reports give equal shadows. `experience` is that of the real pool, and
    `names` gives the names of the blocks of its requests' prompts, which decide how much requests share.
    """

    def __init__(
        self,
        terms: Terms,
        experience: Experience,
        rule: Policy | None = None,
        names: Callable[[RequestId], Sequence[int]] = lambda request: (),
    ) -> None:
        self._terms = replace(
            terms, mode=Mode.ACT, moves_take_time=False, starts_take_time=False, may_wait_nowhere=True
        )
        self._experience = experience
        self._rule = rule
        self._names = names
        self._began: float | None = None
        self._now = 0.0
        self._replicas_now = 0
        self._real_s = 0.0
        self._needed_s = 0.0
        self._moves = 0
        self._moved = 0
        self._samples: deque[ShadowSample] = deque()
        self._block_tokens = 1
        self._pool = Pool()
        self._memory = self._new_memory(1)
        self._restart()

    def _restart(self) -> None:
        """Forget the real cluster, and await the next copy of it."""
        self._is_copy = False
        self._real: dict[ReplicaId, Status] = {}
        self._residents: dict[RequestId, Resident] = {}
        self._fresh: dict[RequestId, None] = {}
        self._sizes: dict[RequestId, Tokens] = {}
        self._gone: dict[RequestId, None] = {}
        self._homes: dict[RequestId, ReplicaId | None] = {}
        self._open: dict[ReplicaId, Status] = {}
        self._lost: tuple[ReplicaId, ...] = ()

    @property
    def cluster(self) -> Cluster:
        """The idealised cluster."""
        return self._memory.cluster

    def observe(self, seen: PoolReport, now: float) -> Plan:
        """Run one epoch: decide, and carry the plan out on the shadow. Returns the plan.

        The shadow begins once every running replica has reported, since it copies their requests. Until then plans are
        empty.
        """
        if seen.whole:
            self._restart()
        self._take(seen)
        if self._began is not None:
            self._advance(now)
        if not self._is_copy:
            if not self._all_reported():
                return Plan()
            self._copy(seen)
            if self._began is None:
                self._began = self._now = now
                self._advance(now)
        (plan,) = decide_pool(self._memory, self._report(), now)
        self._carry_out(plan)
        self._moves += len(plan.moves) + len(plan.evicted)
        self._moved += sum(move.tokens for move in plan.moves) + sum(eviction.tokens for eviction in plan.evicted)
        self._sample(now)
        return plan

    @property
    def so_far(self) -> DryRun | None:
        """The figures as of the last observation; None before the beginning."""
        if self._began is None:
            return None
        return DryRun(
            since_s=self._now - self._began,
            replicas_now=self._replicas_now,
            replicas_needed=len(self.cluster.replicas),
            requests_waiting=len(self.cluster.waiting),
            gpu_seconds_real=self._real_s,
            gpu_seconds_needed=self._needed_s,
            moves=self._moves,
            moved_tokens=Tokens(self._moved),
            hindsight=hindsight(self._samples, self._now),
        )

    def _sample(self, now: float) -> None:
        """Add a sample for the hindsight if it differs from the last one. None while step times are unknown."""
        limits, predicted = self.cluster.speed, self._memory.predicted
        if limits is None:
            return
        level = self._memory.terms.service or ServiceLevel()
        report = ServiceReport(level, limits, predicted.slowest_step_s, predicted.late_replicas)
        keeps_level = report.state == "held" and not self.cluster.waiting
        sample = ShadowSample(now, self._replicas_now, len(self.cluster.replicas), keeps_level)
        if not self._samples or replace(self._samples[-1], at=now) != sample:
            self._samples.append(sample)
        while len(self._samples) > 1 and self._samples[1].at < now - HOUR_S:
            self._samples.popleft()

    # --- the real cluster -----------------------------------------------------------------------------

    def _take(self, seen: PoolReport) -> None:
        for replica in seen.lost:
            self._real.pop(replica, None)
        self._real.update((status.id, status) for status in seen.replicas)
        for request in seen.gone:
            del self._residents[request]
            self._homes.pop(request, None)
            self._gone[request] = None
        for resident in seen.requests:
            self._residents[resident.load.id] = resident
            self._fresh[resident.load.id] = None
        for request, tokens in seen.sizes.items():
            resident = self._residents[request]
            self._residents[request] = replace(resident, load=replace(resident.load, tokens=tokens))
            self._sizes[request] = tokens

    def _all_reported(self) -> bool:
        """True if a replica is running, and every replica that is not starting has reported its capacity."""
        statuses = self._real.values()
        reported = all(status.capacity or status.state is ReplicaState.STARTING for status in statuses)
        return reported and any(status.state is ReplicaState.RUNNING for status in statuses)

    def _advance(self, now: float) -> None:
        """Advance the time to `now`; both numbers of replicas were constant since the last epoch."""
        passed_s = now - self._now
        self._real_s += passed_s * self._replicas_now
        self._needed_s += passed_s * len(self.cluster.replicas)
        self._now = now
        self._replicas_now = sum(status.state is not ReplicaState.STOPPED for status in self._real.values())

    # --- the idealised cluster ------------------------------------------------------------------------

    def _copy(self, seen: PoolReport) -> None:
        """Copy the real cluster. Starting replicas are up, since starts take no time here. Replicas that are about to
        stop are left out; their requests wait, as queued ones do.

        If replicas differ, all have the capacity of the smallest.
        """
        up = sorted((s for s in self._real.values() if s.state in UP), key=lambda s: (s.node, s.id))
        running = [status for status in up if status.state is ReplicaState.RUNNING]
        limit = max(seen.pool.max_replicas or 0, len(up)) if seen.pool.max_replicas is not None else None
        capacity = min(status.capacity for status in running)
        self._block_tokens = running[0].block_size
        self._pool = replace(seen.pool, capacity=capacity, max_replicas=limit)
        per_node = max(Counter(status.node for status in up).values())
        self._memory = self._new_memory(per_node)
        supply = Supply(per_node, limit)
        homes = {status.id: self._add_replica(*supply.take(), running) for status in up}
        while len(self._open) < self._pool.min_replicas and supply.left > 0:
            self._add_replica(*supply.take(), running)
        for request, resident in self._residents.items():
            waits = resident.load.phase is Phase.WAITING
            self._homes[request] = None if waits or resident.replica is None else homes.get(resident.replica)
        self._fresh = dict.fromkeys(sorted(self._residents, key=self._age))
        self._is_copy = True

    def _new_memory(self, per_node: int) -> PoolMemory:
        return PoolMemory(replace(self._terms, per_node=per_node), self._rule, self._experience)

    def _add_replica(self, replica: ReplicaId, node: str, like: Iterable[Status] = ()) -> ReplicaId:
        """Add a running replica with the smallest `max_requests` of `like` or, without these, of an open replica."""
        most = min((status.max_requests for status in like), default=None)
        other = next(iter(self._open.values()), None)
        most = most if most is not None else other.max_requests if other is not None else 1 << 30
        block = self._block_tokens
        self._open[replica] = Status(replica, ReplicaState.RUNNING, node, self._pool.capacity, block, max_requests=most)
        return replica

    def _report(self) -> PoolReport:
        """The changes of the idealised cluster since the last call."""
        fresh = [request for request in self._fresh if request in self._residents]
        for request in fresh:
            self._memory.router.take_names(request, self._names(request))
        report = PoolReport(
            self._pool,
            tuple(status for status in self._open.values() if self._memory.statuses.get(status.id) != status),
            self._lost,
            tuple(self._ideal(request) for request in fresh),
            tuple(self._gone),
            {request: self._size(request) for request in self._sizes if request not in self._fresh},
        )
        self._gone, self._fresh, self._sizes, self._lost = {}, {}, {}, ()
        return report

    def _ideal(self, request: RequestId) -> Resident:
        load = self._residents[request].load
        # Any replica of the shadow runs any adapter.
        ideal = replace(load, tokens=self._size(request), phase=Phase.DECODE, hop=0, adapter=None)
        return Resident(self._homes.setdefault(request, None), ideal)

    def _carry_out(self, plan: Plan) -> None:
        """Carry the plan out, at once."""
        for opening in plan.opened:
            self._add_replica(opening.replica, opening.node)
        for eviction in plan.evicted:
            self._homes[eviction.request] = None
            self._fresh[eviction.request] = None
        for move in plan.moves:
            self._homes[move.request] = move.target
            self._fresh[move.request] = None
        for placement in plan.placements:
            self._homes[placement.request] = placement.replica
            self._fresh[placement.request] = None
        for replica in plan.closed:
            self._open.pop(replica, None)
        self._lost = plan.closed

    def _size(self, request: RequestId) -> Tokens:
        """The request's size in whole blocks, in tokens, at most a replica's capacity."""
        resident = self._residents[request]
        status = self._real.get(resident.replica) if resident.replica is not None else None
        block = status.block_size if status is not None else 1
        blocks = -(-max(1, resident.load.tokens) // block)
        return Tokens(min(blocks * block, self._pool.capacity))

    def _age(self, request: RequestId) -> tuple[float, RequestId]:
        load: RequestLoad = self._residents[request].load
        return -load.age_s, load.id
