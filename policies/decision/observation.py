"""What one live epoch begins with: the cluster as it was found, and what has become of earlier decisions.

An observation holds all that a decision depends on beside the observations before it. So a recording of them, played
through another `Planner` from its beginning, gives the same plans.
"""

from dataclasses import dataclass

from policies.model import ClusterState, ReplicaId, RequestId


@dataclass(frozen=True, slots=True)
class Underway:
    """A move that was ordered and has not ended: the request lives at `source`, its room at `target` is promised."""

    request: RequestId
    source: ReplicaId
    target: ReplicaId


@dataclass(frozen=True, slots=True)
class Observation:
    """The cluster at `now`, in seconds of a monotonic clock.

    `opening` counts replicas that were asked for and are not in `state` yet, `max_replicas` is how many there may be in
    all. `by_hand` are requests that an operator moved since the last observation, `took_s` how many seconds those moves
    took that were completed since then.
    """

    now: float
    state: ClusterState
    moves: tuple[Underway, ...] = ()
    opening: int = 0
    max_replicas: int = 1
    by_hand: tuple[RequestId, ...] = ()
    took_s: tuple[float, ...] = ()
