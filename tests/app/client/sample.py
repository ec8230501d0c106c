"""Sample documents of an endpoint, made by the application's own classes."""

from typing import Any

from deployments.api.report import Gauges, replica_json
from migration.protocol.record import MigrationRecord, Outcome
from policies.decision.matching import Basis, MatchedReplica, PromptMatch, Routed
from policies.decision.placement import Place
from policies.model import Blocks, Phase, ReplicaId, ReplicaLoad, ReplicaState, RequestId, RequestLoad, Role, Tokens
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
) -> dict[str, Any]:
    """A replica with blocks of 32 tokens, as many as its requests need."""
    used = sum(-(-r.tokens // 32) for r in requests if r.phase is not Phase.WAITING) if used is None else used
    free = Blocks(capacity // 32 - used)
    load = ReplicaLoad(ReplicaId(id), state, "4f0b45ba" + 48 * "0", Tokens(capacity), 32, free, 64, requests)
    return replica_json(load, Gauges((1, 2, 3)), role, by_hand)


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
