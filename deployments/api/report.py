"""A replica's answer to the scheduler's `report(fence, version)`, and its view for operators."""

from dataclasses import dataclass
from typing import Any

from deployments.cache.occupancy import CacheReport
from migration.memory.pair_tables import HalfState
from migration.protocol.record import MigrationRecord
from policies.decision.reports import Report
from policies.memory.ledger import MemoryReport
from policies.memory.plan import ModelMemory
from policies.model import Blocks, ReplicaId, ReplicaLoad, Role
from policies.prefix.names import Naming


@dataclass(frozen=True, slots=True)
class PairReport:
    """A replica's half of a pair with `buddy`. `state` is that of `migration.memory.pair_tables`.

    It keeps `layers` [first, last). `remote` of its layers run at the buddy now, and `guest_layers` of the buddy's run
    here. `hops` of its steps, with `hop_tokens` tokens, have waited `hop_seconds` seconds for the buddy. For
    `buddy_seconds` of them, one of the halves computed. `served` hops of the buddy ran here. The state began `state_s`
    seconds ago. An operator has ordered the pair `by_hand`, or the policy. `cause` is the reason why it ends, or ended.
    """

    epoch: int
    buddy: ReplicaId
    state: str
    layers: tuple[int, int]
    remote: int
    guest_layers: int = 0
    hops: int = 0
    hop_tokens: int = 0
    hop_seconds: float = 0.0
    buddy_seconds: float = 0.0
    served: int = 0
    state_s: float = 0.0
    by_hand: bool = False
    cause: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The member `pair` of a replica's `memory` in `/mell/state`."""
        return {
            "epoch": self.epoch,
            "buddy": self.buddy,
            "state": self.state,
            "layers": list(self.layers),
            "remote_layers": self.remote,
            "guest_layers": self.guest_layers,
            "hops": self.hops,
            "hop_ms": None if not self.hops else 1e3 * self.hop_seconds / self.hops,
            "served": self.served,
            "state_s": self.state_s,
            "by_hand": self.by_hand,
            "cause": self.cause,
        }


@dataclass(frozen=True, slots=True)
class ElasticMemory:
    """A replica's memory: of its KV pool, `size` blocks are handed out, `used` of them belong to requests.

    `declared` blocks are the most that it can have, and `start` those of its start. `state` is that of
    `migration.memory.tables`; `cause` is the reason why the replica does not have the plan that it was ordered to,
    `sleepless` the reason why it cannot fall asleep, and `unpairable` why it cannot be in a `pair`. It fell asleep at
    `asleep_at`, in seconds since 1970; None while it is awake.
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
    unpairable: str | None = None
    pair: PairReport | None = None
    asleep_at: float | None = None

    @property
    def is_paired(self) -> bool:
        """True if it is in a pair, or on its way there or back."""
        return self.pair is not None and self.pair.state != HalfState.OVER

    @property
    def least(self) -> Blocks:
        """The fewest blocks that it may be ordered to have."""
        return self.model.least_with(self.report.ordered.remote)

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of the plan that it holds, by kind."""
        model, held = self.model, self.report.held.blocks
        if held is None:
            return {"parameters": 0, "kv": 0, "rest": model.asleep}
        parameters = model.parameters - self.report.held.remote * model.layer
        return {"parameters": parameters, "kv": held * model.block, "rest": model.fixed}

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
            "least_blocks": self.least,
            "used_blocks": self.used,
            **{f"{kind}_mib": size >> 20 for kind, size in self.parts.items()},
            "by_hand": self.report.by_hand,
            "asleep_at": self.asleep_at,
            "cause": self.cause,
            "pair": None if self.pair is None else self.pair.to_json(),
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
