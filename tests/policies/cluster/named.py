"""Small clusters for tests, drawn with the names of everything: `named("A: p60 q20 | B: r40", waiting="s10")`."""

from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import Any

from policies.cluster.cluster import Cluster
from policies.cluster.conditions import EpochConditions
from policies.cluster.replica import Replica, Request
from policies.cluster.supply import Supply
from policies.model import ReplicaId, ReplicaState, RequestId, Tokens
from policies.plan import Plan, Reason


def named(
    replicas: str = "",
    waiting: str = "",
    *,
    capacity: int = 100,
    headroom: int = 0,
    holds: bool = False,
    supply: int | None = None,
    starts_as: ReplicaState = ReplicaState.RUNNING,
) -> Cluster:
    """A cluster as an epoch begins. A request is a letter and its tokens; requests arrived in the order drawn.

    `supply` more replicas may be opened (None: any number); they are called gpu-0, gpu-1 and so on.
    """
    conditions = EpochConditions(headroom)
    cluster = Cluster(Tokens(capacity), Supply(limit=supply), conditions, holds=holds, starts_as=starts_as)
    for drawing in replicas.split("|") if replicas else ():
        name, _, requests = drawing.partition(":")
        replica = cluster.add_replica(ReplicaId(name.strip()), "node", Tokens(capacity))
        for request in _arrived(cluster, requests):
            cluster.decisions.place(request, replica)
    _arrived(cluster, waiting)
    cluster.decisions.settle()
    return cluster


def impose(cluster: Cluster, **conditions: Any) -> None:
    """Begin an epoch under the conditions as they are, but for these. No rest is over."""
    cluster.decisions.begin_epoch(replace(cluster.conditions, **conditions), -inf)


def request(cluster: Cluster, name: str) -> Request:
    """The request of that name."""
    return cluster.requests[RequestId(name)]


def replica(cluster: Cluster, name: str) -> Replica:
    """The replica of that name."""
    return cluster.replicas[ReplicaId(name)]


def turn(cluster: Cluster, replica: Replica, state: ReplicaState) -> None:
    """The replica reports another state."""
    cluster.update_replica(replica, state, replica.capacity, replica.max_requests)


def picture(cluster: Cluster) -> str:
    """The replicas as `named` takes them; in each of them the oldest request comes first."""
    return " | ".join(f"{name}: {_drawing(r.requests.values())}".rstrip() for name, r in cluster.replicas.items())


def move(cluster: Cluster, name: str, to: str, reason: Reason = Reason.FILL, unit: int | None = None) -> None:
    """`Decisions.move` by names."""
    cluster.decisions.move(request(cluster, name), replica(cluster, to), reason, unit)


def place(cluster: Cluster, name: str, on: str) -> None:
    """`Decisions.place` by names."""
    cluster.decisions.place(request(cluster, name), replica(cluster, on))


def lift(cluster: Cluster, name: str) -> None:
    """`Decisions.lift` by name."""
    cluster.decisions.lift(request(cluster, name), Reason.MAKE_ROOM)


def evict(cluster: Cluster, name: str) -> None:
    """`Decisions.evict` by name."""
    cluster.decisions.evict(request(cluster, name))


def settled(cluster: Cluster) -> Plan:
    """The plan, from a cluster that is whole before and after; nothing is left to the next epoch."""
    cluster.check_integrity()
    plan = cluster.decisions.settle()
    cluster.check_integrity()
    assert cluster.decisions.settle() == Plan.of(queued=plan.queued)
    return plan


def _arrived(cluster: Cluster, drawing: str) -> list[Request]:
    return [cluster.add_request(RequestId(text[0]), Tokens(int(text[1:]))) for text in drawing.split()]


def _drawing(requests: Iterable[Request]) -> str:
    return " ".join(f"{q.id}{q.tokens}" for q in sorted(requests, key=lambda q: q.order))
