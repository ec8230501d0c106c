"""The events of a simulation for its measurement. Points in time are seconds of virtual time."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from policies.cluster.cluster import Cluster
from policies.model import Bytes, Tokens
from policies.plan import Path, Plan, Reason
from policies.prefix.routing import NOT_MATCHED, Matched
from simulator.workload.workload import Job


class TransferOutcome(StrEnum):
    """The outcome of a migration: at the target, or the reason for its failure."""

    MOVED = "moved"
    ENDED = "ended"
    """The request ended before its migration."""
    REFUSED = "refused"
    """The target had no room for the request."""
    DEFERRED = "deferred"
    """The migration never began: neither the links nor the target's prefill budget had room in this epoch."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A migration that has ended: at its target, or (not `completed`) without effect, for the reason in `outcome`.

    `path` is None for a move of the idealised model, which costs nothing. `tokens` is the request's size at the
    beginning, `sent` the bytes sent over links. `began_s` is the time of the decision, `ended_s` the time from which
    nothing of the request is left at its source, `resumed_s` the time at which the request decoded again, None without
    such a time. `stall_s` is the time without tokens due to the migration. `predicted_s` is the planner's estimate from
    the decision until the request decodes at its target (0 without an estimate).
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
    """The statistics of a request that has ended.

    `first_token_s` and `finished_s` are points in time. `longest_gap_s` is the longest time between two of its tokens,
    `stalled_s` the total time after its first token without tokens, due to moves, preemptions and evictions.
    `ideal_first_token_s` and `ideal_s` are the durations from arrival to first and last token on an idle replica.
    `moves` counts completed migrations, `preemptions` the losses of its KV by an overloaded replica or an eviction.
    `matched` are the tokens of its prompt in prefix caches at its placement, `cached` those that its prefill found.
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
    matched: Matched = NOT_MATCHED
    cached: int = 0


class Observer(Protocol):
    """Called in the order of virtual time."""

    def decided(
        self, now: float, cluster: Cluster, plans: Sequence[Plan], closing: int = 0, machines: int | None = None
    ) -> None:
        """Observe an epoch, after its decision and the execution of its instantaneous parts.

        With slots (the idealised model) `now` is the beginning of the slot, every `epoch_s` seconds from 0. Without
        slots epochs may come early, so the state at `now` has to be weighted with the time until the next call. The
        cluster includes starting replicas. Beside it there are `closing` ones, whose caches are copied to others. All
        of them are on that number of `machines`, if these are counted.
        """
        ...

    def stepped(self, now: float, step_s: float, tokens: float) -> None:
        """Observe tokens of decoding requests, which have followed the tokens before them after `step_s` seconds.

        That is the time of a step, or of the gap that a move or a preemption has left.
        """
        ...

    def transferred(self, now: float, transfer: Transfer) -> None:
        """Observe the end of a migration."""
        ...

    def preempted(self, now: float, tokens: Tokens) -> None:
        """Observe a preemption: an overloaded replica drops a request's KV, `tokens` tokens to prefill again."""
        ...

    def finished(self, now: float, life: Life) -> None:
        """Observe the end of a request."""
        ...
