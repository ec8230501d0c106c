"""What `/mell/state` says, as far as a replay needs it; pure.

Payloads come from another process, maybe of another version: a field that is missing or of another type
raises `ValueError`, and the caller does without that sample.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STATE = "/mell/state"
MIGRATIONS = "/mell/migrations"
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
class Cluster:
    """All replicas at one moment, and their requests: which may be moved, how often each was moved."""

    replicas: tuple[ReplicaSample, ...]
    movable: tuple[str, ...]
    hops: Mapping[str, int]

    def moved_since(self, earlier: "Cluster") -> int:
        """How many requests, known to both, changed replica in between."""
        return sum(hop > earlier.hops.get(request, hop) for request, hop in self.hops.items())


@dataclass(frozen=True, slots=True)
class Sample:
    """The replay at one moment; `replicas` is None where the endpoint did not say."""

    at_s: float
    running: int
    finished: int
    errors: int
    moved: int = 0
    replicas: tuple[ReplicaSample, ...] | None = None


def parse_cluster(payload: Any) -> Cluster:
    """The part of a `/mell/state` answer that a replay looks at."""
    try:
        replicas = payload["replicas"]
        requests = [request for replica in replicas for request in replica["requests"]]
        return Cluster(
            replicas=tuple(_parse_replica(replica) for replica in replicas),
            movable=tuple(str(request["id"]) for request in requests if _may_move(request)),
            hops={str(request["id"]): int(request["hop"]) for request in requests},
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a state: {error!r}") from None


def _parse_replica(replica: Mapping[str, Any]) -> ReplicaSample:
    return ReplicaSample(
        id=str(replica["id"]),
        state=str(replica["state"]),
        # A replica that starts has no KV cache yet and may say null.
        used_tokens=int(replica["used_tokens"] or 0),
        capacity_tokens=int(replica["capacity_tokens"] or 0),
        requests=len(replica["requests"]),
        preemptions=int(replica.get("preemptions") or 0),
    )


def _may_move(request: Mapping[str, Any]) -> bool:
    return bool(request["movable"]) and str(request["phase"]).lower() not in ("waiting", "moving")
