"""The decisions of an epoch as a transaction: proposed, undone, taken back, and in the end settled as a plan.

Policies decide through `place`, `move`, `lift`, `evict` and `open`; `settle` compares the outcome with the beginning of
the epoch and returns the difference as a `Plan`. So a request that is moved back and forth costs no move, and a request
that is moved twice costs one. Within `proposing`, `planned` gives the plan, and all decisions are taken back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from policies.cluster.conditions import EpochConditions
from policies.cluster.replica import Replica, Request
from policies.model import ReplicaId, ReplicaState, RequestId
from policies.plan import Eviction, Move, Open, Placement, Plan, Reason

if TYPE_CHECKING:
    from policies.cluster.cluster import Cluster

_RUNNING = ReplicaState.RUNNING


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


class _Step(NamedTuple):
    """A request, and its replica and trace before a decision."""

    request: Request
    replica: Replica | None
    trace: Trace | None


@dataclass(slots=True, eq=False)
class Decisions:
    """The decisions on a cluster since `settle`. `moves_left` is the number of requests that may still change their
    replica in this epoch. `opened` are the replicas that were opened.

    `_traces` are those of the decided requests, in the order of their first decisions. Of the steps so far, `_steps`
    are those that can be undone; `_final` is the number of those that cannot.
    """

    cluster: "Cluster"
    moves_left: float = field(init=False)
    opened: dict[ReplicaId, Replica] = field(default_factory=dict)
    _closed: dict[ReplicaId, Replica] = field(default_factory=dict)
    _traces: dict[Request, Trace] = field(default_factory=dict)
    _steps: list[_Step] = field(default_factory=list)
    _final: int = 0
    _units: int = 0

    def __post_init__(self) -> None:
        self.moves_left = self.cluster.conditions.moves

    def begin_epoch(self, conditions: EpochConditions, now: float) -> None:
        """Decide under these conditions from now on. Requests whose rest is over may move again."""
        self.cluster.end_rests(now)
        self.cluster.set_conditions(conditions)
        self.moves_left = conditions.moves

    def spend_move(self) -> None:
        """Take a move that is decided outside of an epoch off the budget of the last one."""
        self.moves_left -= 1

    # --- decisions on requests ------------------------------------------------------------------------

    def may_move(self, request: Request) -> bool:
        """True if the request is movable, and the epoch has moves left or moving it adds none."""
        if request.pinned or request.resting or request.source is not None:
            return False
        return self.moves_left > 0 or self._trace(request).is_free(request.replica)

    def place(self, request: Request, replica: Replica) -> None:
        """Start a waiting or lifted request on a replica. On a replica that is still starting the request waits.

        Raises `ValueError` if the request is on a replica.
        """
        if request.replica is not None:
            raise ValueError(f"{request.id} is on {request.replica.id}")
        self._step(request, replica, self._trace(request))
        if self.cluster.conditions.speed is not None:
            self.cluster.set_backlog(replica, replica.backlog + request.tokens)

    def move(self, request: Request, replica: Replica, reason: Reason, unit: int | None = None) -> None:
        """Move a running request to a replica. Requests that move as one unit share a number from `unit()`.

        Raises `ValueError` if the request may not move, or if the replica is not running.
        """
        if replica.state is not _RUNNING:
            raise ValueError(f"{replica.id} is not running")
        self._step(request, replica, self._moving(request, reason, unit))

    def lift(self, request: Request, reason: Reason, unit: int | None = None) -> None:
        """Take a running request off its replica, to place it anew within this epoch; otherwise it is evicted.

        Raises `ValueError` if the request may not move.
        """
        self._step(request, None, self._moving(request, reason, unit))

    def evict(self, request: Request) -> None:
        """Take a running request's KV blocks away; it waits like an arrival. No move, so `moves_left` stays.

        Raises `ValueError` if an earlier move of the request is still under way.
        """
        if request.source is not None:
            raise ValueError(f"{request.id} is on its way from {request.source.id}")
        trace = self._trace(request)
        self._step(request, None, Trace(trace.origin, trace.reason, trace.unit, evicted=True))

    def unit(self) -> int:
        """A number for a group of requests that move together."""
        self._units += 1
        return self._units

    # --- decisions on replicas ------------------------------------------------------------------------

    def open(self) -> Replica | None:
        """Open a new replica; None if the supply has none left."""
        cluster = self.cluster
        if cluster.supply.left <= 0:
            return None
        replica_id, node = cluster.supply.take()
        replica = cluster.add_replica(replica_id, node, cluster.capacity, cluster.starts_as)
        self.opened[replica_id] = replica
        return replica

    def close(self, replica: Replica) -> None:
        """Close an empty replica. Earlier decisions cannot be undone afterwards.

        Raises `ValueError` if the replica has requests, or room held for requests on the move.
        """
        if replica.requests or replica.held:
            raise ValueError(f"{replica.id} is not empty")
        self.cluster.remove_replica(replica)
        self._freeze()
        if self.opened.pop(replica.id, None) is not None:
            self.cluster.supply.give_back(replica.id)
        else:
            self._closed[replica.id] = replica

    # --- undo -----------------------------------------------------------------------------------------

    def mark(self) -> int:
        """A point to which `undo` can return, until a replica is closed or the epoch ends."""
        return self._final + len(self._steps)

    def undo(self, mark: int) -> None:
        """Take back every place, move, lift and eviction since the mark. Newly opened replicas stay open.

        Raises `ValueError` if a replica has been closed since the mark.
        """
        if mark < self._final:
            raise ValueError("decisions from before a replica was closed cannot be undone")
        for _ in range(self.mark() - mark):
            self._put(*self._steps.pop())

    def take_back(self, request: Request) -> None:
        """Put the request back where it began the epoch. Earlier decisions cannot be undone afterwards.

        Without a decision on it, nothing changes.
        """
        if request in self._traces:
            self._put(request, self._trace(request).origin, None)
            self._freeze()

    @contextmanager
    def proposing(self) -> Iterator[None]:
        """At the end of the block, take all of its decisions back, roles included.

        Requests, replicas and the supply are then as before, in the same order. Only for a block that begins without
        decisions since `settle`, and does not call it. After an exception, nothing is taken back.
        """
        before, units = self.cluster.snapshot(), self._units
        yield
        for request, trace in list(self._traces.items()):
            self._put(request, trace.origin, None)
        for replica_id in self.opened:
            self.cluster.supply.give_back(replica_id)
        self.cluster.restore(before)
        self._units = units
        self._forget()

    # --- the outcome ----------------------------------------------------------------------------------

    def decided(self) -> list[tuple[Request, Trace]]:
        """The requests with a decision since `settle`, in the order of their first decision, and their traces."""
        return list(self._traces.items())

    def planned(self) -> Plan:
        """The decisions since `settle` as a plan. Requests without a running replica wait again."""
        for request, trace in self.decided():
            replica = request.replica
            if replica is not None and replica.state is not _RUNNING and (replica is not trace.origin or trace.evicted):
                replica = None
                self._put(request, None, trace)
            if replica is None and trace.is_move(replica):
                self._put(request, None, Trace(trace.origin, evicted=True))
        return self._plan()

    def settle(self) -> Plan:
        """End the epoch. Returns the plan, see `planned`: its moves are under way, and its closed replicas are gone."""
        plan = self.planned()
        for request in self._traces:
            self.cluster.depart(request)
        for replica_id in self._closed:
            self.cluster.supply.give_back(replica_id)
        self._forget()
        return plan

    # --- inside ---------------------------------------------------------------------------------------

    def _trace(self, request: Request) -> Trace:
        """The request's trace. A request without a decision begins where it is."""
        return self._traces.get(request) or Trace(request.replica)

    def _moving(self, request: Request, reason: Reason, unit: int | None) -> Trace:
        if not self.may_move(request):
            raise ValueError(f"{request.id} must stay where it is")
        trace = self._trace(request)
        return Trace(trace.origin, reason, self.unit() if unit is None else unit, trace.evicted)

    def _step(self, request: Request, replica: Replica | None, trace: Trace) -> None:
        """Put the request on a replica, and record its former state as a step."""
        self._steps.append(_Step(request, request.replica, self._traces.get(request)))
        self._put(request, replica, trace)

    def _put(self, request: Request, replica: Replica | None, trace: Trace | None) -> None:
        """Change a request's replica and trace, and with them the budget and the room that its move holds."""
        was = self._traces.get(request)
        moved = was is not None and was.is_move(request.replica)
        moves = trace is not None and trace.is_move(replica)
        self.cluster.put(request, replica)
        either = trace or was
        if moves != moved and either is not None and either.origin is not None:
            self.moves_left -= 1 if moves else -1
            self.cluster.set_leaving(request, either.origin if moves else None)
        if trace is None:
            del self._traces[request]
        else:
            self._traces[request] = trace

    def _plan(self) -> Plan:
        """The difference between the requests' first and current locations as a plan."""
        moves, placements, evicted = [], [], []
        for request, trace in self._traces.items():
            replica = request.replica
            if trace.evicted and trace.origin is not None:
                evicted.append(Eviction(request.id, trace.origin.id, request.tokens))
            if replica is None:
                continue
            if trace.is_move(replica) and trace.origin is not None:
                moves.append(Move(request.id, trace.origin.id, replica.id, request.tokens, trace.reason, trace.unit))
            elif trace.evicted or trace.origin is None:
                placements.append(Placement(request.id, replica.id))
        queued: tuple[RequestId, ...] = tuple(request.id for request in self.cluster.in_order())
        opened = (Open(replica.id, replica.node) for replica in self.opened.values())
        return Plan.of(moves, placements, evicted, queued, opened, self._closed)

    def _freeze(self) -> None:
        """Make all steps so far final: they cannot be undone."""
        self._final += len(self._steps)
        self._steps.clear()

    def _forget(self) -> None:
        """Forget all decisions."""
        self._freeze()
        self._traces, self.opened, self._closed = {}, {}, {}
