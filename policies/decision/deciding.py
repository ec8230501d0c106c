"""The decision: one pure function from an observation and a memory to plans, with a small entry for arrivals.

All pools are observed before any decides. The steps of an epoch of a pool:

    observe      update the cluster with the observation, and list the changes for the policy
    assign       assign roles, if prefill and decoding are disaggregated
    evacuate     place the requests of replicas that are about to stop on other replicas, in every mode
    hand over    move requests from replicas for prefills to those for decoding
    rebalance    let the policy react to the changes, within the epoch's budget of moves
    open         open replicas until the slack is free
    pair         have replicas give each other layers, or get them back
    admit        keep the moves that are within the bounds and have a path, and take the others back
    close        close empty replicas that are not needed
    settle       return the difference from the beginning of the epoch as the plan

Plans are carried out completely: no later step removes a part. If a move cannot begin, a later observation reports its
failure to the memory.

In the mode `off`, only evacuations are decided. `observe` first takes all steps of `act` for a proposal, takes them
back, and then decides as `off`.
"""

from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, isfinite
from typing import NamedTuple

from policies.cluster.capacity import close_idle, is_starting, needed_replicas, spare_capacity
from policies.cluster.changes import Arrival, Changes
from policies.cluster.cluster import Cluster
from policies.cluster.decisions import Trace
from policies.cluster.replica import Replica, Request
from policies.cluster.search import fits
from policies.cluster.sizes import size_on
from policies.decision.conditions import epoch_conditions, learn_demand, learn_risk, level_bounds
from policies.decision.devices import DivisionMemory
from policies.decision.disaggregation.prefills import is_handed_over
from policies.decision.disaggregation.roles import (
    assign_roles,
    barred_by_role,
    hand_over_prefills,
    hand_over_target,
    soonest_prefills,
)
from policies.decision.learned import Learned
from policies.decision.level.scaling import Scaled, ScaleUp
from policies.decision.level.service import replica_speed
from policies.decision.limits import Limits, Mode, Terms
from policies.decision.matching import Basis, MatchedReplica, PromptMatch, Routed
from policies.decision.memory import PoolMemory
from policies.decision.observation import Observation, PoolReport
from policies.decision.pairs import PairingView, decide_pairs, member_loads
from policies.decision.placement import Decision, NoReplica, Place, Placed, Queue
from policies.decision.slices import finish
from policies.model import RETRY_S, Blocks, Phase, PoolId, ReplicaId, ReplicaState, RequestId, Role
from policies.paths.choice import URGENCY, Choice
from policies.plan import Move, Pairs, Plan, Proposal, Reason
from policies.prefix.reuse import worth_returning
from policies.prefix.routing import Routing
from policies.prefix.tree import HeldPrefix
from policies.rules.policy import NONE, Barred, Policy

Plans = Mapping[PoolId, tuple[Plan, ...]]
"""The plans of every observed pool, in the order of execution: one plan, or one per change without batching."""


