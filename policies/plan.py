"""What an epoch decides, as a value, and what became of it."""

from dataclasses import dataclass
from enum import StrEnum

from policies.causes import Cause
from policies.model import Bytes, ReplicaId, RequestId, Tokens


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
    """A running request leaves `source` for `target`. Moves of one `unit` belong together (a multi-item).

    `path` is None where a move costs nothing (the idealised model). `kv_s` and `tokens_s` are the seconds that either
    path was predicted to take until the request has a new token at its target; None without a prediction, or never.
    """

    request: RequestId
    source: ReplicaId
    target: ReplicaId
    tokens: Tokens
    reason: Reason
    unit: int
    path: Path | None = None
    kv_s: float | None = None
    tokens_s: float | None = None

    @property
    def predicted_s(self) -> float | None:
        """The prediction for the path that was chosen."""
        return self.kv_s if self.path is Path.KV else self.tokens_s


@dataclass(frozen=True, slots=True)
class MoveReport:
    """The newest state of a move that was ordered, by the scheduler, by an operator or by an earlier scheduler.

    `moved` is None while the move is under way, True once nothing of the request is left at its source, False if the
    request stays there; then `cause` says why. `took_s` is from the order to that moment, `whole_s` from the order to
    the first new token at the target, None as long as that is not known. `path` is the one that was taken, `sent` what
    went over the link. A move that `fell_back` to tokens after `copy_s` seconds was to send KV.
    """

    request: RequestId
    source: ReplicaId
    target: ReplicaId
    moved: bool | None = None
    path: Path = Path.TOKENS
    cause: Cause | None = None
    by_hand: bool = False
    took_s: float | None = None
    whole_s: float | None = None
    tokens: Tokens | None = None
    sent: Bytes = Bytes(0)
    copy_s: float = 0.0
    fell_back: bool = False
    predicted_s: float | None = None


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
    `deferred` are moves for which neither the links nor the targets' prefill budgets have room in this epoch: they are
    not made, and decided anew in the next one.
    """

    moves: tuple[Move, ...] = ()
    placements: tuple[Placement, ...] = ()
    evicted: tuple[Eviction, ...] = ()
    queued: tuple[RequestId, ...] = ()
    opened: tuple[Opening, ...] = ()
    closed: tuple[ReplicaId, ...] = ()
    deferred: tuple[Move, ...] = ()
