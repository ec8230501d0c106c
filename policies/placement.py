"""Where an arriving request goes: the policy protocol and the best-fit policy.

Best fit is the paper's no-migration baseline (MELL, section VII): the fullest replica that still has room.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from policies.model import ClusterState, ReplicaId, ReplicaLoad, RequestId, Tokens


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that wants a replica; `tokens` is what it holds now (its prompt, or prompt and output)."""

    id: RequestId
    tokens: Tokens


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


Decision = Place | Queue | NoReplica


class Policy(Protocol):
    """A placement policy. It is pure: same state and arrival, same decision; it mutates nothing."""

    def place(self, state: ClusterState, arrival: Arrival, exclude: Collection[ReplicaId] = ()) -> Decision:
        """Choose a replica for `arrival`, never one in `exclude`."""
        ...


@dataclass(frozen=True, slots=True)
class BestFit:
    """The replica with the least free room that still holds the request and `headroom` tokens of growth."""

    headroom: Tokens = Tokens(256)

    def place(self, state: ClusterState, arrival: Arrival, exclude: Collection[ReplicaId] = ()) -> Decision:
        """See `Policy.place`; ties go to the smaller replica id."""
        candidates = [r for r in state.running() if r.id not in exclude]
        if not candidates:
            return NoReplica()
        fitting = [r for r in candidates if fits(r, arrival.tokens, self.headroom)]
        if fitting:
            return Place(min(fitting, key=lambda r: (r.free_tokens, r.id)).id)
        return Queue(min(candidates, key=lambda r: (len(r.requests), -r.free_tokens, r.id)).id)


def least_loaded(
    state: ClusterState, running: Collection[ReplicaId], sent: Mapping[ReplicaId, int]
) -> ReplicaId | None:
    """A choice without the scheduler: of `running`, the replica with the most room as last known.

    `sent` counts the caller's own requests per replica; it alone decides between replicas of which nothing is known.
    """

    def load(replica_id: ReplicaId) -> tuple[int, int, ReplicaId]:
        known = state.replica(replica_id)
        return (-known.free_tokens if known else 0, sent.get(replica_id, 0), replica_id)

    return min(running, key=load, default=None)


def fits(replica: ReplicaLoad, tokens: Tokens, headroom: Tokens) -> bool:
    """Whether `tokens` and `headroom` more fit into the free blocks, and a batch slot is free."""
    return replica.free_tokens >= tokens + headroom and len(replica.requests) < replica.max_requests


POLICIES: Mapping[str, Callable[[Tokens], Policy]] = {"best_fit": BestFit}
