"""The decision: one pure function from an observation and a memory to plans, and a small entry of it for arrivals.

An epoch of a pool:

    observe      the cluster becomes what was observed; what has changed is what the policy reacts to
    evacuate     what is on replicas that are to be gone is placed elsewhere, in every mode
    rebalance    the policy reacts, within the epoch's budget of moves
    open         what is missing to the slack
    admit        of what was decided, what may be under way at once and has a path stays decided
    close        what is empty and not needed
    settle       the difference to where the epoch began is the plan

So a plan is carried out as it is: nothing is left out of it afterwards. A move that could not begin is reported in a
later observation, and that is how the memory learns of it.
"""

from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, isfinite

from policies.cluster.changes import Arrival, Changes
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.cluster.trail import Trace
from policies.decision.limits import Limits, Mode, Terms
from policies.decision.memory import PoolMemory, finish
from policies.decision.observation import ENGINE, Observation, PoolId, PoolReport
from policies.decision.placement import Decision, NoReplica, Place, Placed, Queue
from policies.model import Phase, ReplicaId, ReplicaState, Tokens
from policies.paths.choice import URGENCY, Choice
from policies.plan import Move, Plan, Reason
from policies.rules.policy import NONE, Barred, Policy

Plans = Mapping[PoolId, tuple[Plan, ...]]
"""What is to be done about every pool that was observed: plans to be carried out one after the other.

There is one, unless every change is decided by itself.
"""


@dataclass(slots=True)
class SchedulerMemory:
    """What decisions remember of every pool. Pools have the same terms, and nothing else in common."""

    terms: Terms = field(default_factory=Terms)
    rule: Policy | None = None
    pools: dict[PoolId, PoolMemory] = field(default_factory=dict)

    def pool(self, pool: PoolId = ENGINE) -> PoolMemory:
        """The memory of one pool, which is empty before its first observation."""
        if pool not in self.pools:
            self.pools[pool] = PoolMemory(self.terms, self.rule)
        return self.pools[pool]


def decide(memory: SchedulerMemory, observation: Observation) -> Plans:
    """The plans of an epoch. Updates the memory; equal histories give equal plans."""
    return finish(decide_in_slices(memory, observation))


def decide_in_slices(memory: SchedulerMemory, observation: Observation) -> Generator[None, None, Plans]:
    """As `decide`, pausing every few milliseconds. During a pause `place` and `order_by_hand` may be called.

    A history says after how many slices each of these calls came: then equal histories give equal plans here, too.
    """
    plans = {}
    for seen in observation.pools:
        pool = seen.pool.deployment
        plans[pool] = yield from _decide_pool(memory.pool(pool), seen, observation.now)
    return plans


def decide_pool(memory: PoolMemory, seen: PoolReport, now: float) -> tuple[Plan, ...]:
    """The plans of an epoch for one pool."""
    return finish(_decide_pool(memory, seen, now))


def _decide_pool(memory: PoolMemory, seen: PoolReport, now: float) -> Generator[None, None, tuple[Plan, ...]]:
    terms, cluster = memory.terms, memory.cluster
    changes = yield from memory.observe_in_slices(seen, now)
    limits = _limits(memory, seen)
    rate = memory.experience.decode_rate
    cluster.reserve(headroom(memory.rule, limits, rate), lead(limits, rate))
    limits.begin(cluster, now)
    _evacuate(memory)
    if terms.mode is not Mode.ACT:
        return (_settle(memory, limits, now),)
    while cluster.up() < cluster.min_replicas and cluster.open() is not None:
        pass
    changes = replace(changes, waiting=tuple(cluster.in_order()))
    if not terms.batched:
        return tuple(_one_by_one(memory, changes, limits, now))
    memory.rule.rebalance(cluster, changes)
    limits.open_slack(cluster)
    return (_settle(memory, limits, now, close=True),)


def place(
    memory: PoolMemory, arrival: Arrival, now: float, exclude: Collection[ReplicaId] = (), label: str = ""
) -> Decision:
    """Choose a replica for an arrival, never one in `exclude`; the request counts there from then on.

    A request that is on a replica already is placed as if it were not. What fits nowhere queues where the fewest
    requests are, those in the engine's queue included; of equals, where the most is free.
    """
    cluster, barred = memory.cluster, frozenset(exclude)
    if all(replica.id in barred for replica in cluster.running()):
        return NoReplica()
    if arrival.id in cluster.requests:
        cluster.remove_request(cluster.requests[arrival.id])
    request = cluster.add_request(arrival.id, arrival.tokens)
    placing = choose(memory, request, barred)
    replica = cluster.replicas[placing.replica]
    cluster.locate(request, replica)
    cluster.pin(request)
    expires_at = now + memory.terms.placement_ttl_s
    memory.place(request.id, Placed(label, replica.id, arrival.tokens, now, expires_at))
    return placing


