"""Brings a cluster up to date with what happened, and says what a policy has to react to."""

from collections.abc import Mapping
from dataclasses import dataclass

from policies.classes import Kind
from policies.cluster import Cluster
from policies.events import Events
from policies.model import ReplicaState, RequestId, Tokens
from policies.working import Replica, Request


@dataclass(frozen=True, slots=True)
class Departure:
    """A request of that class ended on that replica, which is still there."""

    request: RequestId
    kind: Kind
    replica: Replica


@dataclass(frozen=True, slots=True)
class Crossing:
    """A request on a replica has grown into another class, or shrunk into one; `was` is the one it left."""

    request: Request
    was: Kind


@dataclass(frozen=True, slots=True)
class Changes:
    """What an epoch has to react to, in the order of the events. `waiting` holds earlier arrivals first."""

    departed: tuple[Departure, ...] = ()
    crossed: tuple[Crossing, ...] = ()
    waiting: tuple[Request, ...] = ()


def apply(cluster: Cluster, events: Events) -> Changes:
    """Change `cluster` to what `events` say. Ids that it does not know raise `KeyError`."""
    cluster.invalidate()
    for replica_id in events.started:
        cluster.replicas[replica_id].state = ReplicaState.RUNNING
    for request_id in events.moved:
        cluster.release(cluster.requests[request_id])
    for request_id in events.stayed:
        cluster.return_home(cluster.requests[request_id])
    for replica_id in events.lost:
        cluster.lose(cluster.replicas[replica_id])
    departed = []
    for request_id in events.departed:
        request = cluster.requests[request_id]
        if request.replica is not None:
            departed.append(Departure(request_id, request.kind, request.replica))
        cluster.remove_request(request)
    crossed = _resize(cluster, events.sizes)
    for arrival in events.arrived:
        cluster.add_request(arrival.id, arrival.tokens)
    return Changes(tuple(departed), tuple(crossed), tuple(cluster.in_order()))


def _resize(cluster: Cluster, sizes: Mapping[RequestId, Tokens]) -> list[Crossing]:
    """The one loop over every running request; what it does per request decides how an epoch scales."""
    crossed = []
    requests = cluster.requests
    for request_id, tokens in sizes.items():
        request = requests[request_id]
        was = request.tokens
        if request.replica is not None:
            request.replica.load += tokens - was
        request.tokens = tokens
        if tokens > request.ceiling or tokens < was:
            kind = cluster.classes.kind(tokens)
            if kind is not request.kind and request.replica is not None:
                crossed.append(Crossing(request, request.kind))
            request.kind = kind
            request.ceiling = cluster.classes.ceiling(kind)
    cluster.hold_more()
    return crossed
