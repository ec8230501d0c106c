"""Observations: the differences from the previous observation, pool by pool.

A decision depends only on its memory and one `Observation`. So a recording of all observations and of the arrivals
between them gives the same plans when it is replayed from its beginning with a new memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from policies.cost.fit import NO_STEPS, StepTotals
from policies.cost.hops import NO_HOPS, HopTotals
from policies.memory.plan import ModelMemory
from policies.model import Blocks, Bytes, Phase, PoolId, ReplicaId, ReplicaState, RequestId, RequestLoad, Tokens
from policies.paths.prices import Profile
from policies.plan import MoveReport
from policies.prefix.change import CacheChange
from policies.prefix.copies import CopyReport


@dataclass(frozen=True, slots=True)
class Pool:
    """Interchangeable replicas: one deployment of one model.

    `capacity` is that of a new replica in tokens (`Status.nominal`), 0 before the first report. `wanted` is the current
    target number of replicas, between `min_replicas` and `max_replicas` (None: no maximum). One that `sleeps` has no
    replica awake while it has no request.
    """

    deployment: PoolId
    capacity: Tokens = Tokens(0)
    min_replicas: int = 0
    max_replicas: int | None = 1
    wanted: int = 0
    sleeps: bool = False


@dataclass(frozen=True, slots=True)
class Status:
    """A replica without its requests.

    `capacity` is the present one, which may change at any time; `nominal` is that of a new replica (0: it is the
    capacity). `free_blocks` is the engine's own count, correct also if requests share blocks, and below zero if the
    capacity has shrunk below what is used; with None, the free room follows from the requests' sizes. A request can
    only move between replicas with the same `model` fingerprint. `steps` are the engine's steps since its start,
    `step_tokens` the most tokens that one of them computes (0: unknown), `max_adapters` the most LoRA adapters in one.
    """

    id: ReplicaId
    state: ReplicaState
    node: str
    capacity: Tokens
    block_size: int = 1
    free_blocks: Blocks | None = None
    max_requests: int = 1 << 30
    model: str = ""
    steps: StepTotals = NO_STEPS
    step_tokens: int = 0
    max_adapters: int = 0
    nominal: Tokens = Tokens(0)


class PairPhase(StrEnum):
    """Where a replica stands with its pair: in none, on the way there, in it, on the way back."""

    APART = "apart"
    FORMING = "forming"
    PAIRED = "paired"
    UNDOING = "undoing"


@dataclass(frozen=True, slots=True)
class PairMember:
    """A replica that may share its layers, by its newest report.

    `whole` tokens of KV fit with all layers, and `gain` more in a pair. It `can_pair` if it rests and nothing speaks
    against it. `buddy` is the other replica of its pair, which an operator has ordered `by_hand`, or the policy;
    `block_tokens` are the tokens of a KV block.
    """

    replica: ReplicaId
    whole: Tokens
    gain: Tokens
    can_pair: bool = True
    phase: PairPhase = PairPhase.APART
    buddy: ReplicaId | None = None
    by_hand: bool = False
    hops: HopTotals = NO_HOPS
    block_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Resident:
    """A request and its replica; None before its first placement."""

    replica: ReplicaId | None
    load: RequestLoad


@dataclass(frozen=True, slots=True)
class PoolReport:
    """The changes of one pool.

    `replicas` are new or changed statuses, `lost` the replicas that no longer exist. `requests` are new or differ in
    more than their size, oldest first; `sizes` are the new sizes of others in tokens; `gone` are the requests that have
    left all replicas. `moves` are the newest states of moves, `profiles` the measurements of new replicas. `opening` is
    the number of requested replicas that are not among the statuses yet. `caches` are the changes of replicas' KV
    caches; that of a replica which reports for the first time is whole. `copies` have ended since the last report.
    `members` are all replicas that pairs may have, if the policy decides on pairs.

    If the report is `whole`, it is a snapshot: `replicas` and `requests` are all that exist, and `lost`, `gone` and
    `sizes` are empty.
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
    caches: Mapping[ReplicaId, CacheChange] = field(default_factory=dict)
    copies: tuple[CopyReport, ...] = ()
    whole: bool = False
    members: tuple[PairMember, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceSeat:
    """A replica whose KV pool divisions size: by its newest report it is ordered to have `blocks` of at most `declared`
    blocks, each for `block_tokens` tokens. `weight` is that of its model.
    """

    replica: ReplicaId
    weight: float
    model: ModelMemory
    block_tokens: int
    declared: Blocks
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Device:
    """The memory of a node. `room` is that of the KV pools of all `seats`: the rest of the budget has other uses."""

    id: str
    room: Bytes
    seats: tuple[DeviceSeat, ...]


@dataclass(frozen=True, slots=True)
class Observation:
    """The changes of every pool at `now`, in seconds of a monotonic clock, and the devices whose memory is divided.

    `waiting` are the replicas that wait for memory of a device to start.
    """

    now: float
    pools: tuple[PoolReport, ...]
    devices: tuple[Device, ...] = ()
    waiting: tuple[ReplicaId, ...] = ()


SETTLED = (Phase.DECODE, Phase.MOVING)
"""The phases in which a request has all of its blocks."""
