"""A replica's answer to the scheduler's `report(fence, version)`, and its view for operators."""

from dataclasses import dataclass
from typing import Any

from deployments.cache.occupancy import CacheReport
from migration.protocol.record import MigrationRecord
from policies.decision.reports import Report
from policies.model import ReplicaLoad, Role
from policies.prefix.names import Naming


@dataclass(frozen=True, slots=True)
class Gauges:
    """A replica's figures for operators: process ids (replica, engine core, workers), counters since its start, the
    number of staging slots in use, its prefix cache, and its engine's naming of blocks.
    """

    pids: tuple[int, ...] = ()
    preemptions: int = 0
    blocks_loaded: int = 0
    slots_in_use: int = 0
    cache: CacheReport | None = None
    naming: Naming | None = None


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica's answer: `report` for the decision, `gauges` for operators, and the `records` of migrations.

    The replica leads these migrations as their source. All that are under way are included, and ended ones whose
    records have changed since the last answer (all ended ones in memory, if `report` is a snapshot); newest first.
    """

    report: Report
    gauges: Gauges = Gauges()
    records: tuple[MigrationRecord, ...] = ()


def replica_json(
    load: ReplicaLoad, gauges: Gauges = Gauges(), role: Role = Role.BOTH, by_hand: Role | None = None
) -> dict[str, Any]:
    """A replica's entry in `/mell/state`. `by_hand` is the role that an operator has set."""
    return {
        "id": load.id,
        "state": load.state,
        "role": role,
        "role_by_hand": by_hand,
        "node": load.node,
        "pids": list(gauges.pids),
        "capacity_tokens": load.capacity_tokens,
        "free_blocks": max(0, load.free_blocks),
        "used_tokens": load.used_tokens,
        "preemptions": gauges.preemptions,
        "kv_blocks_loaded": gauges.blocks_loaded,
        "staging_slots_in_use": gauges.slots_in_use,
        "cache": None if gauges.cache is None else gauges.cache.to_json(),
        "requests": [
            {
                "id": r.id,
                "label": r.label,
                "class": r.precedence.service_class,
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
