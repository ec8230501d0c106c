"""Reconciles what replicas report with what was placed since they reported.

A placement counts on its replica from the moment it is decided until the replica reports the request, or
until it expires: a burst within one epoch is spread by what it will need, not by stale reports.
Time is an argument, in seconds of any monotonic clock.
"""

from collections.abc import Iterable, Mapping, Sequence
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
class Placement:
    """A request sent to a replica that has not reported it yet."""

    request: RequestId
    label: str
    replica: ReplicaId
    tokens: Tokens
    placed_at: float
    expires_at: float


class Ledger:
    """The scheduler's soft state: the newest report of each replica, and placements under way."""

    def __init__(self, placement_ttl_s: float) -> None:
        self._ttl = placement_ttl_s
        self._reports: dict[ReplicaId, ReplicaLoad] = {}
        self._placements: dict[RequestId, Placement] = {}

    def report(self, reports: Iterable[tuple[ReplicaLoad, float]], now: float) -> None:
        """Take the newest report of every replica, with the time at which it was asked for; forget other replicas.

        A report ends the placement of a request that it contains, unless that placement is on another replica and was
        made after the report was asked for: then the report tells of where the request was before.
        """
        self._reports = {}
        for load, asked_at in reports:
            self._reports[load.id] = load
            for request in load.requests:
                placed = self._placements.get(request.id)
                if placed is not None and (placed.replica == load.id or placed.placed_at < asked_at):
                    del self._placements[request.id]
        self._placements = {p.request: p for p in self._placements.values() if p.expires_at > now}

    def place(self, request: RequestId, label: str, replica: ReplicaId, tokens: Tokens, now: float) -> None:
        """Note that a request is on its way to a replica."""
        self._placements[request] = Placement(request, label, replica, tokens, now, now + self._ttl)

    def state(self, now: float) -> ClusterState:
        """The cluster as reports and placements together describe it."""
        pending: dict[ReplicaId, list[Placement]] = {}
        for placement in self._placements.values():
            if placement.expires_at > now:
                pending.setdefault(placement.replica, []).append(placement)
        return ClusterState(tuple(_with_placements(r, pending, now) for r in self._reports.values()))


def _with_placements(load: ReplicaLoad, pending: Mapping[ReplicaId, Sequence[Placement]], now: float) -> ReplicaLoad:
    """A report with the requests on their way to it added, and their blocks taken from its free ones."""
    placements = pending.get(load.id, ())
    if not placements or load.state is not ReplicaState.RUNNING:
        return load
    blocks = sum(-(-p.tokens // load.block_size) for p in placements)
    coming = tuple(
        RequestLoad(
            id=p.request,
            label=p.label,
            tokens=p.tokens,
            phase=Phase.WAITING,
            age_s=now - p.placed_at,
            hop=0,
            immovable="not yet reported by its replica",
        )
        for p in placements
    )
    return replace(load, free_blocks=Blocks(max(0, load.free_blocks - blocks)), requests=load.requests + coming)