def where(memory: PoolMemory, arrival: Arrival, exclude: Collection[ReplicaId] = ()) -> Decision:
    """Where a request would go if it were placed now; nothing changes."""
    cluster, barred = memory.cluster, frozenset(exclude)
    if all(replica.id in barred for replica in cluster.running()):
        return NoReplica()
    known = cluster.requests.get(arrival.id)
    request = known or cluster.add_request(arrival.id, arrival.tokens)
    chosen = choose(memory, request, barred)
    if known is None:
        cluster.remove_request(request)
    return chosen


def choose(memory: PoolMemory, request: Request, barred: Barred) -> Place | Queue:
    """Where a request would be placed. Raises `ValueError` if every running replica is barred."""
    cluster = memory.cluster
    chosen = memory.rule.place(cluster, request, barred)
    if chosen is not None:
        return Place(chosen.id)
    others = (replica for replica in cluster.running() if replica.id not in barred)
    return Queue(min(others, key=lambda r: (len(r.requests) + r.queued, -r.free, r.id)).id)


def order_by_hand(memory: PoolMemory, move: Move, now: float) -> Move:
    """An operator's move with predictions and, unless it has one, a path; it is under way from then on."""
    choice = memory.estimates.decide(move, _busy(memory), now)
    routed = replace(_routed(move, choice), path=move.path or choice.path)
    memory.order(routed, now)
    return routed


def headroom(policy: Policy, limits: Limits, decode_rate: float) -> Tokens:
    """The growth to keep free for each request, in tokens, for `Cluster.reserve`.

    `decode_rate` is how fast a request grows, in tokens per second. Of policy and limits the more cautious one counts.
    """
    return Tokens(ceil((limits.lead_s + max(policy.headroom_s, limits.headroom_s)) * decode_rate))


def lead(limits: Limits, decode_rate: float) -> Tokens:
    """By how much a request grows until a decision takes effect, in tokens, for `Cluster.reserve`."""
    return Tokens(ceil(limits.lead_s * decode_rate))


def one_by_one(changes: Changes) -> Iterator[Changes]:
    """Every change alone, as far as the decisions on the earlier ones have left anything to decide."""
    for departure in changes.departed:
        yield Changes(departed=(departure,))
    for crossing in changes.crossed:
        if crossing.request.replica is not None:
            yield Changes(crossed=(crossing,))
    yield Changes()  # growth within a class
    for request in changes.waiting:
        if request.replica is None:
            yield Changes(waiting=(request,))


# --- the parts of an epoch ----------------------------------------------------------------------------


def _limits(memory: PoolMemory, seen: PoolReport) -> Limits:
    limits = memory.terms.limits.now(memory.experience)
    return replace(limits, min_replicas=max(limits.min_replicas, seen.pool.min_replicas))


def _evacuate(memory: PoolMemory) -> None:
    """Place what is on replicas that are to be gone, the largest first. What fits nowhere is left to the policy."""
    cluster = memory.cluster
    leaving = (cluster.requests[request] for request in memory.leaving)
    for request in sorted(leaving, key=lambda q: (-q.tokens, q.order)):
        strangers = _strangers(memory, memory.homes[request.id])
        target = memory.rule.place(cluster, request, strangers) or _with_blocks(cluster, request, strangers)
        if target is not None:
            cluster.place(request, target)


def _with_blocks(cluster: Cluster, request: Request, barred: Barred) -> Replica | None:
    """The replica with the most free blocks, if the request fits there now: an evacuation cannot be choosy."""
    fitting = [r for r in cluster.running() if r.accepts and r.free >= request.tokens and r.id not in barred]
    return max(fitting, key=lambda r: r.free, default=None)


def _strangers(memory: PoolMemory, home: ReplicaId) -> Barred:
    """Replicas on which a request from `home` cannot continue: they run another version of the model."""
    own = memory.statuses[home].model
    return frozenset(status.id for status in memory.statuses.values() if status.model != own) or NONE


def _one_by_one(memory: PoolMemory, changes: Changes, limits: Limits, now: float) -> Iterator[Plan]:
    """The paper's Algorithm 1: each change has a plan of its own."""
    for change in one_by_one(changes):
        memory.rule.rebalance(memory.cluster, change)
        yield _settle(memory, limits, now)
    limits.open_slack(memory.cluster)
    yield _settle(memory, limits, now, close=True)


