"""Sample documents of an endpoint, made by the application's own classes."""

from dataclasses import replace
from typing import Any

from deployments.api.report import ElasticMemory, Gauges, replica_json
from migration.protocol.record import MigrationRecord, Outcome
from policies.decision.matching import Basis, MatchedReplica, PromptMatch, Routed
from policies.decision.placement import Place
from policies.memory.ledger import MemoryReport, OrderNumber
from policies.memory.plan import ASLEEP, MemoryPlan, ModelMemory
from policies.model import (
    Blocks,
    Bytes,
    Phase,
    ReplicaId,
    ReplicaLoad,
    ReplicaState,
    RequestId,
    RequestLoad,
    Role,
    Tokens,
)
from policies.plan import Path, Reason
from policies.prefix.routing import ReplicaScore

NOW = 1_800_000_000.0


def request(id: str, tokens: int, phase: Phase = Phase.DECODE, hop: int = 0, label: str = "") -> RequestLoad:
    """A request on a replica."""
    return RequestLoad(RequestId(id), label or id, Tokens(tokens), phase, age_s=3.0, hop=hop)


def replica(
    id: str,
    *requests: RequestLoad,
    state: ReplicaState = ReplicaState.RUNNING,
    used: int | None = None,
    capacity: int = 3200,
    role: Role = Role.BOTH,
    by_hand: Role | None = None,
    memory: ElasticMemory | None = None,
) -> dict[str, Any]:
    """A replica with blocks of 32 tokens, as many as its requests need."""
    used = sum(-(-r.tokens // 32) for r in requests if r.phase is not Phase.WAITING) if used is None else used
    free = Blocks(capacity // 32 - used)
    load = ReplicaLoad(ReplicaId(id), state, "4f0b45ba" + 48 * "0", Tokens(capacity), 32, free, 64, requests)
    return replica_json(load, Gauges((1, 2, 3), memory=memory), role, by_hand)


def elastic(
    id: str, blocks: int | None, used: int = 0, by_hand: bool = False, asleep_at: float | None = None
) -> ElasticMemory:
    """The elastic KV pool of a replica of a model with 2,048 MiB of parameters; without `blocks`, it sleeps."""
    plan = ASLEEP if blocks is None else MemoryPlan(Blocks(blocks))
    parameters, fixed, asleep, block = (Bytes(size << 20) for size in (2048, 620, 310, 2))
    model = ModelMemory(parameters, fixed, asleep, block, Blocks(32))
    report = MemoryReport(ReplicaId(id), OrderNumber(1), plan, plan, by_hand)
    state, size = "asleep" if blocks is None else "settled", Blocks(blocks or 0)
    pool = ElasticMemory(report, model, Blocks(3074), Blocks(1000), size, Blocks(used), state)
    return replace(pool, asleep_at=asleep_at)


def seat(id: str, by: str, held_mib: int, why: str, model: str | None = None) -> dict[str, Any]:
    """A replica's part of the memory of a node."""
    found = {"replica": id, "pool": f"Engine-{model}", "by": by, "held_mib": held_mib, "ordered_mib": held_mib}
    return found | {"why": why} | ({"model": model} if model else {})


def node(*seats: dict[str, Any], budget_mib: int = 8192) -> dict[str, Any]:
    """The memory of a node."""
    sums = {name: sum(seat[name] for seat in seats) for name in ("ordered_mib", "held_mib")}
    return {"id": "4f0b45ba" + 48 * "0", "budget_mib": budget_mib, **sums, "seats": list(seats)}


def state(*replicas: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """`/mell/state`."""
    document = {
        "as_of": NOW,
        "mode": "act",
        "configured_mode": "act",
        "policy": "pack",
        "fence": 1,
        "wanted_replicas": 2,
        "estimates": {},
        "resting_pairs": [],
        "replicas": list(replicas),
    }
    return document | changed


def record(id: str, outcome: Outcome | None = Outcome.COMMITTED, **changed: Any) -> dict[str, Any]:
    """A migration of `demo` from `aaaaaaaa` to `bbbbbbbb`, with the target's total time."""
    made = MigrationRecord(
        id=id,
        request_id=RequestId("cmpl-1"),
        label="demo",
        source=ReplicaId("aaaaaaaa"),
        target=ReplicaId("bbbbbbbb"),
        path=Path.KV,
        reason="overload",
        state=str(outcome or "copy"),
        trigger=Reason.OVERLOAD,
        outcome=outcome,
        pause_s=0.0066,
        duration_s=0.048,
        resume_s=0.015,
        started_at=NOW - 12,
        predicted_kv_s=0.05,
        predicted_tokens_s=0.4,
    )
    return made.to_json() | changed


BUSY = state(
    replica("aaaaaaaa", request("cmpl-1", 1600, label="demo"), request("cmpl-2", 640), used=72),
    replica("bbbbbbbb", request("cmpl-3", 320), request("cmpl-4", 90, Phase.WAITING), state=ReplicaState.DRAINING),
    replica("cccccccc", state=ReplicaState.STARTING, capacity=0),
)
"""Three replicas: 72, 10 and 0 blocks in use."""

_CHAT = request("cmpl-1", 30_784), request("cmpl-2", 90, Phase.WAITING)
SHARING = state(
    replica("f1v1k6vr", *_CHAT, capacity=35_200, memory=elastic("f1v1k6vr", 1100, 962)) | {"model": "chat"},
    replica("m4x7d2p9", state=ReplicaState.ASLEEP, capacity=0, memory=elastic("m4x7d2p9", None)) | {"model": "chat"},
    replica("q9c2b4m1", capacity=3200, memory=elastic("q9c2b4m1", 100, by_hand=True)) | {"model": "code"},
    models=[
        {"model": "chat", "names": ["chat", "chat-1b"], "wanted_replicas": 1},
        {"model": "code", "names": ["code"], "wanted_replicas": 1},
    ],
    devices=[
        node(
            seat("f1v1k6vr", "demand", 4868, "its requests want more than there is for it", "chat"),
            seat("m4x7d2p9", "asleep", 310, "it sleeps", "chat"),
            seat("q9c2b4m1", "hand", 2868, "an operator has ordered its size", "code"),
        )
    ],
)
"""Three replicas of two models on a node: one sleeps, and an operator has sized another one."""

MOVED = {
    "migrations": [
        record("0123456789abcdef"),
        record("1123456789abcdef", Outcome.ABORTED, error="the request ended by itself", label="other"),
        record("2123456789abcdef", None, started_at=NOW - 40),
    ]
}


def match(routed: Routed | None, *replicas: MatchedReplica, off: str | None = None) -> dict[str, Any]:
    """`/mell/cache/match` of a prompt of 1,201 tokens."""
    found = PromptMatch(Tokens(1201), 16, routed, replicas)
    return {"routing": {"kind": "tree", "off": off}, **found.to_json()}


MATCHED = match(
    Routed(Place(ReplicaId("bbbbbbbb")), Basis.CONTENT, (ReplicaId("bbbbbbbb"),)),
    MatchedReplica(ReplicaScore(ReplicaId("aaaaaaaa"), Tokens(0), Tokens(0), 0.0, 0.6), False, False),
    MatchedReplica(ReplicaScore(ReplicaId("bbbbbbbb"), Tokens(1184), Tokens(16), 0.2, 0.01), True, True),
)
"""A prompt of which `bbbbbbbb` has all but a token, and for which `aaaaaaaa` has no room."""
