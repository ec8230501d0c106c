"""The records of migrations and of copies: the same in the log, the API and the scheduler."""

from collections import Counter, OrderedDict
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from policies.causes import Cause
from policies.model import SOLE_POOL, Blocks, Bytes, PoolId, ReplicaId, RequestId, Tokens
from policies.plan import Path, Reason
from policies.prefix.copies import CopyReason

Key = TypeVar("Key")
Value = TypeVar("Value")


class Outcome(StrEnum):
    """How a migration ended."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyAccount:
    """The work of a copy session, for any reason: the part that the records of moves and of copies have in common.

    `present` is the number of blocks that the target had before, `blocks` and `bytes` (headers included) count what was
    sent, in `copy_s` seconds, failed copies included.
    """

    present: Blocks = Blocks(0)
    blocks: Blocks = Blocks(0)
    bytes: Bytes = Bytes(0)
    copy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MigrationRecord(CopyAccount):
    """One migration. `outcome` is None while it runs; `state` is the source session's.

    `pool` is the pool of both replicas, by the name of their deployment. A record without one is of the sole pool.

    `trigger` is why it was ordered; `reason` is a text of it and of the detour, if the path is not the one asked for:
    "overload; kv failed: ...". `cause` is why the migration ended without effect (`error` is its text), or why it went
    by tokens instead of KV; None if it went as ordered.
    `rounds` are the pre-copy rounds. `tokens` is the context at the freeze, None if it never came to that.

    `pause_s` is from the freeze to the target's confirmation as the source saw it (seconds), `duration_s` from the
    order to there. `resume_s` is from the freeze to the first new token at the target, the target's prefill
    included and the way of the hand-over's message not; None without the target's report, or before it.
    `predicted_kv_s` and `predicted_tokens_s` are a planner's estimates for each path, from the order to the
    first new token; None if nobody predicted it. `whole_s` is the time that it took.

    A migration of a request that is still being prefilled waits for the source's steps for `waited_s` seconds in all,
    which are neither in `whole_s` nor in any prediction.
    """

    id: str
    request_id: RequestId
    label: str
    source: ReplicaId
    target: ReplicaId
    path: Path
    reason: str
    state: str
    trigger: Reason
    outcome: Outcome | None = None
    error: str | None = None
    cause: Cause | None = None
    rounds: int = 0
    pause_s: float | None = None
    duration_s: float | None = None
    started_at: float = 0.0
    tokens: Tokens | None = None
    waited_s: float = 0.0
    resume_s: float | None = None
    predicted_kv_s: float | None = None
    predicted_tokens_s: float | None = None
    pool: PoolId = SOLE_POOL

    @property
    def whole_s(self) -> float | None:
        """Seconds from the order to the first new token at the target, but for `waited_s`.

        None before the target has reported that token.
        """
        if self.outcome is not Outcome.COMMITTED:
            return None
        if self.duration_s is None or self.pause_s is None or self.resume_s is None:
            return None
        return self.duration_s - self.waited_s - self.pause_s + self.resume_s

    @property
    def fell_back(self) -> bool:
        """True if the migration began by KV and became one by tokens."""
        return self.path is Path.TOKENS and self.copy_s > 0

    @property
    def predicted_s(self) -> float | None:
        """The prediction for the path that it took."""
        return self.predicted_kv_s if self.path is Path.KV else self.predicted_tokens_s

    def to_json(self) -> dict[str, Any]:
        """The record as the API shows it."""
        return asdict(self)


class CopyOutcome(StrEnum):
    """How a copy ended."""

    DONE = "done"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class CopyRecord(CopyAccount):
    """One copy of a cached prefix. `outcome` is None while it runs; `state` is the donor session's.

    `pool` is the pool of both replicas, by the name of their deployment. A record without one is of the sole pool.

    The donor held the first `held` blocks of the context; the target lacked `tokens` tokens of them. `duration_s` is
    from the order to the end. `cause` is the reason of a copy that was aborted, and `error` its text.
    """

    id: str
    source: ReplicaId
    target: ReplicaId
    reason: CopyReason
    state: str
    outcome: CopyOutcome | None = None
    error: str | None = None
    cause: Cause | None = None
    held: Blocks = Blocks(0)
    tokens: Tokens = Tokens(0)
    duration_s: float = 0.0
    started_at: float = 0.0
    pool: PoolId = SOLE_POOL

    def to_json(self) -> dict[str, Any]:
        """The record as the API shows it."""
        return asdict(self)


@dataclass(slots=True)
class CopyCounts:
    """The copies that have ended, by reason and outcome, and the bytes that they have sent."""

    ended: Counter[tuple[CopyReason, CopyOutcome]] = field(default_factory=Counter)
    sent: int = 0

    def add(self, record: CopyRecord) -> None:
        """Count a copy that has ended."""
        assert record.outcome is not None, "the copy has ended"
        self.ended[record.reason, record.outcome] += 1
        self.sent += record.bytes


class Recent(OrderedDict[Key, Value]):
    """A dictionary of at most `most` entries. It evicts in insertion order; overwriting a key does not refresh it."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        if len(self) > self._most:
            self.popitem(last=False)
