"""Plans, the decisions of epochs, and reports on the migrations that they ordered."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from policies.causes import Cause
from policies.model import Bytes, ReplicaId, RequestId, Tokens


class Path(StrEnum):
    """The two ways of a request's context to its new replica."""

    KV = "kv"
    TOKENS = "tokens"


class Reason(StrEnum):
    """The reason for a move. Policies give the first six. The live scheduler adds EVACUATE (the request's replica is
    about to stop), ADMIT (the request was queued on a replica without room for it), DISAGGREGATE (the request's replica
    is for prefills) and MANUAL (an operator's order). The ingress adds LOST: the request continues on another replica
    after the loss of its own, and HAND_OVER: it continues at another Mell.
    """

    OVERLOAD = "overload"
    MAKE_ROOM = "make_room"
    FILL = "fill"
    RECLASS = "reclass"
    BALANCE = "balance"
    DRAIN = "drain"
    EVACUATE = "evacuate"
    ADMIT = "admit"
    DISAGGREGATE = "disaggregate"
    MANUAL = "requested by operator"
    LOST = "replica lost"
    HAND_OVER = "hand-over"


@dataclass(frozen=True, slots=True)
class Move:
    """A running request leaves `source` for `target`. Moves of one `unit` belong together (a multi-item).

    `path` is None if moves cost nothing (the idealised model). `kv_s` and `tokens_s` are the predicted seconds of
    either path until the request has a new token at its target; None without a prediction, or if the path is closed.
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
    """The newest state of an ordered move, whether this scheduler, an earlier one or an operator ordered it.

    `moved` is None while the move is under way, True once nothing of the request is left at its source, False if the
    request stays there, for the reason in `cause`. `took_s` lasts from the order to the end of the move at the source,
    `whole_s` from the order to the first new token at the target, None before the target has reported that token; both
    without the time for which the move has waited for the source's own prefill of the request.
    `path` is the path taken, `sent` the bytes sent over the link. A move with `fell_back` began by KV and changed to
    tokens after `copy_s` seconds. `reason` is that of its order.
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
    reason: Reason = Reason.MANUAL


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
class Open:
    """Start a replica. The id is the plan's own; the running replica may have another."""

    replica: ReplicaId
    node: str


@dataclass(frozen=True, slots=True)
class Close:
    """Stop an empty replica."""

    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class Pair:
    """Two replicas give each other layers, and gain `gained` tokens of KV together.

    Predicted are the seconds until the first token of the queue's last request, in pairs and without; None: never, or
    for a request that no replica alone can hold.
    """

    lower: ReplicaId
    upper: ReplicaId
    gained: Tokens
    paired_s: float | None = None
    whole_s: float | None = None


@dataclass(frozen=True, slots=True)
class Unpair:
    """Two paired replicas get all of their layers back."""

    lower: ReplicaId
    upper: ReplicaId


Pairs = tuple[Pair | Unpair, ...]
"""The pairs that end and form in an epoch, in this order."""

Action = Open | Eviction | Move | Placement | Close | Pair | Unpair
"""One thing to do. Every driver of the decision has an executor for each kind that its plans contain."""

A = TypeVar("A", bound=Action)


@dataclass(frozen=True, slots=True)
class Plan:
    """One epoch's decision: its actions in the order of their execution, kind by kind, and the queued requests.

    Moves and placements are one change: a move may need room that another one frees, unless moves take time.
    `deferred` are moves for which neither the links nor the targets' prefill budgets have room in this epoch. They are
    dropped; the next epoch decides anew. `proposed` is only in plans of the mode `observe`, `proposed_pairs` only where
    pairs or all decisions are observed.
    """

    actions: tuple[Action, ...] = ()
    queued: tuple[RequestId, ...] = ()
    deferred: tuple[Move, ...] = ()
    proposed: "Proposal | None" = None
    proposed_pairs: Pairs = ()

    @classmethod
    def of(
        cls,
        moves: Iterable[Move] = (),
        placements: Iterable[Placement] = (),
        evicted: Iterable[Eviction] = (),
        queued: tuple[RequestId, ...] = (),
        opened: Iterable[Open] = (),
        closed: Iterable[ReplicaId] = (),
        deferred: tuple[Move, ...] = (),
        proposed: "Proposal | None" = None,
    ) -> "Plan":
        """The plan of these actions, each kind in its order."""
        actions: tuple[Action, ...] = (*opened, *evicted, *moves, *placements, *map(Close, closed))
        return cls(actions, queued, deferred, proposed)

    def with_pairs(self, pairs: Pairs, proposed: bool = False) -> "Plan":
        """The plan with pairs that end and form: behind all other actions, or only `proposed`."""
        if proposed:
            return replace(self, proposed_pairs=pairs)
        return replace(self, actions=(*self.actions, *pairs))

    def actions_of(self, kind: type[A]) -> tuple[A, ...]:
        """The actions of one kind."""
        return tuple(action for action in self.actions if isinstance(action, kind))

    @property
    def moves(self) -> tuple[Move, ...]:
        """The moves."""
        return self.actions_of(Move)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placements of waiting requests."""
        return self.actions_of(Placement)

    @property
    def evicted(self) -> tuple[Eviction, ...]:
        """The evictions."""
        return self.actions_of(Eviction)

    @property
    def opened(self) -> tuple[Open, ...]:
        """The replicas to start."""
        return self.actions_of(Open)

    @property
    def closed(self) -> tuple[ReplicaId, ...]:
        """The ids of the replicas to stop."""
        return tuple(action.replica for action in self.actions_of(Close))

    @property
    def pairs(self) -> Pairs:
        """The pairs that end and form."""
        return tuple(action for action in self.actions if isinstance(action, Pair | Unpair))


@dataclass(frozen=True, slots=True)
class Proposal:
    """An epoch's decision in the mode `act`, proposed in the mode `observe` and not carried out.

    `plan` is the plan of `act`. `moves` are all moves of the decision, also those beyond the bounds on simultaneous
    moves, which `act` would begin in later epochs; they have no paths. `replicas_needed` is the number of running and
    starting replicas after `moves`, without the empty ones that neither a minimum nor the slack keeps open.
    """

    plan: Plan
    moves: tuple[Move, ...]
    replicas_needed: int
