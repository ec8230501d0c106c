"""What a replica reports to the scheduler."""

from dataclasses import dataclass
from typing import Any

from migration.protocol.record import MigrationRecord
from policies.model import ReplicaLoad
from policies.paths.beliefs import Profile


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica's load, and what inspection shows beside it. `records` are its migrations, newest first.

    `profile` is what it measured of itself at its start.
    """

    load: ReplicaLoad
    pids: tuple[int, int, int]
    preemptions: int
    blocks_loaded: int
    slots_in_use: int
    fence: int
    records: tuple[MigrationRecord, ...]
    profile: Profile | None = None

    def to_json(self) -> dict[str, Any]:
        """The replica as `/mell/state` shows it."""
        load = self.load
        return {
            "id": load.id,
            "state": load.state,
            "node": load.node,
            "pids": list(self.pids),
            "capacity_tokens": load.capacity_tokens,
            "free_blocks": load.free_blocks,
            "used_tokens": load.used_tokens,
            "preemptions": self.preemptions,
            "kv_blocks_loaded": self.blocks_loaded,
            "staging_slots_in_use": self.slots_in_use,
            "requests": [
                {
                    "id": r.id,
                    "label": r.label,
                    "tokens": r.tokens,
                    "phase": r.phase,
                    "age_s": r.age_s,
                    "movable": r.immovable is None,
                    "immovable_reason": r.immovable,
                    "hop": r.hop,
                }
                for r in load.requests
            ],
        }
