"""Observations: what has become different since the last one, pool by pool.

A decision depends on its memory and on one `Observation`, and on nothing else. So a recording of observations and of
the arrivals between them, played through another memory from its beginning, gives the same plans.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

from policies.model import Blocks, Phase, ReplicaId, ReplicaState, RequestId, RequestLoad, Tokens
from policies.paths.beliefs import Profile
from policies.plan import MoveReport

PoolId = NewType("PoolId", str)
"""The name of the deployment whose replicas the pool consists of."""

ENGINE = PoolId("Engine")
"""The pool of an application that has one."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Replicas that are interchangeable: one deployment of one model in one role.

    `capacity` is a new replica's in tokens, 0 as long as no replica has reported. There are to be at least
    `min_replicas` and at most `max_replicas` (None: any number), just now `wanted`.
    """

    deployment: PoolId = ENGINE
    model: str = ""
    role: str = "serve"
    capacity: Tokens = Tokens(0)
    min_replicas: int = 0
    max_replicas: int | None = 1
    wanted: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """Everything that a replica reports but its requests.

    `free_blocks` is the engine's own count, the truth about room where requests share blocks; None where room follows
    from the requests' sizes. A request can continue only where `model` is the same.
    """

    id: ReplicaId
    state: ReplicaState
    node: str
    capacity: Tokens
    block_size: int = 1
    free_blocks: Blocks | None = None
    max_requests: int = 1 << 30
    model: str = ""


@dataclass(frozen=True, slots=True)
class Resident:
    """A request and the replica that it is on; without one it has not been placed yet."""

    replica: ReplicaId | None
    load: RequestLoad


@dataclass(frozen=True, slots=True)
class PoolReport:
    """What is new of one pool.

    `replicas` are those whose status is new or has changed, `lost` those that are gone. `requests` are the ones that
    are new, oldest first, or differ in more than their size; `sizes` maps others to the tokens that they hold now;
    `gone` are on no replica any more. `moves` say what has become of moves, `profiles` what new replicas have measured
    of themselves. `opening` counts replicas that were asked for and are not in the list yet.
    """

    pool: Pool
    replicas: tuple[Status, ...] = ()
    lost: tuple[ReplicaId, ...] = ()
    requests: tuple[Resident, ...] = ()
    gone: tuple[RequestId, ...] = ()
    sizes: Mapping[RequestId, Tokens] = field(default_factory=dict)
    moves: tuple[MoveReport, ...] = ()
    profiles: Mapping[ReplicaId, Profile] = field(default_factory=dict)
    opening: int = 0


@dataclass(frozen=True, slots=True)
class Observation:
    """What is new of every pool at `now`, in seconds of a monotonic clock."""

    now: float
    pools: tuple[PoolReport, ...]


SETTLED = (Phase.DECODE, Phase.MOVING)
"""What a request does that has all of its blocks."""