def _settle(memory: PoolMemory, limits: Limits, now: float, close: bool = False) -> Plan:
    """Take what has been decided as a plan that can be carried out as it is."""
    cluster, terms = memory.cluster, memory.terms
    touched = [request for request, _ in cluster.decided()]
    admitted = None if terms.is_ideal else _admit(memory, now)
    idle = {r.id: r.idle_since for r in cluster.running()} if close else {}
    if close:
        cluster.close_idle(now, limits.linger_s)
    plan = cluster.settle()
    memory.closing({replica: idle[replica] for replica in plan.closed})
    if limits.cooldown_s:
        for move in plan.moves:
            cluster.rest(move.request, now + limits.cooldown_s)
    if not terms.may_wait_nowhere:
        on_replicas = memory.homes.keys() | {eviction.request for eviction in plan.evicted}
        plan = replace(plan, placements=tuple(p for p in plan.placements if p.request not in on_replicas), evicted=())
    if admitted is not None:
        plan = replace(plan, moves=admitted[0], deferred=admitted[1])
    memory.ordered(plan, touched, now)
    return plan


# --- which of the decided moves are made --------------------------------------------------------------


def _admit(memory: PoolMemory, now: float) -> tuple[tuple[Move, ...], tuple[Move, ...]]:
    """The moves to be made, and those that have to wait for links and prefills; all others are taken back."""
    cluster = memory.cluster
    decided = {}
    for request, trace in cluster.decided():
        move = _move(memory, request, trace)
        if move is not None and _is_sensible(memory, move):
            decided[request.id] = move
        elif move is not None or (trace.origin is not None and not memory.terms.may_wait_nowhere):
            cluster.take_back(request)
    if not memory.terms.moves_take_time:
        return tuple(decided.values()), ()
    admitted = _within_bounds(memory, sorted(decided.values(), key=lambda move: URGENCY[move.reason]), now)
    waiting = frozenset(q for q in decided if memory.phase(q) is Phase.WAITING)
    choices = memory.estimates.choose(admitted, _busy(memory), now, waiting) if admitted else []
    routed = {c.request: _routed(decided[c.request], c) for c in choices}
    moves = tuple(move for move in routed.values() if move.path is not None)
    deferred = tuple(move for move in routed.values() if move.path is None)
    made = {move.request for move in moves}
    for request_id in decided:
        if request_id not in made:
            cluster.take_back(cluster.requests[request_id])
    return moves, deferred


def _move(memory: PoolMemory, request: Request, trace: Trace) -> Move | None:
    """The move that takes a request to where it was decided to be; None if that takes none, or cannot be yet."""
    target = request.replica
    if target is None or target.state is not ReplicaState.RUNNING:
        return None
    source = memory.homes.get(request.id) if trace.origin is None else trace.origin.id
    if source is None or source == target.id or (trace.evicted and memory.terms.may_wait_nowhere):
        return None
    if trace.origin is None:
        reason = Reason.EVACUATE if request.id in memory.leaving else Reason.ADMIT
    else:
        reason = Reason.OVERLOAD if trace.evicted else trace.reason
    return Move(request.id, source, target.id, request.tokens, reason, trace.unit)


def _is_sensible(memory: PoolMemory, move: Move) -> bool:
    """Whether the request can continue there, has no move under way, and is not led off a replica in vain."""
    statuses = memory.statuses
    source, target = statuses.get(move.source), statuses.get(move.target)
    stranger = source is not None and target is not None and source.model != target.model
    in_vain = move.reason is Reason.DRAIN and memory.cluster.is_starting()
    return not stranger and not in_vain and move.request not in memory.under_way


def _within_bounds(memory: PoolMemory, moves: list[Move], now: float) -> list[Move]:
    """Those that may begin beside what is under way, the first ones first; an evacuation is barred by no failures."""
    terms = memory.terms
    at_once = float("inf") if terms.moves_at_once is None else terms.moves_at_once
    per_replica = float("inf") if terms.moves_per_replica is None else terms.moves_per_replica
    busy = Counter(end for move in _busy(memory) for end in (move.source, move.target))
    left = at_once - len(memory.under_way)
    admitted = []
    for move in moves:
        ends = (move.source, move.target)
        barred = move.reason is not Reason.EVACUATE and memory.breaker.blocks(ends, now)
        if left > 0 and not barred and all(busy[end] < per_replica for end in ends):
            admitted.append(move)
            busy.update(ends)
            left -= 1
    return admitted


def _busy(memory: PoolMemory) -> list[Move]:
    return [underway.move for underway in memory.under_way.values()]


def _routed(move: Move, choice: Choice) -> Move:
    """The move with its path and what both paths are predicted to take; "never" is no prediction."""
    kv_s, tokens_s = (seconds if isfinite(seconds) else None for seconds in (choice.kv_s, choice.tokens_s))
    return replace(move, path=choice.path, kv_s=kv_s, tokens_s=tokens_s)
