"""The dry run: the cluster as it would be had all decisions been carried out.

Decided on the cluster as it is, the same moves would be found again in every epoch, and nothing would ever come of
them. So a shadow carries the plans out on an idealised cluster of its own, in which moves and starts take no time, and
decides on observations of that one. It begins as the real one was found; from then on the real one only says which
requests there are and how large they have become.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from policies.cluster.cluster import Cluster
from policies.cluster.supply import Supply
from policies.decision.deciding import decide_pool
from policies.decision.experience import Experience
from policies.decision.limits import Mode, Terms
from policies.decision.memory import PoolMemory
from policies.decision.observation import Pool, PoolReport, Resident, Status
from policies.model import UP, Bytes, Phase, ReplicaId, ReplicaState, RequestId, RequestLoad, Tokens
from policies.plan import Plan
from policies.rules.policy import Policy


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a scheduler that only observes would have done in `since_s` seconds.

    `replicas_now` exist and `replicas_needed` would, `requests_waiting` would wait for a place there. The GPU-seconds
    are the integrals of the two numbers over time, so a replica counts as one GPU. `moves` and their tokens are what
    it would have taken; `moved_bytes` is their KV, None as long as no replica has reported what a token takes.
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

    @property
    def gpu_seconds_saved(self) -> float:
        """Below zero where acting would have taken more: requests queue while replicas could be added."""
        return self.gpu_seconds_real - self.gpu_seconds_needed

    def to_json(self) -> dict[str, Any]:
        """Every figure by its name."""
        return asdict(self) | {"gpu_seconds_saved": self.gpu_seconds_saved}


class Shadow:
    """Follows reports of one pool. Equal reports give equal shadows; `experience` is what the real pool has shown."""

    def __init__(self, terms: Terms, experience: Experience, rule: Policy | None = None) -> None:
        self._terms = replace(
            terms, mode=Mode.ACT, moves_take_time=False, starts_take_time=False, may_wait_nowhere=True
        )
        self._experience = experience
        self._rule = rule
        self._began: float | None = None
        self._now = 0.0
        self._replicas_now = 0
        self._real_s = 0.0
        self._needed_s = 0.0
        self._moves = 0
        self._moved = 0
        self._real: dict[ReplicaId, Status] = {}
        self._residents: dict[RequestId, Resident] = {}
        self._fresh: dict[RequestId, None] = {}
        self._sizes: dict[RequestId, Tokens] = {}
        self._gone: dict[RequestId, None] = {}
        self._pool = Pool()
        self._homes: dict[RequestId, ReplicaId | None] = {}
        self._open: dict[ReplicaId, Status] = {}
        self._fewest = 0
        self._lost: tuple[ReplicaId, ...] = ()
        self._memory = self._new_memory(1)

    @property
    def cluster(self) -> Cluster:
        """The idealised cluster."""
        return self._memory.cluster

    def observe(self, seen: PoolReport, now: float) -> Plan:
        """Live through one epoch; returns what has been decided and done in the shadow.

        Nothing is, before all replicas that run have reported once: where their requests are is where it begins.
        """
        self._take(seen)
        if self._began is None:
            if not self._all_known():
                return Plan()
            self._found(seen)
            self._began = self._now = now
        self._pass(now)
        (plan,) = decide_pool(self._memory, self._report(), now)
        self._carry_out(plan)
        self._moves += len(plan.moves) + len(plan.evicted)
        self._moved += sum(move.tokens for move in plan.moves) + sum(eviction.tokens for eviction in plan.evicted)
        return plan

    @property
    def so_far(self) -> DryRun | None:
        """What it has come to by the last observation; None as long as it has not begun."""
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
        )

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

    def _all_known(self) -> bool:
        """Whether replicas run, and each that does not start has reported its capacity."""
        statuses = self._real.values()
        known = all(status.capacity or status.state is ReplicaState.STARTING for status in statuses)
        return known and any(status.state is ReplicaState.RUNNING for status in statuses)

    def _pass(self, now: float) -> None:
        """What the last epoch left held until now."""
        passed_s = now - self._now
        self._real_s += passed_s * self._replicas_now
        self._needed_s += passed_s * len(self.cluster.replicas)
        self._now = now
        self._replicas_now = sum(status.state is not ReplicaState.STOPPED for status in self._real.values())

    # --- the idealised one ----------------------------------------------------------------------------

    def _found(self, seen: PoolReport) -> None:
        """Begin with the cluster as it is. Replicas that start are up, since starting takes no time here; those that
        are to be gone are gone, and their requests wait as what is queued does.

        Of replicas that differ the smallest is the measure of all.
        """
        up = sorted((s for s in self._real.values() if s.state in UP), key=lambda s: (s.node, s.id))
        running = [status for status in up if status.state is ReplicaState.RUNNING]
        most = max(seen.pool.max_replicas or 0, len(up)) if seen.pool.max_replicas is not None else None
        capacity = min(status.capacity for status in running)
        self._fewest = max(self._terms.limits.limits.min_replicas, seen.pool.min_replicas)
        self._pool = replace(seen.pool, capacity=capacity, max_replicas=most)
        per_node = max(Counter(status.node for status in up).values())
        self._memory = self._new_memory(per_node)
        supply = Supply(per_node, most)
        homes = {status.id: self._opened(*supply.take(), running) for status in up}
        while len(self._open) < self._fewest and supply.left > 0:
            self._opened(*supply.take(), running)
        for request, resident in self._residents.items():
            waits = resident.load.phase is Phase.WAITING
            self._homes[request] = None if waits or resident.replica is None else homes.get(resident.replica)
        self._fresh = dict.fromkeys(sorted(self._residents, key=self._age))

    def _new_memory(self, per_node: int) -> PoolMemory:
        return PoolMemory(replace(self._terms, per_node=per_node), self._rule, self._experience)

    def _opened(self, replica: ReplicaId, node: str, like: Iterable[Status] = ()) -> ReplicaId:
        most = min((status.max_requests for status in like), default=None)
        known = next(iter(self._open.values()), None)
        most = most if most is not None else known.max_requests if known is not None else 1 << 30
        self._open[replica] = Status(replica, ReplicaState.RUNNING, node, self._pool.capacity, max_requests=most)
        return replica

    def _report(self) -> PoolReport:
        """What the idealised replicas would report."""
        fresh = [request for request in self._fresh if request in self._residents]
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
        ideal = replace(load, tokens=self._size(request), phase=Phase.DECODE, hop=0)
        return Resident(self._homes.setdefault(request, None), ideal)

    def _carry_out(self, plan: Plan) -> None:
        """Do what the plan says, at once."""
        for opening in plan.opened:
            self._opened(opening.replica, opening.node)
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
        """Tokens in whole blocks; what shares blocks with others counts in full. Never more than a replica has."""
        resident = self._residents[request]
        status = self._real.get(resident.replica) if resident.replica is not None else None
        block = status.block_size if status is not None else 1
        blocks = -(-max(1, resident.load.tokens) // block)
        return Tokens(min(blocks * block, self._pool.capacity))

    def _age(self, request: RequestId) -> tuple[float, RequestId]:
        load: RequestLoad = self._residents[request].load
        return -load.age_s, load.id
