"""The decisions of an epoch so far, with enough state to undo them and to sum them up as a plan."""

from dataclasses import dataclass, field
from typing import NamedTuple

from policies.cluster.replica import Replica, Request
from policies.model import ReplicaId, RequestId
from policies.plan import Eviction, Move, Open, Placement, Plan, Reason


class Trace(NamedTuple):
    """A request's location at the beginning of the epoch (None: it waited), and its last move's reason and unit.

    An evicted request has lost its KV blocks: its next location is a placement, not a move.
    """

    origin: Replica | None
    reason: Reason = Reason.OVERLOAD
    unit: int = 0
    evicted: bool = False

    def is_move(self, replica: Replica | None) -> bool:
        """True if the request moves when the epoch ends with it on `replica` (None: lifted, not yet placed)."""
        return self.origin is not None and not self.evicted and replica is not self.origin

    def is_free(self, replica: Replica | None) -> bool:
        """True if moving the request off `replica` adds no migration to the plan."""
        return self.origin is None or self.evicted or replica is not self.origin


class Step(NamedTuple):
    """A request, and its replica and trace before a decision."""

    request: Request
    replica: Replica | None
    trace: Trace | None


@dataclass(slots=True, eq=False)
class Trail:
    """The epoch's steps, and the resulting trace of each request, in the order of the requests' first steps.

    `first` is the number of the oldest step kept: earlier steps cannot be undone.
    """

    traces: dict[Request, Trace] = field(default_factory=dict)
    opened: dict[ReplicaId, Replica] = field(default_factory=dict)
    closed: dict[ReplicaId, Replica] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    first: int = 0

    def trace(self, request: Request) -> Trace:
        """The request's trace. A request without a decision begins where it is."""
        return self.traces.get(request) or Trace(request.replica)

    def leaving(self, request: Request) -> Replica | None:
        """The replica that the request leaves by the decisions so far, if any."""
        trace = self.trace(request)
        return trace.origin if trace.is_move(request.replica) else None

    def freeze(self) -> None:
        """Make all steps so far final: they cannot be undone."""
        self.first += len(self.steps)
        self.steps.clear()

    def plan(self, queued: tuple[RequestId, ...]) -> Plan:
        """The difference between the requests' first and current locations as a plan."""
        moves, placements, evicted = [], [], []
        for request, trace in self.traces.items():
            replica = request.replica
            if trace.evicted and trace.origin is not None:
                evicted.append(Eviction(request.id, trace.origin.id, request.tokens))
            if replica is None:
                continue
            if trace.is_move(replica) and trace.origin is not None:
                moves.append(Move(request.id, trace.origin.id, replica.id, request.tokens, trace.reason, trace.unit))
            elif trace.evicted or trace.origin is None:
                placements.append(Placement(request.id, replica.id))
        opened = (Open(replica.id, replica.node) for replica in self.opened.values())
        return Plan.of(moves, placements, evicted, queued, opened, self.closed)

    def forget_decisions(self) -> None:
        """Forget all decisions."""
        self.freeze()
        self.traces, self.opened, self.closed = {}, {}, {}
