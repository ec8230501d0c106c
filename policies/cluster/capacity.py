"""Demand and spare capacity of a cluster, and the replicas that may close. Only `close_idle` changes the cluster."""

from collections import Counter
from collections.abc import Collection, Sequence
from math import inf

from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica
from policies.cluster.sizes import distinct_tokens
from policies.cost.service import SpeedLimit
from policies.model import UP, ReplicaState, Role


def total_demand(cluster: Cluster) -> int:
    """The demand of all requests in tokens, waiting ones included."""
    return total_demand_at(cluster, cluster.conditions.speed, cluster.conditions.queue_share)


def total_demand_at(cluster: Cluster, speed: SpeedLimit | None, queue_share: float) -> int:
    """As `total_demand`, under another speed limit and another share of the waiting requests' sizes."""
    on_replicas = sum(replica.demand_at(speed) for replica in cluster.replicas.values())
    return on_replicas + _waiting_demand(cluster, speed, queue_share)


def spare_capacity(cluster: Cluster) -> int:
    """The free tokens after all starts and moves under way, less those for the waiting requests.

    What prefill replicas have free is of no use to a request that decodes.
    """
    hosts = (r for r in cluster.replicas.values() if r.state in UP and r.role is not Role.PREFILL)
    free = sum(_usable_vacancy(cluster, replica) for replica in hosts)
    return free - _waiting_demand(cluster, cluster.conditions.speed, cluster.conditions.queue_share)


def _usable_vacancy(cluster: Cluster, replica: Replica) -> int:
    """The free tokens of a replica that count as spare capacity.

    A forecast is of the whole demand, so it is compared with the whole capacity: demand beyond a replica's capacity
    takes that of others. Without one, remainders of less than C/8 are of no use to an arrival, and do not count.
    """
    room = replica.vacancy
    return room if cluster.conditions.forecast is not None or room * 8 >= cluster.capacity else 0


def _waiting_demand(cluster: Cluster, speed: SpeedLimit | None, queue_share: float) -> int:
    """The demand of the waiting requests in tokens."""
    if speed is None:
        return distinct_tokens(cluster, cluster.waiting.values())
    shares = ((request.tokens, speed.share(1, request.tokens)) for request in cluster.waiting.values())
    tokens = sum(max(tokens, round(cluster.capacity * share)) for tokens, share in shares)
    return round(queue_share * tokens)


def closable(cluster: Cluster, closing: Collection[Replica] = (), times: float = 1.0) -> float:
    """The largest capacity, in tokens, of one replica that can close beside the `closing` ones without violating a
    minimum or the slack, multiplied by `times`; below zero if none can.

    By a forecast, its peak counts instead: a replica that is opened again within the time of a start has saved nothing.
    """
    conditions = cluster.conditions
    if len(closing) >= _above_minimum(cluster):
        return -1.0
    if not conditions.slack and conditions.forecast is None:
        return inf
    free = times * conditions.slack if conditions.forecast is None else conditions.peak
    return spare_capacity(cluster) - sum(replica.capacity for replica in closing) - free


def _above_minimum(cluster: Cluster) -> int:
    """The number of running replicas beyond the larger minimum."""
    return len(cluster.running()) - max(cluster.conditions.min_replicas, cluster.conditions.level_replicas)


def may_close(cluster: Cluster, times: float = 1.0) -> bool:
    """True if a running replica can close: see `closable`."""
    most = closable(cluster, times=times)
    return most >= 0 and any(replica.capacity <= most for replica in cluster.running())


def needed_replicas(cluster: Cluster) -> int:
    """The number of running and starting replicas without the empty ones that can close, the youngest first.

    Replicas that requests are leaving count as empty.
    """
    left, closing, most = closable(cluster), 0, _above_minimum(cluster)
    for replica in reversed(cluster.running()):
        idle = not (replica.role is Role.PREFILL or replica.requests or replica.queued)
        if idle and closing < most and replica.capacity <= left:
            left -= replica.capacity
            closing += 1
    return cluster.up() - closing


def close_idle(cluster: Cluster, now: float, linger_s: float) -> None:
    """Close replicas that have been empty for `linger_s` seconds, the youngest first, if they are `closable`.

    With `Cluster.by_machine`, those come first whose machine is nearest to being empty, unless fewer could close then.
    No replica is closed while another one is starting, nor one for prefills, which is empty between two of them.
    """
    cluster.note_idle(now)
    if is_starting(cluster):
        return
    running = reversed(cluster.running())
    idle = [r for r in running if r.idle_since is not None and now - r.idle_since >= linger_s]
    for replica in _machine_by_machine(cluster, idle) if cluster.by_machine else idle:
        if replica.capacity <= closable(cluster):
            cluster.decisions.close(replica)


def dispensable(cluster: Cluster, now: float, sleeps: bool) -> list[Replica]:
    """The replicas that may close before their linger is over, since others need their memory, the youngest first.

    They are idle since an epoch before `now`. None may while a request waits or a replica starts. In a pool that
    `sleeps`, which has no minimum, all may if it has no request at all; elsewhere those that are `closable`.
    """
    if cluster.waiting or is_starting(cluster):
        return []
    idle = [r for r in reversed(cluster.running()) if r.is_idle and r.idle_since is not None and r.idle_since < now]
    if sleeps and not cluster.requests:
        return idle
    closing: list[Replica] = []
    for replica in idle:
        if replica.capacity <= closable(cluster, closing):
            closing.append(replica)
    return closing


def _machine_by_machine(cluster: Cluster, idle: Sequence[Replica]) -> Sequence[Replica]:
    """The idle replicas by machine, the machine with the fewest other replicas first, of equals the smallest one.

    In the given order if more of them can close in that order, as may be if capacities differ.
    """
    others, all_there = replicas_by_machine(cluster, idle), replicas_by_machine(cluster)
    first = {replica.node: place for place, replica in reversed(list(enumerate(idle)))}
    ordered = sorted(idle, key=lambda r: (others[r.node], all_there[r.node], first[r.node]))
    return ordered if _closing(cluster, ordered) >= _closing(cluster, idle) else idle


def _closing(cluster: Cluster, idle: Sequence[Replica]) -> int:
    """The number of idle replicas that close if each one in turn does that can."""
    left, most, closing = closable(cluster), _above_minimum(cluster), 0
    for replica in idle:
        if closing < most and replica.capacity <= left:
            left -= _usable_vacancy(cluster, replica)
            closing += 1
    return closing


def replicas_by_machine(cluster: Cluster, without: Collection[Replica] = ()) -> Counter[str]:
    """The number of replicas on each node, in any state, `without` some replicas."""
    left_out = set(without)
    return Counter(replica.node for replica in cluster.replicas.values() if replica not in left_out)


def queued_tokens(cluster: Cluster) -> int:
    """The sum of the waiting requests' sizes, in tokens."""
    return sum(request.tokens for request in cluster.waiting.values())


def is_starting(cluster: Cluster) -> bool:
    """True while a replica is starting. A replica emptied or closed now would soon be opened again."""
    opened = cluster.decisions.opened.values()
    return cluster.conditions.awaits_start or any(replica.state is not ReplicaState.RUNNING for replica in opened)


def overloaded(cluster: Cluster) -> list[Replica]:
    """Replicas whose requests exceed their capacity, oldest first."""
    return [replica for replica in cluster.replicas.values() if replica.overload > 0]


def strained(cluster: Cluster) -> list[Replica]:
    """Replicas that will be overloaded by the time a move decided now is over, oldest first."""
    return [replica for replica in cluster.replicas.values() if replica.strain > 0]
