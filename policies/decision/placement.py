"""Placements: the replica of an arriving request, chosen at once and without moving any other request."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from policies.decision.observation import Status
from policies.model import ReplicaId, RequestId, Tokens
from policies.precedence import DEFAULT_PRECEDENCE, Precedence
from policies.prefix.routing import NOT_MATCHED, Matched


@dataclass(frozen=True, slots=True)
class Place:
    """The request fits on this replica now. `matched` are the tokens of its prompt in KV caches."""

    replica: ReplicaId
    matched: Matched = NOT_MATCHED


@dataclass(frozen=True, slots=True)
class Queue:
    """The request fits nowhere: it queues on this replica. `matched` is as in `Place`."""

    replica: ReplicaId
    matched: Matched = NOT_MATCHED


@dataclass(frozen=True, slots=True)
class NoReplica:
    """No replica accepts requests."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A request on its way to a replica that has not reported it yet. The placement expires at `expires_at`."""

    label: str
    replica: ReplicaId
    tokens: Tokens
    at: float
    expires_at: float
    precedence: Precedence = DEFAULT_PRECEDENCE


Decision = Place | Queue | NoReplica


def free_tokens(
    statuses: Iterable[Status], placed: Mapping[RequestId, Placed], reported: Callable[[RequestId], bool], now: float
) -> dict[ReplicaId, Tokens]:
    """The free tokens of every replica, less the sizes of requests placed there and not yet `reported`."""
    coming: dict[ReplicaId, int] = {}
    for request, placement in placed.items():
        if placement.expires_at > now and not reported(request):
            coming[placement.replica] = coming.get(placement.replica, 0) + placement.tokens
    return {
        status.id: Tokens(max(0, (status.free_blocks or 0) * status.block_size - coming.get(status.id, 0)))
        for status in statuses
    }


def least_loaded(
    free: Mapping[ReplicaId, Tokens], running: Collection[ReplicaId], sent: Mapping[ReplicaId, int]
) -> ReplicaId | None:
    """A placement without the scheduler: the replica of `running` with the most tokens in `free`, its last view.

    `sent` is the caller's own number of requests per replica. It decides between replicas with equally many free
    tokens; replicas outside the view have none. None if no replica is running.
    """
    return min(running, key=lambda replica: (-free.get(replica, 0), sent.get(replica, 0), replica), default=None)
