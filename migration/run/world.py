"""The parts of a replica that a migration uses, and the time limits of its activities."""

from collections.abc import Set
from dataclasses import dataclass, field

from migration.protocol.ports import BlockStore, Clock, SourceHost, Transport
from migration.protocol.request import Trait
from migration.protocol.rounds import CopyLimits
from migration.protocol.sizing import prefill_limit_s, time_limit_s
from migration.run.slots import Slots
from policies.model import Bytes, PoolId, ReplicaId

ROUND_FLOOR_S, FINAL_FLOOR_S = 10.0, 2.0
"""The least time limits of copies while the request runs, and during its pause."""
PREFILL_FLOOR_S = 10.0
"""The least time limit of a wait for the source's prefill."""


@dataclass(frozen=True, slots=True)
class MigrationLimits:
    """Time limits of the activities, in seconds, and of pre-copying.

    `copy_s` limits each round of pre-copying and `final_s` the copy during the pause; None: they follow the bytes.
    `prefill_s` limits each wait for further blocks of the source's prefill; None: it follows the tokens.
    `doubt_s` is the time between two questions of a source in doubt to its reader. `resume_s` is the longest wait of a
    migration's record for the target's first token; nothing else waits for that. `token_s` is the longest wait for the
    token behind which a request is frozen.
    """

    prepare_s: float = 2.0
    copy_s: float | None = None
    final_s: float | None = None
    adopt_s: float = 5.0
    copy: CopyLimits = field(default_factory=CopyLimits)
    doubt_s: float = 1.0
    resume_s: float = 30.0
    token_s: float = 0.25
    prefill_s: float | None = None

    def preparing_s(self, traits: Set[Trait]) -> float:
        """The time limit of the target's answer, which tries the grammar of a request in its engine before."""
        return self.prepare_s + (self.adopt_s if Trait.STRUCTURED in traits else 0.0)

    def round_s(self, size: Bytes, bytes_per_s: float | None) -> float:
        """The time limit of a round of pre-copying, of `size` bytes at an expected rate."""
        return time_limit_s(size, bytes_per_s, ROUND_FLOOR_S) if self.copy_s is None else self.copy_s

    def prefilling_s(self, tokens: int) -> float:
        """The time limit of a wait for the prefill of `tokens` tokens."""
        return prefill_limit_s(tokens, PREFILL_FLOOR_S) if self.prefill_s is None else self.prefill_s

    def last_s(self, size: Bytes, bytes_per_s: float | None) -> float:
        """The time limit of the copy during the pause, likewise."""
        return time_limit_s(size, bytes_per_s, FINAL_FLOOR_S) if self.final_s is None else self.final_s


@dataclass(frozen=True, slots=True)
class MigrationWorld:
    """The parts of the source replica that a migration uses. `pool` is the replica's."""

    replica: ReplicaId
    pool: PoolId
    host: SourceHost
    blocks: BlockStore
    transport: Transport
    slots: Slots
    limits: MigrationLimits
    clock: Clock
    wall_clock: Clock
    hides_handed_over: bool = False
    """No request finds, on the replica where a handed over one decodes, what it has there."""
