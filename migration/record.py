"""What is told of a migration afterwards: one record, the same in the log, the API and the scheduler."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from migration.messages import Path
from policies.model import Blocks, Bytes, ReplicaId, RequestId


class Outcome(StrEnum):
    """How a migration ended."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class MigrationRecord:
    """One migration. `outcome` is None while it runs; `state` is the source session's.

    `reason` says why it was done and, where the path is not the one asked for, why: "manual; kv failed: ...".
    `bytes` and `blocks` count what was sent, `rounds` the pre-copy rounds, `pause_s` is from the freeze to the
    target's confirmation as the source saw it (seconds), `duration_s` the whole of it.
    """

    id: str
    request_id: RequestId
    label: str
    source: ReplicaId
    target: ReplicaId
    path: Path
    reason: str
    state: str
    outcome: Outcome | None = None
    error: str | None = None
    bytes: Bytes = Bytes(0)
    blocks: Blocks = Blocks(0)
    rounds: int = 0
    pause_s: float | None = None
    duration_s: float | None = None
    started_at: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The record as the API shows it."""
        return asdict(self)
