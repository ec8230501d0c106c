"""Small clusters drawn as text: `cluster("A: L.6 T.2 | B: M.4 M.4")` is two replicas with two requests each.

A request is its class and its size as a fraction of the capacity C, or a name of lower case letters and its size:
`L.6` and `x.6` hold 0.6 C. Names are for requests to which something happens; G is a grain. Requests arrived in the
order in which they are drawn, and replicas were activated in it. A replica that is still starting has a star (`C*`),
and `A@n1` stands on the node `n1`; without it all are on one.

`shown` draws a cluster in the same way, the largest requests of a replica first.
"""

import re
from collections.abc import Iterable

from policies.cluster.changes import Arrival
from policies.cluster.cluster import Cluster
from policies.cluster.conditions import EpochConditions
from policies.cluster.replica import Replica, Request
from policies.cluster.supply import Supply
from policies.decision.limits import Limits
from policies.model import ReplicaId, ReplicaState, RequestId, Tokens
from policies.plan import Plan
from policies.rules.policy import Policy
from tests.policies.stepping import Events, step

C = Tokens(2400)
"""The capacity. Classes begin above C/8 = 300, C/4 = 600, C/3 = 800 and C/2 = 1200 tokens."""

_REQUEST = re.compile(r"([LMSTG]|[a-z]+)(\.\d+|1)")


def cluster(
    replicas: str = "",
    waiting: str = "",
    *,
    more: int | None = None,
    headroom: int = 0,
    holds: bool = False,
    starts_as: ReplicaState = ReplicaState.RUNNING,
) -> Cluster:
    """The drawn cluster, as an epoch begins. `more` replicas can be opened; they are called gpu-0 and so on.

    Raises `ValueError` if the drawing cannot be read, or gives a request a class that its size does not have.
    """
    made = Cluster(C, Supply(limit=more), EpochConditions(headroom), holds=holds, starts_as=starts_as)
    for drawing in replicas.split("|") if replicas.strip() else ():
        name, _, requests = drawing.partition(":")
        name, _, node = name.strip().partition("@")
        state = ReplicaState.STARTING if name.endswith("*") else ReplicaState.RUNNING
        replica = made.add_replica(ReplicaId(name.rstrip("*")), node or "n0", C, state)
        for request in _arrived(made, requests):
            made.decisions.place(request, replica)
    _arrived(made, waiting)
    made.decisions.settle()
    return made


def shown(drawn: Cluster) -> str:
    """The cluster as `cluster` draws it, nodes left out; what waits comes last, after a semicolon."""
    parts = [f"{_name(r)}: {_drawing(r.requests.values())}".rstrip() for r in drawn.replicas.values()]
    waiting = _drawing(drawn.waiting.values())
    return " | ".join(parts) + (f" ; {waiting}" if waiting else "")


def after(
    policy: Policy,
    before: Cluster,
    *,
    departed: str = "",
    grown: str = "",
    arrived: str = "",
    limits: Limits | None = None,
) -> str:
    """The drawing after an epoch in which that departed (names), grew or arrived (names or classes with sizes)."""
    plan_after(policy, before, departed=departed, grown=grown, arrived=arrived, limits=limits)
    return shown(before)


def plan_after(
    policy: Policy,
    before: Cluster,
    *,
    departed: str = "",
    grown: str = "",
    arrived: str = "",
    limits: Limits | None = None,
) -> Plan:
    """The plan of such an epoch."""
    events = Events(
        sizes={named(before, name).id: tokens for name, tokens in map(_read, grown.split())},
        departed=[named(before, name).id for name in departed.split()],
        arrived=[Arrival(_id(name, f"new{i}"), size) for i, (name, size) in enumerate(map(_read, arrived.split()))],
    )
    plan = step(before, events, policy, limits or Limits())
    before.check_integrity()
    return plan


def named(drawn: Cluster, name: str) -> Request:
    """The request of that name."""
    return drawn.requests[RequestId(name)]


def _arrived(made: Cluster, drawing: str) -> list[Request]:
    requests = []
    for text in drawing.split():
        name, tokens = _read(text)
        request = made.add_request(_id(name, str(len(made.requests))), tokens)
        if name.isupper() and request.kind.name[0] != name:
            raise ValueError(f"{text} is a {request.kind.name} request")
        requests.append(request)
    return requests


def _read(text: str) -> tuple[str, Tokens]:
    match = _REQUEST.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a class or a name and a size")
    return match[1], Tokens(round(float(match[2]) * C))


def _id(name: str, number: str) -> RequestId:
    return RequestId(name if name.islower() else f"{name}#{number}")


def _name(replica: Replica) -> str:
    return f"{replica.id}*" if replica.state is ReplicaState.STARTING else replica.id


def _drawing(requests: Iterable[Request]) -> str:
    return " ".join(map(_text, sorted(requests, key=lambda q: (-q.tokens, q.order))))


def _text(request: Request) -> str:
    size = f"{request.tokens / C:.3f}".rstrip("0").rstrip(".").lstrip("0")
    return ("GTSML"[request.kind] if "#" in request.id else request.id) + size
