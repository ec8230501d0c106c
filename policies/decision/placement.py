"""Where an arriving request goes between epochs: at once, and without moving any other."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from policies.model import (
    Blocks,
    ClusterState,
    Phase,
    ReplicaId,
    ReplicaLoad,
    ReplicaState,
    RequestId,
    RequestLoad,
    Tokens,
)


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


def with_placements(loads: Iterable[ReplicaLoad], placed: Mapping[RequestId, Placed], now: float) -> ClusterState:
    """The replicas as they report, with the requests added that were placed there and are not reported yet."""
    loads = tuple(loads)
    reported = {request.id for load in loads for request in load.requests}
    coming: dict[ReplicaId, list[tuple[RequestId, Placed]]] = {}
    for request, placement in placed.items():
        if request not in reported and placement.expires_at > now:
            coming.setdefault(placement.replica, []).append((request, placement))
    return ClusterState(tuple(_with(load, coming.get(load.id, ()), now) for load in loads))


def _with(load: ReplicaLoad, coming: Collection[tuple[RequestId, Placed]], now: float) -> ReplicaLoad:
    """A report with the requests on their way to the replica added, and their blocks taken from the free ones."""
    if not coming or load.state is not ReplicaState.RUNNING:
        return load
    blocks = sum(-(-placed.tokens // load.block_size) for _, placed in coming)
    added = tuple(
        RequestLoad(
            id=request,
            label=placed.label,
            tokens=placed.tokens,
            phase=Phase.WAITING,
            age_s=now - placed.at,
            hop=0,
            immovable="not yet reported by its replica",
        )
        for request, placed in coming
    )
    return replace(load, free_blocks=Blocks(max(0, load.free_blocks - blocks)), requests=load.requests + added)


def least_loaded(
    state: ClusterState, running: Collection[ReplicaId], sent: Mapping[ReplicaId, int]
) -> ReplicaId | None:
    """A choice without the scheduler: of `running`, the replica with the most room as last known.

    `sent` counts the caller's own requests per replica; it alone decides between replicas of which nothing is known.
    """
    free = {load.id: load.free_tokens for load in state.replicas}
    return min(running, key=lambda replica: (-free.get(replica, 0), sent.get(replica, 0), replica), default=None)