class Admitted(NamedTuple):
    """The moves of a plan, and those deferred for lack of link or prefill capacity."""

    moves: tuple[Move, ...]
    deferred: tuple[Move, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryLeft:
    """The KV blocks that replicas get by the newest division of memory, and the replicas that wait for any."""

    growth: Mapping[ReplicaId, Blocks] = field(default_factory=dict)
    waiting: frozenset[ReplicaId] = frozenset()


@dataclass(slots=True)
class SchedulerMemory:
    """The memories of all pools. `terms` has those of each; pools have the mode and the memory of devices in common."""

    terms: Terms = field(default_factory=Terms)
    rule: Policy | None = None
    pools: dict[PoolId, PoolMemory] = field(default_factory=dict)
    division: DivisionMemory = field(default_factory=DivisionMemory)

    def pool(self, pool: PoolId) -> PoolMemory:
        """The memory of one pool, empty before its first observation."""
        if pool not in self.pools:
            terms = self.terms.of(pool)
            self.pools[pool] = PoolMemory(terms, self.rule, Learned(terms, len(self.pools)))
        return self.pools[pool]

    def set_mode(self, mode: Mode) -> None:
        """Use the plans of all pools in this way from the next epoch on."""
        self.terms = replace(self.terms, mode=mode)
        self.division.newest = {}
        for pool in self.pools.values():
            pool.set_mode(mode)


def decide(memory: SchedulerMemory, observation: Observation) -> Plans:
    """Decide an epoch of all pools. Updates the memory; equal histories give equal plans."""
    return finish(decide_in_slices(memory, observation))


def decide_in_slices(memory: SchedulerMemory, observation: Observation) -> Generator[None, None, Plans]:
    """As `decide`, with a pause every few milliseconds.

    All pools are observed before any decides. In between, the memory of devices is divided, if the mode is not `off`;
    `memory.division` has the result.

    During pauses `place` and `order_by_hand` may be called. Plans depend on the pauses in which the calls happen, so
    recordings contain the number of slices before each call.
    """
    now, observed = observation.now, []
    for seen in observation.pools:
        pool = memory.pool(seen.pool.deployment)
        pool.learned.experience.observe_waits(observation.waiting, now)
        changes = yield from pool.observe_in_slices(seen, now)
        observed.append((pool, seen, changes))
    if any(seen.whole for seen in observation.pools):
        memory.division = DivisionMemory()
    if memory.terms.mode is not Mode.OFF:
        memory.division.divide(observation.devices, memory.pools, now, acts=memory.terms.mode is Mode.ACT)
    memory_left = MemoryLeft(
        {size.replica: size.blocks for sizes in memory.division.newest.values() for size in sizes},
        frozenset(observation.waiting),
    )
    plans = {}
    for pool, seen, changes in observed:
        plans[seen.pool.deployment] = yield from _decide_pool(pool, seen, changes, memory_left, now)
    return plans


def decide_pool(memory: PoolMemory, seen: PoolReport, now: float) -> tuple[Plan, ...]:
    """Decide an epoch of one pool. Updates the memory."""
    return finish(_decide_pool(memory, seen, memory.observe(seen, now), MemoryLeft(), now))


def _decide_pool(
    memory: PoolMemory, seen: PoolReport, changes: Changes, left: MemoryLeft, now: float
) -> Generator[None, None, tuple[Plan, ...]]:
    # During the observations of other pools, arrivals may have been placed on this one.
    changes = replace(changes, crossed=tuple(c for c in changes.crossed if memory.locations.is_placed(c.request)))
    terms, cluster = memory.terms, memory.cluster
    if (speed := replica_speed(memory)) is not None:
        memory.learned.follow_speed(speed)
    bounds = level_bounds(memory, now)
    learn_risk(memory, bounds, now)
    foreseen = 1.0 - memory.learned.risk.value if terms.has_level else None
    limits = terms.limits.resolve(memory.learned.experience, foreseen)
    learn_demand(memory, bounds, limits, now)
    cluster.decisions.begin_epoch(epoch_conditions(memory, seen, bounds, limits, now), now)
    proposed: Proposal | None = None
    pairs: Pairs = ()
    if terms.mode is Mode.OBSERVE:
        proposed, pairs = _propose(memory, seen, changes, limits, left, now)
        yield
    assign_roles(memory, terms.mode is Mode.ACT, now)
    _evacuate(memory)
    if bounds.speed is not None:
        memory.learned.predicted.add_epoch(cluster.running(), now)
    if terms.mode is not Mode.ACT:
        return (replace(_settle(memory, limits, now), proposed=proposed, proposed_pairs=pairs),)
    if not terms.batched:
        _open_minimum(cluster)
        changes = replace(changes, waiting=tuple(cluster.in_order()))
        return tuple(_one_by_one(memory, changes, limits, now))
    up = _act(memory, changes)
    pairs = _pair(memory, seen, left, now)
    yield
    plan = _settle(memory, limits, now, close=True)
    plan = plan.with_pairs(pairs, proposed=terms.pairing_mode is Mode.OBSERVE)
    memory.scaled = Scaled(now, up, len(plan.opened), len(plan.closed), limits.linger_s)
    return (plan,)


def place(
    memory: PoolMemory,
    arrival: Arrival,
    now: float,
    exclude: Collection[ReplicaId] = (),
    label: str = "",
    submitted: bool = False,
) -> Decision:
    """Choose a replica outside of `exclude` for an arrival. The request counts there from then on.

    On a prefill replica it comes with its move to another one, if that has room: the request is under way from then on.
    An earlier location of the same request is dropped. A request that fits nowhere queues on the replica that will run
    it soonest: the one that lacks the fewest tokens for its queue and the request. Without any replica it waits, and
    replicas are opened for it, until its next try or `RETRY_S` after the time of a placement. One that is `submitted`
    does not wait: it is on a replica that has not reported yet that it runs.
    """
    cluster, barred = memory.cluster, frozenset(exclude)
    if submitted and not _has_running(cluster, barred):
        memory.locations.drop_placement(arrival.id)
        return NoReplica(_wake_s(memory))
    if arrival.id in cluster.requests:
        cluster.remove_request(cluster.requests[arrival.id])
    request = memory.locations.add_request(
        arrival.id, arrival.tokens, arrival.precedence, adapter=arrival.adapter, names=arrival.names
    )
    memory.router.take_names(arrival.id, arrival.names)
    if not exclude:
        memory.learned.risk.arrived(arrival.id, now)
    if not _has_running(cluster, barred):
        memory.add_placement(request.id, _placed(memory, arrival, None, label, now))
        return NoReplica(_wake_s(memory))
    held = memory.router.match(arrival)
    routed, onward = _placing(memory, request, arrival, held, barred, now)
    placing = routed.placing
    replica = cluster.replicas[placing.replica]
    matched, fetch = memory.router.placed(arrival, replica, held, now)
    then = None if onward is None else _begun(memory, onward, now)
    if memory.terms.auto_prefills and not exclude:
        cached = matched.predicted
        prefill_s = memory.learned.routing.speed.prefill_s(arrival.tokens - cached, cached)
        memory.learned.prefill_load.add_placement(arrival.tokens - cached, cached, prefill_s, then is not None, now)
    returns = memory.terms.returns and _returns(memory, arrival, held, then, now)
    if isinstance(placing, Place):
        placing = Place(replica.id, matched, fetch, then, returns)
    else:
        placing = Queue(replica.id, matched)
    if not exclude:
        memory.learned.experience.observe_arrival(arrival.tokens, now)
        if memory.terms.pairing is not Mode.OFF:
            memory.learned.pairing.demand.arrived(arrival.id, arrival.tokens, now)
    placed = _placed(memory, arrival, replica.id, label, now)
    memory.add_placement(request.id, placed, placing.matched.predicted)
    if then is None:
        cluster.locate(request, replica)
    else:
        memory.locations.add_order(then, now)
        cluster.locate(request, cluster.replicas[then.target], replica)
        cluster.decisions.spend_move()
        if cooldown_s := memory.terms.limits.limits.cooldown_s:
            cluster.rest(request.id, now + cooldown_s)
    cluster.pin(request)
    return placing


def _placed(memory: PoolMemory, arrival: Arrival, replica: ReplicaId | None, label: str, now: float) -> Placed:
    """The placement of an arrival. On no replica, it lasts until the arrival's next try, which renews it."""
    expires_at = now + memory.terms.placement_ttl_s + (RETRY_S if replica is None else 0.0)
    return Placed(label, replica, arrival.tokens, now, expires_at, arrival.precedence, arrival.adapter)


def placing_order(memory: PoolMemory, arrivals: Sequence[Arrival], now: float) -> list[Arrival]:
    """Arrivals that come together, in the order of their placement: by rank, and within a rank by content."""
    ordered, classes = memory.router.in_order(memory.cluster, arrivals, now), memory.terms.classes
    return sorted(ordered, key=lambda arrival: -classes.rank(arrival.precedence.service_class))


def preview(memory: PoolMemory, arrival: Arrival, exclude: Collection[ReplicaId] = ()) -> Decision:
    """The replica that `place` would choose now. Changes nothing."""
    cluster, barred = memory.cluster, frozenset(exclude)
    if not _has_running(cluster, barred):
        return NoReplica(_wake_s(memory))
    request = cluster.requests.get(arrival.id) or memory.locations.new_request(arrival)
    return choose(memory, request, _unsuited(memory, request, barred))


def match_prompt(memory: PoolMemory, arrival: Arrival, now: float, exclude: Collection[ReplicaId] = ()) -> PromptMatch:
    """The placement that `place` would make now of a new request, with its reasons. Changes nothing."""
    cluster, router, barred = memory.cluster, memory.router, frozenset(exclude)
    request, held = memory.locations.new_request(arrival), router.match(arrival)
    routed: Routed | None = None
    unsuited: Barred = barred
    if _has_running(cluster, barred):
        unsuited = _unsuited(memory, request, barred)
        routed, _ = _placing(memory, request, arrival, held, barred, now)
    favoured = routed.favoured if routed is not None else ()
    listed = [replica for replica in cluster.running() if replica.id not in barred]
    scores = router.scores_of(listed, arrival.tokens, held, now)
    replicas = tuple(
        MatchedReplica(score, replica.id not in unsuited and fits(cluster, request, replica), replica.id in favoured)
        for replica, score in zip(listed, scores, strict=True)
    )
    return PromptMatch(arrival.tokens, router.block_tokens, routed, replicas)


def choose(memory: PoolMemory, request: Request, barred: Barred) -> Place | Queue:
    """The policy's replica for a request, or the one to queue on. Raises `ValueError` if all running ones are barred.

    With ranks, a request takes no room into which one of an earlier turn fits. It queues on a full replica, and the
    next epoch gives the room to the first in line. Does not change the memory.
    """
    cluster = memory.cluster
    chosen = memory.rule.place(cluster, request, barred)
    if chosen is not None and not _is_overtaking(memory, request, chosen):
        return Place(chosen.id)
    others = [replica for replica in cluster.running() if replica.id not in barred]
    if chosen is not None:
        others = [replica for replica in others if not fits(cluster, request, replica)] or [chosen]
    return Queue(min(others, key=partial(_wait, cluster, request)).id)


def _wait(cluster: Cluster, request: Request, replica: Replica) -> tuple[bool, int, int, int, int, ReplicaId]:
    """A sort key: the first replica is the one that will run the request soonest.

    An engine starts a request as soon as its blocks are free, without headroom, behind its queue. Where nothing is
    missing, the tokens that wait for their prefill decide.
    """
    missing = replica.queued_tokens + size_on(cluster, request, replica) - replica.free
    count = len(replica.requests) + replica.queued
    return not replica.runs_more, max(0, missing), replica.backlog, count, -replica.free, replica.id


def _is_overtaking(memory: PoolMemory, request: Request, replica: Replica) -> bool:
    """True if a waiting request has an earlier turn than `request`, and the next epoch could move it to the replica."""
    cluster = memory.cluster
    if not (cluster.has_ranks or request.rank) or memory.terms.mode is not Mode.ACT:
        return False
    models = (None, memory.locations.statuses[replica.id].model)
    earlier = (waiting for waiting in cluster.waiting.values() if waiting.turn < request.turn)
    return any(fits(cluster, q, replica) and memory.locations.model_of(q.id) in models for q in earlier)


def order_by_hand(memory: PoolMemory, move: Move, now: float) -> Move:
    """Add predictions and, unless it has one, a path to an operator's move. It counts as under way from then on."""
    choice = memory.learned.estimates.decide(move, _moves_under_way(memory), now, memory.router.present, memory.work_of)
    routed = replace(_routed(move, choice), path=move.path or choice.path)
    memory.locations.add_order(routed, now)
    return routed


def one_by_one(changes: Changes) -> Iterator[Changes]:
    """Every change by itself, except for those that decisions on earlier ones have made obsolete."""
    for departure in changes.departed:
        yield Changes(departed=(departure,))
    for crossing in changes.crossed:
        if crossing.request.replica is not None:
            yield Changes(crossed=(crossing,))
    yield Changes()  # growth within a class
    for request in changes.waiting:
        if request.replica is None:
            yield Changes(waiting=(request,))


# --- placements ---------------------------------------------------------------------------------------


def _unsuited(memory: PoolMemory, request: Request, barred: Barred) -> Barred:
    """`barred`, and the replicas that an arrival is not placed on for their role, or for its adapter."""
    return _barred_by_adapter(memory.cluster, request, barred_by_role(memory, barred))


def _barred_by_adapter(cluster: Cluster, request: Request, barred: Barred) -> Barred:
    """`barred`, and the replicas on which a request would wait for its adapter, if it need not wait on all.

    If more adapters are in use than an engine runs at a time, also those that do not run the request's own, if it fits
    on one that does: they keep their places for other adapters.
    """
    adapter = request.adapter
    if adapter is None:
        return barred
    running = [replica for replica in cluster.running() if replica.id not in barred]
    if not any(replica.takes_adapter(adapter) for replica in running):
        return barred
    in_use = {adapter}.union(*(replica.adapters for replica in running))
    if any(len(in_use) > replica.max_adapters for replica in running):
        own = [replica for replica in running if replica.runs_adapter(adapter)]
        if any(fits(cluster, request, replica) for replica in own):
            return barred | {replica.id for replica in running if replica not in own}
    return barred | {replica.id for replica in running if not replica.takes_adapter(adapter)}


def _route(
    memory: PoolMemory,
    request: Request,
    arrival: Arrival,
    held: Mapping[ReplicaId, HeldPrefix],
    barred: Barred,
    now: float,
) -> Routed:
    """As `choose`, among the replicas that the arrival's content favours; `held` are those that have some of it.

    Of prefill replicas, without such content, among those that begin soonest: nothing stays there that could be packed.
    """
    cluster, placing = memory.cluster, choose(memory, request, barred)
    if isinstance(placing, Queue):
        return Routed(placing)
    choice = cluster.replicas[placing.replica]
    basis = Basis.SESSION if memory.router.routing is Routing.SESSION else Basis.CONTENT
    favoured = memory.router.favoured(cluster, request, arrival, held, barred, choice, now)
    if not favoured:
        favoured, basis = soonest_prefills(memory, request, barred, now), Basis.POLICY
    if not favoured:
        return Routed(placing)
    better = memory.rule.place(cluster, request, cluster.replicas.keys() - favoured)
    if better is None or _is_overtaking(memory, request, better):
        return Routed(placing, Basis.POLICY, favoured)
    return Routed(Place(better.id), basis, favoured)


def _placing(
    memory: PoolMemory,
    request: Request,
    arrival: Arrival,
    held: Mapping[ReplicaId, HeldPrefix],
    barred: Barred,
    now: float,
) -> tuple[Routed, Move | None]:
    """The replica for an arrival, and its move from there if it is one for prefills and the move may begin.

    With `auto_prefills` it is one for prefills only if handing the request over from there is better.
    """
    cluster = memory.cluster

    def placed_on(routed: Routed) -> tuple[Routed, Move | None]:
        source = cluster.replicas[routed.placing.replica]
        return routed, _onward(memory, request, source, barred, now) if isinstance(routed.placing, Place) else None

    prefills = frozenset(replica.id for replica in cluster.prefills()) if memory.terms.auto_prefills else NONE
    if not prefills or not _has_running(cluster, barred | prefills):
        return placed_on(_route(memory, request, arrival, held, _unsuited(memory, request, barred), now))
    unsuited = _unsuited(memory, request, barred | prefills)
    here = placed_on(_route(memory, request, arrival, held, unsuited, now))
    others = barred | (frozenset(replica.id for replica in cluster.running()) - prefills)
    if not _has_running(cluster, others):
        return here
    unsuited = _barred_by_adapter(cluster, request, others)
    apart, move = placed_on(_route(memory, request, arrival, held, unsuited, now))
    placing = here[0].placing
    if move is None or isinstance(placing, Queue):
        return here if move is None else (apart, move)
    ends = cluster.replicas[move.source], cluster.replicas[placing.replica]
    there, otherwise = memory.router.scores_of(ends, arrival.tokens, held, now)
    better = is_handed_over(memory, move, there, otherwise, _moves_under_way(memory), now)
    return (apart, move) if better else here


def _begun(memory: PoolMemory, move: Move, now: float) -> Move | None:
    """The move with its path; None if it has none, and the next epoch decides on it."""
    move = replace(move, unit=memory.cluster.decisions.unit())
    busy, present = _moves_under_way(memory), memory.router.present
    (choice,) = memory.learned.estimates.choose([move], busy, now, present=present, work_of=memory.work_of)
    return _routed(move, choice) if choice.path is not None else None


def _onward(memory: PoolMemory, request: Request, source: Replica, barred: Barred, now: float) -> Move | None:
    """The move of an arrival from a prefill replica, without a path; None if it may not begin now.

    It is bound by all that bounds an epoch's moves. It waits for its prefill, and those that do so leave half of the
    moves under way to epochs, which may not wait.
    """
    cluster = memory.cluster
    if source.role is not Role.PREFILL or memory.terms.mode is not Mode.ACT or cluster.decisions.moves_left < 1:
        return None
    at_once = memory.terms.moves_at_once
    if at_once is not None and sum(move.reason is _DISAGGREGATE for move in _moves_under_way(memory)) >= at_once // 2:
        return None
    others = barred | _incompatible(memory, source.id)
    target = hand_over_target(memory, request, _barred_by_adapter(cluster, request, others))
    if target is None or _is_overtaking(memory, request, target):
        return None
    move = Move(request.id, source.id, target.id, request.tokens, _DISAGGREGATE, 0)
    return move if _within_bounds(memory, [move], now) else None


def _returns(
    memory: PoolMemory, arrival: Arrival, held: Mapping[ReplicaId, HeldPrefix], then: Move | None, now: float
) -> bool:
    """True if copying back the context of an arrival with a move pays at its end. Learns from every arrival."""
    reached = max((prefix.blocks for prefix in held.values()), default=0)
    reuse = memory.learned.routing.reuse.arrived(arrival.names, reached, arrival.session, now)
    if then is None or not arrival.names:
        return False
    link = memory.learned.estimates.copying(then.target, then.source, now)
    return worth_returning(reuse, arrival.tokens, memory.learned.routing.speed, link)


# --- the parts of an epoch ----------------------------------------------------------------------------


def _wake_s(memory: PoolMemory) -> float | None:
    """The predicted seconds until a sleeping replica takes requests; None: none sleeps."""
    sleeping = (ReplicaState.ASLEEP, ReplicaState.WAKING)
    sleeps = any(status.state in sleeping for status in memory.locations.statuses.values())
    return memory.learned.experience.wake_s if sleeps else None


def _has_running(cluster: Cluster, barred: Barred) -> bool:
    """True if a replica outside of `barred` is running."""
    return any(r.state is ReplicaState.RUNNING and r.id not in barred for r in cluster.replicas.values())


def _evacuate(memory: PoolMemory) -> None:
    """Place the requests of replicas that are about to stop, those of the highest rank first, of these the largest.

    The rest is left to the policy.
    """
    cluster = memory.cluster
    leaving = (cluster.requests[request] for request in memory.locations.leaving)
    with cluster.prefills_apart():
        for request in sorted(leaving, key=lambda q: (-q.rank, -q.tokens, q.order)):
            barred = _incompatible(memory, memory.locations.homes[request.id])
            target = memory.rule.place(cluster, request, _barred_by_adapter(cluster, request, barred))
            target = target or _with_blocks(cluster, request, barred)
            if target is not None:
                cluster.decisions.place(request, target)


def _with_blocks(cluster: Cluster, request: Request, barred: Barred) -> Replica | None:
    """The replica with the most free blocks, if the request fits there without headroom: good enough to evacuate."""
    running = (r for r in cluster.running() if r.runs_more and r.id not in barred)
    fitting = [r for r in running if r.free >= size_on(cluster, request, r)]
    return max(fitting, key=lambda r: r.free, default=None)


def _incompatible(memory: PoolMemory, home: ReplicaId) -> Barred:
    """The replicas that run another version of the model than `home`: its requests cannot continue there."""
    own = memory.locations.statuses[home].model
    return frozenset(status.id for status in memory.locations.statuses.values() if status.model != own) or NONE


def _open_minimum(cluster: Cluster) -> ScaleUp | None:
    """Open replicas up to the minimum, and to the least number that keeps the service level. The reason, if any."""
    conditions = cluster.conditions
    up, least = cluster.up(), max(conditions.min_replicas, conditions.level_replicas)
    while cluster.up() < least and cluster.decisions.open() is not None:
        pass
    return ScaleUp.MINIMUM if up < conditions.min_replicas else ScaleUp.PREFILLS if up < least else None


def open_slack(cluster: Cluster) -> bool:
    """Open replicas until the slack is free, or no more may be opened. True if it was not free.

    By a forecast, what is short now but not when a start is over needs no replica.
    """
    slack, forecast = cluster.conditions.slack, cluster.conditions.forecast
    free = slack if forecast is None else forecast
    is_short = (slack > 0 or forecast is not None) and spare_capacity(cluster) < free
    while is_short and cluster.decisions.open() is not None and spare_capacity(cluster) < free:
        pass
    return is_short


def _act(memory: PoolMemory, changes: Changes) -> ScaleUp | None:
    """Hand prefills over, let the policy react, and open replicas. Returns the reason for openings, possible or not.

    Queued requests may wait for the prefills of a whole epoch, so that no replica is idle before the next one, however
    short the wait of an arrival has to be.
    """
    cluster = memory.cluster
    below = _open_minimum(cluster)
    changes = replace(changes, waiting=tuple(cluster.in_order()))
    first = len(cluster.decisions.opened)
    with cluster.prefills_apart():
        hand_over_prefills(memory, lambda q, home: _barred_by_adapter(cluster, q, _incompatible(memory, home)))
        with cluster.longer_waits(memory.terms.epoch_s):
            memory.rule.rebalance(cluster, changes)
        found_no_room = len(cluster.decisions.opened) > first or (cluster.supply.left <= 0 and bool(cluster.waiting))
        is_short = open_slack(cluster)
    return below or (ScaleUp.REQUESTS if found_no_room else ScaleUp.RESERVE if is_short else None)


def _pair(memory: PoolMemory, seen: PoolReport, left: MemoryLeft, now: float) -> Pairs:
    """The pairs of replicas that end and form, behind all other decisions."""
    mode, pairing, cluster = memory.terms.pairing_mode, memory.learned.pairing, memory.cluster
    if mode is Mode.OFF:
        pairing.rest()
        return ()
    loads = member_loads(pairing, memory.locations, seen.members, left.growth, now)
    view = PairingView(seen.members, loads, replica_speed(memory), _start_s(memory, left, now))
    return decide_pairs(pairing, cluster, view, memory.terms.pairing_terms, mode is Mode.ACT, now)


def _start_s(memory: PoolMemory, left: MemoryLeft, now: float) -> float:
    """The seconds until a further replica runs; infinite if none may, or if those that may wait for memory or a GPU."""
    cluster, experience = memory.cluster, memory.learned.experience
    may_come = cluster.supply.left > 0 or cluster.decisions.opened or experience.awaits_start(now)
    if not may_come or any(replica in left.waiting for replica in memory.locations.statuses):
        return inf
    return _wake_s(memory) or (inf if experience.lacks_gpu(now) else experience.startup_s)


def _propose(
    memory: PoolMemory, seen: PoolReport, changes: Changes, limits: Limits, left: MemoryLeft, now: float
) -> tuple[Proposal, Pairs]:
    """The decision of the mode `act`, and that on pairs. All of it is taken back, and the memory stays as it is.

    Without a pause: arrivals are placed on the cluster as it is.
    """
    cluster = memory.cluster
    with memory.proposing():
        assign_roles(memory, True, now)
        _evacuate(memory)
        _act(memory, changes)
        pairs = _pair(memory, seen, left, now)
        moves = _decided_moves(memory)
        needed = needed_replicas(cluster)
        admitted = _admit(memory, moves, now)
        close_idle(cluster, now, limits.linger_s)
        plan = _live_plan(memory, cluster.decisions.planned(), admitted)
    cluster.note_idle(now)
    return Proposal(plan, tuple(moves.values()), needed), pairs


def _one_by_one(memory: PoolMemory, changes: Changes, limits: Limits, now: float) -> Iterator[Plan]:
    """The paper's Algorithm 1: each change has a plan of its own."""
    for change in one_by_one(changes):
        memory.rule.rebalance(memory.cluster, change)
        yield _settle(memory, limits, now)
    open_slack(memory.cluster)
    yield _settle(memory, limits, now, close=True)


def _settle(memory: PoolMemory, limits: Limits, now: float, close: bool = False) -> Plan:
    """End the epoch: admit moves, `close` idle replicas if asked, and return the decisions as a plan."""
    cluster, terms = memory.cluster, memory.terms
    touched = [request for request, _ in cluster.decisions.decided()]
    admitted = None if terms.is_ideal else _admit(memory, _decided_moves(memory), now)
    idle = {r.id: r.idle_since for r in cluster.running()} if close else {}
    if close:
        close_idle(cluster, now, limits.linger_s)
    plan = cluster.decisions.settle()
    memory.locations.add_closings({replica: idle[replica] for replica in plan.closed})
    if limits.cooldown_s:
        for move in plan.moves:
            cluster.rest(move.request, now + limits.cooldown_s)
    plan = _live_plan(memory, plan, admitted)
    memory.locations.add_plan(plan, touched, now)
    return plan


def _live_plan(memory: PoolMemory, plan: Plan, admitted: Admitted | None) -> Plan:
    """The cluster's plan, with `admitted` moves, for requests that are on a replica or ask for one again."""
    placements, evicted = plan.placements, plan.evicted
    if not memory.terms.may_wait_nowhere:
        locations, gone = memory.locations, {eviction.request for eviction in evicted}
        placements = tuple(
            each
            for each in placements
            if not (each.request in locations.homes or each.request in gone or locations.asks_again(each.request))
        )
        evicted = ()
    moves, deferred = (plan.moves, plan.deferred) if admitted is None else admitted
    return Plan.of(moves, placements, evicted, plan.queued, plan.opened, plan.closed, deferred, plan.proposed)


# --- admission of moves -------------------------------------------------------------------------------


def _decided_moves(memory: PoolMemory) -> dict[RequestId, Move]:
    """The sensible moves of the epoch's decisions, without paths. Takes back all others."""
    decided = {}
    for request, trace in memory.cluster.decisions.decided():
        move = _move(memory, request, trace)
        if move is not None and _is_sensible(memory, move):
            decided[request.id] = move
        elif move is not None or (trace.origin is not None and not memory.terms.may_wait_nowhere):
            memory.cluster.decisions.take_back(request)
    return decided


def _admit(memory: PoolMemory, decided: Mapping[RequestId, Move], now: float) -> Admitted:
    """The moves that are within the bounds and have a path. Takes back all others.

    The most urgent moves come first, and of equally urgent ones those decided first: of queued requests the oldest.
    """
    cluster = memory.cluster
    if not memory.terms.moves_take_time:
        return Admitted(tuple(decided.values()))
    admitted = _within_bounds(memory, sorted(decided.values(), key=lambda move: URGENCY[move.reason]), now)
    waiting = frozenset(q for q in decided if memory.locations.phase(q) is Phase.WAITING)
    busy, present, estimates = _moves_under_way(memory), memory.router.present, memory.learned.estimates
    choices = estimates.choose(admitted, busy, now, waiting, present, memory.work_of) if admitted else []
    paths = {choice.request: choice for choice in choices}
    routed = {move.request: _routed(move, paths[move.request]) for move in admitted}
    moves = tuple(move for move in routed.values() if move.path is not None)
    deferred = tuple(move for move in routed.values() if move.path is None)
    made = {move.request for move in moves}
    for request_id in decided:
        if request_id not in made:
            cluster.decisions.take_back(cluster.requests[request_id])
    return Admitted(moves, deferred)


def _move(memory: PoolMemory, request: Request, trace: Trace) -> Move | None:
    """The move from a request's present replica to the decided one; None if none is needed, or the target is not up."""
    target = request.replica
    if target is None or target.state is not ReplicaState.RUNNING:
        return None
    source = memory.locations.homes.get(request.id) if trace.origin is None else trace.origin.id
    if source is None or source == target.id or (trace.evicted and memory.terms.may_wait_nowhere):
        return None
    if trace.origin is None:
        reason = Reason.EVACUATE if request.id in memory.locations.leaving else Reason.ADMIT
    else:
        reason = Reason.OVERLOAD if trace.evicted else trace.reason
    return Move(request.id, source, target.id, request.tokens, reason, trace.unit)


def _is_sensible(memory: PoolMemory, move: Move) -> bool:
    """False between different models, for a request on the move, and for a drain while a replica is starting.

    Also false if the request would wait at its target for its adapter, unless its own replica is about to stop.
    """
    statuses, cluster = memory.locations.statuses, memory.cluster
    source, target = statuses.get(move.source), statuses.get(move.target)
    incompatible = source is not None and target is not None and source.model != target.model
    pointless = move.reason is Reason.DRAIN and is_starting(cluster)
    request, replica = cluster.requests[move.request], cluster.replicas[move.target]
    waits = move.reason is not Reason.EVACUATE and not replica.takes_adapter(request.adapter)
    return not (incompatible or pointless or waits) and move.request not in memory.locations.under_way


def _within_bounds(memory: PoolMemory, moves: list[Move], now: float) -> list[Move]:
    """The moves within the bounds, in the order of `moves`. The breaker applies to all but evacuations.

    The bound of each replica is for running requests: a queued one costs its replicas nothing but its prefill, and one
    that is prefilled waits most of the time of its move.
    """
    terms = memory.terms
    at_once = float("inf") if terms.moves_at_once is None else terms.moves_at_once
    per_replica = float("inf") if terms.moves_per_replica is None else terms.moves_per_replica
    under_way = (move for move in _moves_under_way(memory) if move.reason not in _UNBOUND)
    busy = Counter(end for move in under_way for end in (move.source, move.target))
    left = at_once - len(memory.locations.under_way)
    admitted = []
    for move in moves:
        ends = (move.source, move.target)
        barred = move.reason is not Reason.EVACUATE and memory.learned.breaker.blocks(ends, now)
        is_unbound = move.reason in _UNBOUND
        if left > 0 and not barred and (is_unbound or all(busy[end] < per_replica for end in ends)):
            admitted.append(move)
            busy.update(() if is_unbound else ends)
            left -= 1
    return admitted


_DISAGGREGATE = Reason.DISAGGREGATE
_UNBOUND = (Reason.ADMIT, _DISAGGREGATE)


def _moves_under_way(memory: PoolMemory) -> list[Move]:
    return [underway.move for underway in memory.locations.under_way.values()]


def _routed(move: Move, choice: Choice) -> Move:
    """The move with its path and the predicted durations of both paths. An infinite prediction becomes None."""
    kv_s, tokens_s = (seconds if isfinite(seconds) else None for seconds in (choice.kv_s, choice.tokens_s))
    return replace(move, path=choice.path, kv_s=kv_s, tokens_s=tokens_s)
