"""What has been decided in an epoch so far: enough to take it back, and to say what it comes to."""

from dataclasses import dataclass, field
from typing import NamedTuple

from policies.cluster.replica import Replica, Request
from policies.model import ReplicaId, RequestId
from policies.plan import Eviction, Move, Opening, Placement, Plan, Reason


class Trace(NamedTuple):
    """Where a request began the epoch (None: it waited), why it last moved and as part of which unit.

    An evicted one has given up its KV blocks: wherever it goes next, that is a placement.
    """

    origin: Replica | None
    reason: Reason = Reason.OVERLOAD
    unit: int = 0
    evicted: bool = False

    def is_move(self, replica: Replica | None) -> bool:
        """Whether it takes a move for the request to be on that replica (None: on none yet, but not where it was)."""
        return self.origin is not None and not self.evicted and replica is not self.origin

    def is_free(self, replica: Replica | None) -> bool:
        """Whether it takes no move, or none but the one that brought it there, to take the request from there."""
        return self.origin is None or self.evicted or replica is not self.origin


class Step(NamedTuple):
    """A request, and what its replica and its trace were before something was done to it."""

    request: Request
    replica: Replica | None
    trace: Trace | None


@dataclass(slots=True, eq=False)
class Trail:
    """The epoch's steps, and what they leave of each request, in the order in which requests were first touched.

    `first` is the number of the oldest step that is kept: steps before it cannot be taken back.
    """

    traces: dict[Request, Trace] = field(default_factory=dict)
    opened: dict[ReplicaId, Replica] = field(default_factory=dict)
    closed: list[ReplicaId] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    first: int = 0

    def trace(self, request: Request) -> Trace:
        """The request's trace; a request that nothing was done to begins where it is."""
        return self.traces.get(request) or Trace(request.replica)

    def leaving(self, request: Request) -> Replica | None:
        """The replica that the request leaves by what has been decided so far."""
        trace = self.trace(request)
        return trace.origin if trace.is_move(request.replica) else None

    def freeze(self) -> None:
        """Whatever was done so far cannot be taken back."""
        self.first += len(self.steps)
        self.steps.clear()

    def take(self, queued: tuple[RequestId, ...]) -> Plan:
        """The difference between where requests began and where they are, as a plan; a new epoch begins."""
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
        opened = tuple(Opening(replica.id, replica.node) for replica in self.opened.values())
        plan = Plan(tuple(moves), tuple(placements), tuple(evicted), queued, opened, tuple(self.closed))
        self.freeze()
        self.traces, self.opened, self.closed = {}, {}, []
        return plan
