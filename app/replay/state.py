"""The replay and its cluster, second by second; pure."""

from dataclasses import dataclass

from app.client.documents import ReplicaDocument, StateDocument
from policies.model import Phase

RUNNING = "RUNNING"


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    """One replica at one moment."""

    id: str
    state: str
    used_tokens: int
    capacity_tokens: int
    requests: int
    preemptions: int = 0

    @property
    def used_percent(self) -> float:
        """Share of the KV cache in use; 0 while the capacity is not known yet."""
        return 100.0 * self.used_tokens / self.capacity_tokens if self.capacity_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The replay at one moment; `replicas` is None where the endpoint did not list them."""

    at_s: float
    running: int
    finished: int
    errors: int
    moved: int = 0
    replicas: tuple[ReplicaSample, ...] | None = None


def sample_replica(replica: ReplicaDocument) -> ReplicaSample:
    """A replica, its requests counted."""
    return ReplicaSample(
        id=replica.id,
        state=replica.state,
        used_tokens=replica.used_tokens,
        capacity_tokens=replica.capacity_tokens,
        requests=len(replica.requests),
        preemptions=replica.preemptions,
    )


def movable_in(state: StateDocument) -> tuple[str, ...]:
    """The ids of the requests that run and may move."""
    requests = (request for replica in state.replicas for request in replica.requests)
    return tuple(r.id for r in requests if r.movable and r.phase not in (Phase.WAITING, Phase.MOVING))


def moved_between(earlier: StateDocument, later: StateDocument) -> int:
    """The number of requests in both states that changed replica in between."""
    before = earlier.requests()
    return sum(before[id].hop < request.hop for id, request in later.requests().items() if id in before)
