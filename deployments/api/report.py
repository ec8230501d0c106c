"""A replica's answer to the scheduler's `report(fence, version)`, and its view for operators."""

from dataclasses import dataclass
from typing import Any

from deployments.cache.occupancy import CacheReport
from migration.protocol.record import MigrationRecord
from policies.decision.reports import Report
from policies.memory.ledger import MemoryReport
from policies.memory.plan import ModelMemory
from policies.model import Blocks, ReplicaLoad, Role
from policies.prefix.names import Naming


@dataclass(frozen=True, slots=True)
class ElasticMemory:
    """A replica's memory: of its KV pool, `size` blocks are handed out, `used` of them belong to requests.

    `declared` blocks are the most that it can have, and `start` those of its start. `state` is that of
    `migration.memory.tables`; `cause` is the reason why the replica does not have the plan that it was ordered to,
    `sleepless` the reason why it cannot fall asleep.
    """

    report: MemoryReport
    model: ModelMemory
    declared: Blocks
    start: Blocks
    size: Blocks
    used: Blocks
    state: str
    cause: str | None = None
    sleepless: str | None = None

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of the plan that it holds, by kind."""
        model, held = self.model, self.report.held.blocks
        if held is None:
            return {"parameters": 0, "kv": 0, "rest": model.asleep}
        return {"parameters": model.parameters, "kv": held * model.block, "rest": model.fixed}

    def to_json(self, node: str) -> dict[str, Any]:
        """The member `memory` of a replica in `/mell/state`."""
        held, ordered = self.report.held.blocks or 0, self.report.ordered.blocks or 0
        return {
            "device": node,
            "state": self.state,
            "blocks": self.size,
            "ordered_blocks": ordered,
            "held_blocks": held,
            "declared_blocks": self.declared,
            "least_blocks": self.model.floor,
            "used_blocks": self.used,
            **{f"{kind}_mib": size >> 20 for kind, size in self.parts.items()},
            "by_hand": self.report.by_hand,
            "cause": self.cause,
        }


@dataclass(frozen=True, slots=True)
class Gauges:
    """A replica's figures for operators: process ids (replica, engine core, workers), counters since its start, the
    number of staging slots in use, its prefix cache, its engine's naming of blocks, and its KV pool if that is elastic.
    """

    pids: tuple[int, ...] = ()
    preemptions: int = 0
    blocks_loaded: int = 0
    slots_in_use: int = 0
    cache: CacheReport | None = None
    naming: Naming | None = None
    memory: ElasticMemory | None = None


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
    memory = {} if gauges.memory is None else {"memory": gauges.memory.to_json(load.node)}
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
        **memory,
    }
