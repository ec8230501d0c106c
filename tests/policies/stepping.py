"""Epochs of the idealised model on a drawn cluster: what happens to it as events, and what a policy makes of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from policies.cluster.capacity import close_idle, total_demand
from policies.cluster.changes import Arrival, Changes, Crossing, Departure
from policies.cluster.cluster import Cluster
from policies.decision.deciding import one_by_one, open_slack
from policies.decision.limits import DemandHistory, Limits
from policies.model import ReplicaId, ReplicaState, RequestId, Tokens
from policies.plan import Plan
from policies.precedence import ServiceClass, ServiceClasses
from policies.rules.policy import Policy

UNLIMITED = Limits()

RANKED = ServiceClasses({f"rank {rank}": ServiceClass(rank) for rank in (-1, 1, 2)}, overtake_s=2.0)
"""Classes beside that of arrivals without one, whose rank is 0."""


@dataclass(frozen=True, slots=True)
class Events:
    """The changes between two epochs, each kind in the order in which it happened.

    `sizes` maps a request to the tokens that it holds now; requests that did not change may be left out.
    `moved` and `stayed` are the outcomes of moves that were still under way: at their target, or back at their source.
    `started` are replicas that now accept work, `lost` ones that are gone with all that was on them.
    """

    sizes: Mapping[RequestId, Tokens] = field(default_factory=dict)
    departed: Sequence[RequestId] = ()
    arrived: Sequence[Arrival] = ()
    moved: Sequence[RequestId] = ()
    stayed: Sequence[RequestId] = ()
    started: Sequence[ReplicaId] = ()
    lost: Sequence[ReplicaId] = ()


def apply(cluster: Cluster, events: Events) -> Changes:
    """Apply `events` to `cluster`. Ids that it does not know raise `KeyError`."""
    for replica_id in events.started:
        replica = cluster.replicas[replica_id]
        cluster.update_replica(replica, ReplicaState.RUNNING, replica.capacity, replica.max_requests)
    for request_id in events.moved:
        cluster.release(cluster.requests[request_id])
    for request_id in events.stayed:
        request = cluster.requests[request_id]
        cluster.locate(request, request.source or request.replica)
    for replica_id in events.lost:
        cluster.lose(cluster.replicas[replica_id])
    departed = []
    for request_id in events.departed:
        request = cluster.requests[request_id]
        if request.replica is not None:
            departed.append(Departure(request_id, request.kind, request.replica))
        cluster.remove_request(request)
    crossed: list[Crossing] = []
    cluster.resize(events.sizes.items(), crossed)
    for arrival in events.arrived:
        precedence = arrival.precedence
        rank, turn = RANKED.rank(precedence.service_class), RANKED.turn(precedence)
        cluster.add_request(arrival.id, arrival.tokens, None, rank, turn, names=arrival.names)
    return Changes(tuple(departed), tuple(crossed), tuple(cluster.in_order()))


def begin(cluster: Cluster, events: Events, limits: Limits, now: float, demand: DemandHistory | None = None) -> Changes:
    """Bring the cluster up to date. It is now what the plan will be made for."""
    changes = apply(cluster, events)
    begin_epoch(cluster, limits, now, demand)
    return changes


def begin_epoch(cluster: Cluster, limits: Limits, now: float, demand: DemandHistory | None = None) -> None:
    """Begin an epoch under these limits, with the other conditions as they are."""
    demand = DemandHistory() if demand is None else demand
    if limits.foresight_s:
        demand.observe(limits, total_demand(cluster), 0.0, now)
    moves = inf if limits.moves_per_epoch is None else limits.moves_per_epoch
    slack = round(limits.slack * cluster.capacity) + demand.change
    cluster.decisions.begin_epoch(replace(cluster.conditions, moves=moves, slack=slack), now)


def decide(cluster: Cluster, changes: Changes, policy: Policy, limits: Limits, now: float) -> Plan:
    """Have the policy react, and take its outcome as a plan."""
    policy.rebalance(cluster, changes)
    return settle(cluster, limits, now)


def settle(cluster: Cluster, limits: Limits, now: float) -> Plan:
    """Open and close what the limits demand, and take the outcome as a plan."""
    open_slack(cluster)
    close_idle(cluster, now, limits.linger_s)
    return _rested(cluster, limits, now)


def step(cluster: Cluster, events: Events, policy: Policy, limits: Limits = UNLIMITED, now: float = 0.0) -> Plan:
    """Decide one epoch, all changes together."""
    return decide(cluster, begin(cluster, events, limits, now), policy, limits, now)


def step_each(
    cluster: Cluster, events: Events, policy: Policy, limits: Limits = UNLIMITED, now: float = 0.0
) -> list[Plan]:
    """Decide one epoch change by change: each has a plan of its own."""
    plans = []
    for changes in one_by_one(begin(cluster, events, limits, now)):
        policy.rebalance(cluster, changes)
        plans.append(_rested(cluster, limits, now))
    return [*plans, settle(cluster, limits, now)]


def _rested(cluster: Cluster, limits: Limits, now: float) -> Plan:
    plan = cluster.decisions.settle()
    for move in plan.moves if limits.cooldown_s else ():
        cluster.rest(move.request, now + limits.cooldown_s)
    return plan
