"""Observed clusters drawn as text: `observed("a: p50 q30! | b^: r20?")`, in tokens of a capacity of 100.

A request is a name and its tokens; `?` is queued, `~` prefills, `>` is being handed over, `!` must stay. A replica that
is starting has a star (`b*`), one that is to be gone a caret (`b^`); `b@v2` runs another version. Blocks are of one
token; what decodes, is handed over or prefills holds its blocks.
"""

import re

from policies.decision.observation import Observation, Underway
from policies.model import (
    Blocks,
    ClusterState,
    Phase,
    ReplicaId,
    ReplicaLoad,
    ReplicaState,
    RequestId,
    RequestLoad,
    Tokens,
)

C = Tokens(100)
_PHASES = {"": Phase.DECODE, "?": Phase.WAITING, "~": Phase.PREFILL, ">": Phase.MOVING, "!": Phase.DECODE}
_STATES = {"": ReplicaState.RUNNING, "*": ReplicaState.STARTING, "^": ReplicaState.DRAINING}


def observed(
    drawing: str, now: float = 0.0, *, moves: str = "", most: int = 0, opening: int = 0, by_hand: str = ""
) -> Observation:
    """The drawn cluster at `now`. `moves` are requests under way, as `p:a>b`; `most` replicas there may be."""
    loads = [_load(part) for part in drawing.split("|") if part.strip()]
    under_way = [re.fullmatch(r"(\w+):(\w+)>(\w+)", move) for move in moves.split()]
    return Observation(
        now,
        ClusterState(tuple(loads)),
        tuple(Underway(RequestId(m[1]), ReplicaId(m[2]), ReplicaId(m[3])) for m in under_way if m),
        opening,
        most or len(loads),
        tuple(map(RequestId, by_hand.split())),
    )


def _load(drawing: str) -> ReplicaLoad:
    name, _, requests = drawing.partition(":")
    name, _, model = name.strip().partition("@")
    match = re.fullmatch(r"(\w+)([*^]?)", name.strip())
    if match is None:
        raise ValueError(f"{name!r} is no replica")
    there = tuple(_request(text, age) for age, text in enumerate(reversed(requests.split())))[::-1]
    used = sum(q.tokens for q in there if q.phase is not Phase.WAITING)
    state = _STATES[match[2]]
    capacity = Tokens(0) if state is ReplicaState.STARTING else C
    return ReplicaLoad(ReplicaId(match[1]), state, "n", capacity, 1, Blocks(max(0, capacity - used)), 8, there, model)


def _request(text: str, age: int) -> RequestLoad:
    match = re.fullmatch(r"([a-z]+)(\d+)([?~>!]?)", text)
    if match is None:
        raise ValueError(f"{text!r} is no request")
    reason = "a test says so" if match[3] == "!" else None
    return RequestLoad(RequestId(match[1]), "", Tokens(int(match[2])), _PHASES[match[3]], float(age), 0, reason)
