"""One epoch: from what happened to what is to be done. The live scheduler and the simulator both call `step`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from policies.cluster.changes import Arrival, Changes, Departure
from policies.cluster.cluster import Cluster
from policies.decision.limits import Limits
from policies.model import ReplicaId, ReplicaState, RequestId, Tokens
from policies.plan import Plan
from policies.rules.policy import Policy

UNLIMITED = Limits()


@dataclass(frozen=True, slots=True)
class Events:
    """The changes between two epochs, each kind in the order in which it happened.

    `sizes` maps a request to the tokens that it holds now; requests that did not change may be left out.
    `moved` and `stayed` say how moves ended that were still under way: at their target, or back at their source.
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
    """Change `cluster` to what `events` say. Ids that it does not know raise `KeyError`."""
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
    crossed = cluster.resize(events.sizes)
    for arrival in events.arrived:
        cluster.add_request(arrival.id, arrival.tokens)
    return Changes(tuple(departed), tuple(crossed), tuple(cluster.in_order()))


def headroom(policy: Policy, limits: Limits, decode_rate: float) -> Tokens:
    """The growth to keep free for each request, in tokens, for `Cluster.reserve`.

    `decode_rate` is how fast a request grows, in tokens per second. Of policy and limits the more cautious one counts.
    """
    return Tokens(ceil((limits.lead_s + max(policy.headroom_s, limits.headroom_s)) * decode_rate))


def lead(limits: Limits, decode_rate: float) -> Tokens:
    """By how much a request grows until a decision takes effect, in tokens, for `Cluster.reserve`."""
    return Tokens(ceil(limits.lead_s * decode_rate))


def step(cluster: Cluster, events: Events, policy: Policy, limits: Limits = UNLIMITED, now: float = 0.0) -> Plan:
    """Decide one epoch, all changes together (the paper's operation batching, section VI-C).

    `cluster` must be as the last epoch left it; it ends as the plan leaves it. `now`, in seconds of any monotonic
    clock, is only compared with the `now` of earlier epochs.
    """
    return decide(cluster, begin(cluster, events, limits, now), policy, limits, now)


def begin(cluster: Cluster, events: Events, limits: Limits, now: float) -> Changes:
    """The first half of `step`: bring the cluster up to date. It is now what the plan will be made for."""
    changes = apply(cluster, events)
    limits.begin(cluster, now)
    return changes


def decide(cluster: Cluster, changes: Changes, policy: Policy, limits: Limits, now: float) -> Plan:
    """The second half of `step`: have the policy react, and take its outcome as a plan."""
    policy.rebalance(cluster, changes)
    limits.scale(cluster, now)
    return _settle(cluster, limits, now)


def step_each(
    cluster: Cluster, events: Events, policy: Policy, limits: Limits = UNLIMITED, now: float = 0.0
) -> list[Plan]:
    """Decide one epoch operation by operation, as the paper's Algorithm 1 does: each change has a plan of its own."""
    plans = []
    for changes in one_by_one(begin(cluster, events, limits, now)):
        policy.rebalance(cluster, changes)
        plans.append(_settle(cluster, limits, now))
    limits.scale(cluster, now)
    return [*plans, cluster.settle()]


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


def _settle(cluster: Cluster, limits: Limits, now: float) -> Plan:
    plan = cluster.settle()
    limits.end(cluster, plan, now)
    return plan
