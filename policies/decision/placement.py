"""Where an arriving request goes between epochs: at once, and without moving any other."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from policies.decision.observation import Status
from policies.model import ReplicaId, RequestId, Tokens


@dataclass(frozen=True, slots=True)
class Place:
    """The request fits on this replica now."""

    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class Queue:
    """Nothing has room: wait on the replica where room is nearest."""

    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class NoReplica:
    """No replica accepts requests."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A request that was sent to a replica, which has not reported it yet."""

    label: str
    replica: ReplicaId
    tokens: Tokens
    at: float
    expires_at: float


Decision = Place | Queue | NoReplica


def free_tokens(
    statuses: Iterable[Status], placed: Mapping[RequestId, Placed], reported: Callable[[RequestId], bool], now: float
) -> dict[ReplicaId, Tokens]:
    """Free tokens by replica, less those of requests that were placed there and are not `reported` yet."""
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
    """A choice without the scheduler: the replica of `running` with the most `free` tokens in its last view.

    `sent` counts the caller's own requests per replica; it alone decides between replicas that are not in that view.
    """
    return min(running, key=lambda replica: (-free.get(replica, 0), sent.get(replica, 0), replica), default=None)
