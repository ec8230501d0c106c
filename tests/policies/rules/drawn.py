"""Clusters drawn as text, for tests of the baselines: `60 20 | 40` is two replicas, the first with two requests.

Replicas are `a`, `b`, ...; requests `a0`, `a1`, `b0`, ..., oldest first from left to right. What waits comes after `;`.
"""

from string import ascii_lowercase

from policies.cluster.changes import Arrival
from policies.cluster.cluster import Cluster
from policies.cluster.conditions import EpochConditions
from policies.cluster.supply import Supply
from policies.model import ReplicaId, RequestId, Tokens
from policies.rules.policy import Policy
from tests.policies.cluster.named import impose
from tests.policies.stepping import Events, step


def drawn(text: str, capacity: int = 100, headroom: int = 0, limit: int | None = None) -> Cluster:
    """The cluster that the text draws; `limit` replicas more may be opened."""
    cluster = Cluster(Tokens(capacity), Supply(limit=limit), EpochConditions(headroom))
    for name, sizes in zip(ascii_lowercase, text.split("|"), strict=False):
        replica = cluster.add_replica(ReplicaId(name), "node", Tokens(capacity))
        for number, size in enumerate(sizes.split()):
            cluster.decisions.place(cluster.add_request(RequestId(f"{name}{number}"), Tokens(int(size))), replica)
    cluster.decisions.settle()
    return cluster


def shown(cluster: Cluster) -> str:
    """The drawing of a cluster, replicas in order of activation."""
    replicas = " | ".join(" ".join(str(q.tokens) for q in r.requests.values()) for r in cluster.replicas.values())
    waiting = " ".join(str(q.tokens) for q in cluster.in_order())
    return f"{replicas} ; {waiting}" if waiting else replicas


def after(policy: Policy, cluster: Cluster, *sizes: int) -> str:
    """The drawing after an epoch in which requests of those sizes arrive. Every replica is kept, empty or not."""
    arrived = [Arrival(RequestId(f"new{len(cluster.requests) + i}"), Tokens(size)) for i, size in enumerate(sizes)]
    impose(cluster, min_replicas=len(cluster.replicas))
    step(cluster, Events(arrived=arrived), policy)
    cluster.check_integrity()
    return shown(cluster)
