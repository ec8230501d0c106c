"""Histories of a cluster, to play any policy through: what happens between epochs, and what must hold after each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from random import Random

from policies.bounds import least_bins
from policies.cluster.capacity import overloaded, spare_capacity
from policies.cluster.changes import Arrival
from policies.cluster.cluster import Cluster
from policies.cluster.conditions import EpochConditions
from policies.cluster.supply import Supply
from policies.cost.service import SpeedLimit
from policies.decision.conditions import lead
from policies.decision.limits import DemandHistory, Limits
from policies.model import ReplicaId, ReplicaState, RequestId, Tokens
from policies.plan import Plan
from policies.precedence import Precedence
from policies.rules.policy import Policy
from policies.rules.registry import POLICIES, policy
from tests.policies.rehearsal import Before, before, violations
from tests.policies.stepping import Events, begin, decide

CAPACITY = Tokens(48)

SPECS = [*POLICIES, "load_balance:drain=true", "best_fit:overload=stall"]
"""Every policy as it comes, and options that decide otherwise."""

MOVED, STAYED, UNDER_WAY = range(3)
"""How a move is going."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The constants of a history. One epoch takes a second. Requests share blocks of `block_tokens` tokens; 0: none."""

    holds: bool = False
    starts_as: ReplicaState = ReplicaState.RUNNING
    supply: int | None = None
    headroom: int = 0
    least: int = 0
    limits: Limits = field(default_factory=Limits)
    speed: SpeedLimit | None = None
    block_tokens: int = 0


IDEAL = Setting()
"""The paper's model: moves and new replicas take no time, and there is no limit to either."""

COSTLY = Setting(holds=True, supply=6, headroom=2, limits=Limits(moves_per_epoch=3, cooldown_s=2.0))
"""Moves take time, and the numbers of moves and replicas are limited."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The events before one epoch. Numbers stand for requests and replicas, counted around.

    `grows` are the tokens by which running requests grow, `fates` how moves under way are going, `ranks` those of the
    arrivals. Of `prompts`, those begin alike that have the same low bits; one below 0 shares no block, 0 has none.
    """

    arrivals: Sequence[int] = ()
    departs: Sequence[int] = ()
    grows: Sequence[int] = (0,)
    fates: Sequence[int] = (MOVED,)
    loses: int | None = None
    starts: bool = True
    ranks: Sequence[int] = (0,)
    prompts: Sequence[int] = (0,)


