"""Observed clusters drawn as text: `observed("a: p50 q30! | b^: r20?")`, in tokens of a capacity of 100.

A request is a name and its tokens, `p50+1` one with adapter 1; `?` is queued, `~` prefills, `>` is being handed over,
`!` must stay. Engines run two adapters at a time. A replica that
is starting has a star (`b*`), one that is to be gone a caret (`b^`), one that sleeps a `%`, one that wakes an `&`;
`b@v2` runs another version. Blocks are of one
token; what decodes, is handed over or prefills holds its blocks.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from policies.causes import Cause
from policies.cluster.changes import Changes
from policies.decision.deciding import decide_pool
from policies.decision.memory import PoolMemory
from policies.decision.observation import Pool, PoolReport
from policies.decision.reports import Report, Roster, status_of
from policies.model import (
    SOLE_POOL,
    AdapterId,
    Blocks,
    Phase,
    ReplicaId,
    ReplicaLoad,
    ReplicaState,
    RequestId,
    RequestLoad,
    Tokens,
)
from policies.plan import MoveReport, Plan
from policies.precedence import DEFAULT_PRECEDENCE, Precedence

NO_CLASSED: Mapping[str, Precedence] = {}
C = Tokens(100)
_PHASES = {"": Phase.DECODE, "?": Phase.WAITING, "~": Phase.PREFILL, ">": Phase.MOVING, "!": Phase.DECODE}
_STATES = {
    "": ReplicaState.RUNNING,
    "*": ReplicaState.STARTING,
    "^": ReplicaState.DRAINING,
    "%": ReplicaState.ASLEEP,
    "&": ReplicaState.WAKING,
}


@dataclass(frozen=True, slots=True)
class Drawn:
    """A drawn cluster at `now`: its replicas, the moves under way, and those that operators made since the last one."""

    now: float
    loads: tuple[ReplicaLoad, ...]
    moves: tuple[tuple[RequestId, ReplicaId, ReplicaId], ...] = ()
    by_hand: tuple[RequestId, ...] = ()
    most: int = 1
    opening: int = 0


def observed(
    drawing: str,
    now: float = 0.0,
    *,
    moves: str = "",
    most: int = 0,
    opening: int = 0,
    by_hand: str = "",
    classed: Mapping[str, Precedence] = NO_CLASSED,
) -> Drawn:
    """The drawn cluster at `now`. `moves` are requests under way, as `p:a>b`; `most` replicas there may be.

    `classed` are the requests that name a class.
    """
    loads = tuple(_load(part, classed) for part in drawing.split("|") if part.strip())
    under_way = (re.fullmatch(r"(\w+):(\w+)>(\w+)", move) for move in moves.split())
    return Drawn(
        now,
        loads,
        tuple((RequestId(m[1]), ReplicaId(m[2]), ReplicaId(m[3])) for m in under_way if m),
        tuple(map(RequestId, by_hand.split())),
        most or len(loads),
        opening,
    )


class Watcher:
    """Reports drawn clusters to a memory, as replicas and their migrations would be reported. `least` replicas stay.

    A pool that `sleeps` has no replica awake without a request.
    """

    def __init__(self, memory: PoolMemory, least: int = 0, sleeps: bool = False) -> None:
        self.memory = memory
        self.least = least
        self.sleeps = sleeps
        self.roster = Roster()
        self._version = 0

    def report(self, drawn: Drawn) -> PoolReport:
        """What is new in that cluster. A move that is not drawn has ended where its request is."""
        self._version += 1
        for replica in sorted(self.roster.statuses.keys() - {load.id for load in drawn.loads}):
            self.roster.forget(replica)
        for load in drawn.loads:
            self.roster.take(Report(self._version, status_of(load), None, load.requests))
        found = self.roster.observe(
            Pool(SOLE_POOL, min_replicas=self.least, max_replicas=drawn.most, sleeps=self.sleeps)
        )
        return replace(found, moves=tuple(self._moves(drawn)), opening=drawn.opening)

    def observe(self, drawn: Drawn) -> Changes:
        """Have the memory see that cluster."""
        return self.memory.observe(self.report(drawn), drawn.now)

    def observe_moves(self, drawn: Drawn, *moves: MoveReport) -> Changes:
        """Have the memory see that cluster, with these reports of moves alone."""
        return self.memory.observe(replace(self.report(drawn), moves=moves), drawn.now)

    def decide(self, drawn: Drawn) -> Plan:
        """What is decided about that cluster. After an exception, the next report is whole, as the scheduler has it."""
        try:
            (plan,) = decide_pool(self.memory, self.report(drawn), drawn.now)
        except BaseException:
            self.roster.restart()
            raise
        return plan

    def _moves(self, drawn: Drawn) -> Iterator[MoveReport]:
        there = {(load.id, request.id) for load in drawn.loads for request in load.requests}
        for ends in drawn.moves:
            yield MoveReport(*ends)
        for underway in self.memory.locations.under_way.values():
            move = underway.move
            if (move.request, move.source, move.target) not in drawn.moves:
                moved = (move.target, move.request) in there
                yield MoveReport(move.request, move.source, move.target, moved, cause=None if moved else Cause.NO_ROOM)
        for request in drawn.by_hand:
            yield MoveReport(request, ReplicaId(""), ReplicaId(""), moved=True, by_hand=True)


def _load(drawing: str, classed: Mapping[str, Precedence]) -> ReplicaLoad:
    name, _, requests = drawing.partition(":")
    name, _, model = name.strip().partition("@")
    match = re.fullmatch(r"(\w+)([*^%&]?)", name.strip())
    if match is None:
        raise ValueError(f"{name!r} is no replica")
    there = tuple(_request(text, age, classed) for age, text in enumerate(reversed(requests.split())))[::-1]
    used = sum(q.tokens for q in there if q.phase is not Phase.WAITING)
    state = _STATES[match[2]]
    capacity = Tokens(0) if state is ReplicaState.STARTING else C
    free = Blocks(max(0, capacity - used))
    return ReplicaLoad(ReplicaId(match[1]), state, "n", capacity, 1, free, 8, there, model, max_adapters=2)


def _request(text: str, age: int, classed: Mapping[str, Precedence]) -> RequestLoad:
    match = re.fullmatch(r"([a-z]+)(\d+)(?:\+(\d))?([?~>!]?)", text)
    if match is None:
        raise ValueError(f"{text!r} is no request")
    name, tokens, phase = RequestId(match[1]), Tokens(int(match[2])), _PHASES[match[4]]
    reason = "a test says so" if match[4] == "!" else None
    precedence = classed.get(name, DEFAULT_PRECEDENCE)
    adapter = AdapterId(int(match[3])) if match[3] else None
    return RequestLoad(name, "", tokens, phase, float(age), 0, reason, precedence, adapter)
