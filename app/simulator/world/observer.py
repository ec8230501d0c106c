"""What a simulation tells whoever measures it. Points in time are seconds of virtual time."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from app.simulator.workload.workload import Job
from policies.cluster.cluster import Cluster
from policies.model import Bytes, Tokens
from policies.plan import Path, Plan, Reason


class TransferOutcome(StrEnum):
    """How a migration ended: at its target, or without effect and why."""

    MOVED = "moved"
    ENDED = "ended"
    """The request was over before its migration was."""
    REFUSED = "refused"
    """The target had no room for it, or none any more."""
    DEFERRED = "deferred"
    """It never began: neither the links nor the target's prefill budget had room for it in this epoch."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A migration that is over, at its target or (not `completed`) without effect as `outcome` says.

    `path` is None for a move of the idealised model, which costs nothing.
    `tokens` is what the request held when it began, `sent` what went over links. `began_s` and `ended_s` are points
    in time: the decision, and the moment from which nothing of the request is left at its source; `resumed_s` is when
    the request decoded again, None if it never did because of this migration. `stall_s` is for how long it produced no
    token because of it. `predicted_s` is how long the planner expected it to take from the decision until the request
    decodes at its target (0 where nothing was planned).
    """

    path: Path | None
    tokens: Tokens
    sent: Bytes
    began_s: float
    ended_s: float
    stall_s: float
    same_node: bool
    completed: bool
    outcome: TransferOutcome = TransferOutcome.MOVED
    reason: Reason = Reason.OVERLOAD
    predicted_s: float = 0.0
    resumed_s: float | None = None


@dataclass(frozen=True, slots=True)
class Life:
    """A request that is over.

    `first_token_s` and `finished_s` are points in time. `longest_gap_s` is the longest time between two of its
    tokens, `stalled_s` how long in all it produced nothing after its first token because of moves, preemptions and
    evictions. `ideal_first_token_s` and `ideal_s` are durations: to its first token and to its last one, from its
    arrival, had it been alone on an idle replica. `moves` are those that were completed; `preemptions` counts how
    often its KV was dropped, by an overloaded replica or by an eviction.
    """

    job: Job
    first_token_s: float
    finished_s: float
    longest_gap_s: float
    stalled_s: float
    ideal_first_token_s: float
    ideal_s: float
    moves: int
    preemptions: int


class Observer(Protocol):
    """Called in the order of virtual time."""

    def decided(self, now: float, cluster: Cluster, plans: Sequence[Plan]) -> None:
        """An epoch has been decided and carried out as far as it can be at once.

        With slots (the idealised model) `now` is the beginning of the slot, every `epoch_s` seconds from 0. Without,
        epochs may come early, so what holds at `now` is to be weighed with the time until the next call. Replicas
        that are starting are in the cluster too. Moves that were put off are not in the plans.
        """
        ...

    def transferred(self, now: float, transfer: Transfer) -> None:
        """A migration is over."""
        ...

    def preempted(self, now: float, tokens: Tokens) -> None:
        """An overloaded replica dropped the KV of a request, which will be prefilled again."""
        ...

    def finished(self, now: float, life: Life) -> None:
        """A request is over."""
        ...
