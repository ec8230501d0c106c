"""Measurements of a replay and its cluster; pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.client.documents import ReplicaDocument, StateDocument
from policies.model import Phase
from simulator.replay.stream import Record, StreamFault

RUNNING = "RUNNING"


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    """One replica at one time."""

    id: str
    state: str
    used_tokens: int
    capacity_tokens: int
    requests: int
    preemptions: int = 0

    @property
    def used_percent(self) -> float:
        """Percentage of the KV cache in use; 0 while the capacity is unknown."""
        return 100.0 * self.used_tokens / self.capacity_tokens if self.capacity_tokens else 0.0


@dataclass(frozen=True, slots=True)
class ReplaySample:
    """The replay at one time; `replicas` is None if the endpoint did not list them."""

    at_s: float
    running: int
    finished: int
    errors: int
    moved: int = 0
    replicas: tuple[ReplicaSample, ...] | None = None


@dataclass(frozen=True, slots=True)
class OrderedMoves:
    """Counts of the moves ordered by the replay; the last one may not have been answered yet."""

    asked: int = 0
    accepted: int = 0
    rejected: tuple[StreamFault, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplayMeasurements:
    """All measurements of a replay.

    `missing` maps each path that the endpoint does not offer to the reason; `missed` are failed polls of offered paths.
    """

    records: tuple[Record, ...]
    samples: tuple[ReplaySample, ...] = ()
    migrations: tuple[Mapping[str, Any], ...] = ()
    moves: OrderedMoves = OrderedMoves()
    missing: Mapping[str, str] = field(default_factory=dict)
    missed: tuple[StreamFault, ...] = ()
    interrupted: bool = False


def sample_replica(replica: ReplicaDocument) -> ReplicaSample:
    """A replica with its number of requests."""
    return ReplicaSample(
        id=replica.id,
        state=replica.state,
        used_tokens=replica.used_tokens,
        capacity_tokens=replica.capacity_tokens,
        requests=len(replica.requests),
        preemptions=replica.preemptions,
    )


def movable_in(state: StateDocument) -> tuple[str, ...]:
    """The ids of running requests that may move."""
    requests = (request for replica in state.replicas for request in replica.requests)
    return tuple(r.id for r in requests if r.movable and r.phase not in (Phase.WAITING, Phase.MOVING))


def moved_between(earlier: StateDocument, later: StateDocument) -> int:
    """The number of requests in both states that have moved in between."""
    before = earlier.requests()
    return sum(before[id].hop < request.hop for id, request in later.requests().items() if id in before)