def names(prompt: int, blocks: int, arrival: int) -> tuple[int, ...]:
    """The names of a prompt's blocks: every second one depends on one more bit of its number."""
    if not prompt:
        return ()
    if prompt < 0:
        return tuple((-1 - arrival << 32) - block for block in range(blocks))
    return tuple((block << 32) + prompt % (1 << block // 2 + 1) for block in range(blocks))


class World:
    """A cluster that things happen to, and a policy that reacts."""

    def __init__(self, policy: Policy, setting: Setting) -> None:
        self.cluster = Cluster(
            CAPACITY,
            Supply(limit=setting.supply),
            conditions=EpochConditions(
                max(setting.headroom, lead(setting.limits, 1.0)),
                lead(setting.limits, 1.0),
                setting.speed,
                min_replicas=setting.least,
            ),
            holds=setting.holds,
            starts_as=setting.starts_as,
        )
        if policy.knows_sharing:
            self.cluster.share_blocks(setting.block_tokens, lambda request: ())
        self.demand = DemandHistory()
        self.policy = policy
        self.setting = setting
        self.now = 0.0
        self._alive: set[RequestId] = set()
        self._arrivals = 0
        self._moved_at: dict[RequestId, float] = {}

    def happen(self, tick: Tick) -> Events:
        """The events of a tick in this cluster. A second passes before them."""
        requests, replicas = self.cluster.requests, list(self.cluster.replicas.values())
        fates = list(zip(self.cluster.held, cycle(tick.fates), strict=False))
        departed = list(dict.fromkeys(list(requests)[i % len(requests)] for i in tick.departs if requests))
        grows = cycle(tick.grows)
        sizes = {
            q.id: Tokens(min(q.tokens + next(grows), CAPACITY))
            for q in requests.values()
            if q.replica is not None and q.id not in departed
        }
        self.now += 1.0
        ranks = (Precedence(f"rank {rank}", self.now) for rank in cycle(tick.ranks))
        arrived = [
            Arrival(
                RequestId(f"r{self._arrivals + i}"),
                Tokens(n),
                names(prompt, n, self._arrivals + i),
                precedence=precedence,
            )
            for i, (n, prompt, precedence) in enumerate(zip(tick.arrivals, cycle(tick.prompts), ranks, strict=False))
        ]
        self._arrivals += len(arrived)
        self._alive = self._alive - set(departed) | {arrival.id for arrival in arrived}
        return Events(
            sizes=sizes,
            departed=departed,
            arrived=arrived,
            moved=[r for r, fate in fates if fate == MOVED],
            stayed=[r for r, fate in fates if fate == STAYED],
            started=[r.id for r in replicas if r.state is ReplicaState.STARTING and tick.starts],
            lost=[replicas[tick.loses % len(replicas)].id] if replicas and tick.loses is not None else (),
        )

    def advance(self, tick: Tick) -> tuple[Before, Plan]:
        """Live through the tick, and decide."""
        changes = begin(self.cluster, self.happen(tick), self.setting.limits, self.now, self.demand)
        was = before(self.cluster)
        return was, decide(self.cluster, changes, self.policy, self.setting.limits, self.now)

    def wrong(self, before: Before, plan: Plan) -> list[str]:
        """The invariants that a cluster violates after an epoch."""
        self.cluster.check_integrity()
        wrong = violations(plan, before) + self._beyond_limits(before, plan)
        if carried_out(plan, before) != places(self.cluster):
            wrong.append("the plan does not lead to where the cluster is")
        if set(self.cluster.requests) != self._alive:
            wrong.append("a request is lost")
        # Without slack nothing need be free: what waits may wait for the room that a move is making.
        slack = self.cluster.conditions.slack
        if slack and self.cluster.supply.left > 0 and spare_capacity(self.cluster) < slack:
            wrong.append(f"{spare_capacity(self.cluster)} tokens are free instead of {slack}")
        starting = sum(r.state is ReplicaState.STARTING for r in self.cluster.replicas.values())
        if plan.opened and not slack and starting > len(self._alive):
            wrong.append(f"{starting} replicas start for {len(self._alive)} requests")
        if not self._is_short() and plan.queued:
            wrong.append(f"{plan.queued} wait though a replica may be opened")
        wrong += self._overtaken(before, plan)
        wrong += [f"{r.id} is overloaded" for r in overloaded(self.cluster) if not self._may_overload(r.id)]
        if not plan.queued and not overloaded(self.cluster):
            least = least_bins(self.cluster.requests.values(), CAPACITY, self.cluster.prompts)
            if len(self.cluster.running()) < least:
                wrong.append(f"{len(self.cluster.running())} replicas where {least} are needed")
        return wrong

    def _beyond_limits(self, before: Before, plan: Plan) -> list[str]:
        limits = self.setting.limits
        wrong = []
        if limits.moves_per_epoch is not None and len(plan.moves) > limits.moves_per_epoch:
            wrong.append(f"{len(plan.moves)} moves")
        for move in plan.moves:
            if self.now - self._moved_at.get(move.request, -limits.cooldown_s) < limits.cooldown_s:
                wrong.append(f"{move.request} is moved again")
            self._moved_at[move.request] = self.now
        if plan.closed and len(self.cluster.running()) < self.setting.least:
            wrong.append(f"{plan.closed} are closed")
        return wrong

    def _overtaken(self, before: Before, plan: Plan) -> list[str]:
        """Requests that wait while a later one in line, which is no smaller, has been placed."""
        requests = self.cluster.requests
        placed = [requests[p.request] for p in plan.placements if p.request in before.waiting]
        waiting = [requests[q] for q in plan.queued if q in before.waiting]
        return [
            f"{late.id} is placed before {early.id}"
            for late in placed
            for early in waiting
            if early.turn < late.turn and early.tokens <= late.tokens and late.prompt is None
        ]

    def _is_short(self) -> bool:
        """True if there is no replica that can be used at once."""
        return self.cluster.supply.left <= 0 or self.setting.starts_as is not ReplicaState.RUNNING

    def _may_overload(self, name: ReplicaId) -> bool:
        """True if there is an excuse for an overload."""
        stalls = getattr(self.policy, "overload", None) == "stall"
        there = self.cluster.replicas[name].requests.values()
        limited = self.setting.limits.moves_per_epoch is not None
        return stalls or limited or self._is_short() or not all(q.movable for q in there)


def played(policy: Policy, setting: Setting, history: Sequence[Tick]) -> Iterator[tuple[Before, Plan, list[str]]]:
    """Every epoch of a history: what its plan was made for, the plan, and what is wrong with it."""
    world = World(policy, setting)
    for tick in history:
        before, plan = world.advance(tick)
        yield before, plan, world.wrong(before, plan)


def places(cluster: Cluster) -> dict[ReplicaId, set[RequestId]]:
    """Where every request is that is somewhere."""
    return {name: set(r.requests) for name, r in cluster.replicas.items()}


def carried_out(plan: Plan, before: Before) -> dict[ReplicaId, set[RequestId]]:
    """Where every request is once a plan is carried out."""
    there = {name: set(host.requests) for name, host in before.hosts.items()} | {o.replica: set() for o in plan.opened}
    for move in plan.moves:
        there[move.source].remove(move.request)
        there[move.target].add(move.request)
    for eviction in plan.evicted:
        there[eviction.source].remove(eviction.request)
    for placement in plan.placements:
        there[placement.replica].add(placement.request)
    return {name: requests for name, requests in there.items() if name not in plan.closed}


def random_history(seed: int, epochs: int = 30) -> list[Tick]:
    """Busy epochs, some of which lose a replica."""
    random = Random(seed)
    return [
        Tick(
            arrivals=[random.randint(1, random.choice([6, 12, 24, 48])) for _ in range(random.randint(0, 6))],
            departs=[random.randrange(99) for _ in range(random.randint(0, 4))],
            grows=[random.randint(0, 3) for _ in range(3)],
            fates=[random.choice([MOVED, STAYED, UNDER_WAY]) for _ in range(4)],
            loses=random.randrange(9) if random.random() < 0.1 else None,
            starts=random.random() < 0.5,
            ranks=[random.randint(-1, 2) for _ in range(3)],
            prompts=[random.randrange(1 << 8) for _ in range(4)],
        )
        for _ in range(epochs)
    ]


def main() -> None:
    """Print every plan of some histories, for comparison with those of another process."""
    for spec in SPECS:
        for setting in IDEAL, COSTLY:
            for seed in range(3):
                for _, plan, _ in played(policy(spec), setting, random_history(seed)):
                    print(spec, plan)


if __name__ == "__main__":
    main()
