"""What an epoch decides, as a value."""

from dataclasses import dataclass
from enum import StrEnum

from policies.model import ReplicaId, RequestId, Tokens


class Path(StrEnum):
    """How a request's context comes to its new replica."""

    KV = "kv"
    TOKENS = "tokens"


class Reason(StrEnum):
    """Why a request is moved. Policies give the first six. Of the live scheduler's own, EVACUATE means that the
    request's replica is about to stop, ADMIT that the request was queued where there was no room for it, MANUAL that an
    operator ordered the move. LOST is the ingress's: the request continues elsewhere since its replica was lost.
    """

    OVERLOAD = "overload"
    MAKE_ROOM = "make_room"
    FILL = "fill"
    RECLASS = "reclass"
    BALANCE = "balance"
    DRAIN = "drain"
    EVACUATE = "evacuate"
    ADMIT = "admit"
    MANUAL = "requested by operator"
    LOST = "replica lost"


@dataclass(frozen=True, slots=True)
class Move:
    """A running request leaves `source` for `target`. Moves of one `unit` belong together (a multi-item)."""

    request: RequestId
    source: ReplicaId
    target: ReplicaId
    tokens: Tokens
    reason: Reason
    unit: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A waiting request starts on this replica."""

    request: RequestId
    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class Eviction:
    """A running request loses its KV blocks; wherever it is placed next, all of it is prefilled again."""

    request: RequestId
    source: ReplicaId
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Opening:
    """A replica to start. The id is the plan's own: whoever starts it may give it another."""

    replica: ReplicaId
    node: str


@dataclass(frozen=True, slots=True)
class Plan:
    """One epoch's decision: what moves, what starts where, what waits, and which replicas open and close.

    Moves and placements are one change: a move may need room that another one frees, unless moves take their time.
    """

    moves: tuple[Move, ...] = ()
    placements: tuple[Placement, ...] = ()
    evicted: tuple[Eviction, ...] = ()
    queued: tuple[RequestId, ...] = ()
    opened: tuple[Opening, ...] = ()
    closed: tuple[ReplicaId, ...] = ()
