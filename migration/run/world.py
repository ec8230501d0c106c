"""The parts of a replica that a migration uses, and the time limits of its activities."""

from dataclasses import dataclass, field

from migration.protocol.ports import BlockStore, Clock, SourceHost, Transport
from migration.protocol.rounds import CopyLimits
from migration.run.slots import Slots
from policies.model import ReplicaId


@dataclass(frozen=True, slots=True)
class MigrationLimits:
    """Time limits of the activities, in seconds, and of pre-copying.

    `doubt_s` is the time between two questions of a source in doubt to its reader. `resume_s` is the longest wait of a
    migration's record for the target's first token; nothing else waits for that.
    """

    prepare_s: float = 2.0
    copy_s: float = 10.0
    final_s: float = 2.0
    adopt_s: float = 5.0
    copy: CopyLimits = field(default_factory=CopyLimits)
    doubt_s: float = 1.0
    resume_s: float = 30.0


@dataclass(frozen=True, slots=True)
class MigrationWorld:
    """The parts of the source replica that a migration uses."""

    replica: ReplicaId
    host: SourceHost
    blocks: BlockStore
    transport: Transport
    slots: Slots
    limits: MigrationLimits
    clock: Clock
    wall_clock: Clock
