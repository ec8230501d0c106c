"""One epoch: from what happened to what is to be done. The live scheduler and the simulator both call `step`."""

from collections.abc import Iterator
from math import ceil

from policies.changes import Changes, apply
from policies.cluster import Cluster
from policies.events import Events
from policies.limits import Limits
from policies.model import Tokens
from policies.plan import Plan
from policies.policy import Policy

UNLIMITED = Limits()


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
