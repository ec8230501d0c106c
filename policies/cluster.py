"""The cluster that decisions are made on: where every request is, and what an epoch's decisions make of it.

`policies.changes.apply` brings it up to date with what happened. Policies then change it through `place`, `move`,
`lift`, `evict` and `open`; `settle` compares the outcome with where the epoch began and returns the difference as a
`Plan`. So a request that is moved there and back, or twice, costs what the difference costs: nothing, or one move.

With `holds`, moves take time: what leaves a replica keeps its room there until an event says that the move is over.
Without it moves are instantaneous, as in the paper's model (section VI-A).
"""

from dataclasses import dataclass, field

from policies.fleet import Fleet
from policies.model import ReplicaState
from policies.plan import Before, Host, Plan, Reason
from policies.trail import Step, Trace, Trail
from policies.working import Replica, Request

_RUNNING = ReplicaState.RUNNING


@dataclass(slots=True, eq=False)
class Cluster(Fleet):
    """A fleet that can be changed by decisions.

    `starts_as` is RUNNING where new replicas can be used at once, STARTING where they take their time. `moves_left`
    is how many more requests may change their replica in this epoch.
    """

    holds: bool = False
    starts_as: ReplicaState = ReplicaState.RUNNING
    moves_left: float = float("inf")
    _trail: Trail = field(default_factory=Trail)
    _units: int = 0

    def may_move(self, request: Request) -> bool:
        """Whether the request may be moved, and the epoch's moves are not used up or one more would cost none."""
        if request.pinned or request.resting or request.source is not None:
            return False
        return self.moves_left > 0 or self._trail.trace(request).is_free(request.replica)

    def place(self, request: Request, replica: Replica) -> None:
        """A request that waits or was lifted starts there; where the replica is still starting it waits for that.

        Raises `ValueError` if the request is on a replica.
        """
        if request.replica is not None:
            raise ValueError(f"{request.id} is on {request.replica.id}")
        self._step(request, replica, self._trail.trace(request))

    def move(self, request: Request, replica: Replica, reason: Reason, unit: int | None = None) -> None:
        """A running request goes there. Requests that move as one unit share a number from `unit()`.

        Raises `ValueError` if the request may not move, or if the replica is not running.
        """
        if replica.state is not _RUNNING:
            raise ValueError(f"{replica.id} is not running")
        self._step(request, replica, self._moving(request, reason, unit))

    def lift(self, request: Request, reason: Reason, unit: int | None = None) -> None:
        """A running request leaves its replica and is placed anew within this epoch; if not, it is evicted.

        Raises `ValueError` if the request may not move.
        """
        self._step(request, None, self._moving(request, reason, unit))

    def evict(self, request: Request) -> None:
        """A running request loses its KV blocks and waits like an arrival. This is no move: it needs no budget.

        Raises `ValueError` if an earlier move of the request is still under way.
        """
        if request.source is not None:
            raise ValueError(f"{request.id} is on its way from {request.source.id}")
        trace = self._trail.trace(request)
        self._step(request, None, Trace(trace.origin, trace.reason, trace.unit, evicted=True))

    def open(self) -> Replica | None:
        """A new replica, None when there is none to be had."""
        if self.supply.left <= 0:
            return None
        replica_id, node = self.supply.take()
        replica = self.add_replica(replica_id, node, self.capacity, self.starts_as)
        self._trail.opened[replica_id] = replica
        return replica

    def close(self, replica: Replica) -> None:
        """An empty replica goes; what was decided before cannot be undone then.

        Raises `ValueError` if anything is on it.
        """
        if replica.requests or replica.held:
            raise ValueError(f"{replica.id} is not empty")
        del self.replicas[replica.id]
        if self._rooms is not None:
            self._rooms.remove(replica)
        self._trail.freeze()
        if self._trail.opened.pop(replica.id, None) is not None:
            self.supply.give_back(replica.id)
        else:
            self._trail.closed.append(replica.id)

    def unit(self) -> int:
        """A number for a group of requests that move together."""
        self._units += 1
        return self._units

    def mark(self) -> int:
        """A point to which `undo` can return, until a replica is closed or the epoch ends."""
        return self._trail.first + len(self._trail.steps)

    def undo(self, mark: int) -> None:
        """Take back every place, move, lift and eviction since the mark. Replicas that were opened stay open.

        Raises `ValueError` if that is no longer possible.
        """
        if mark < self._trail.first:
            raise ValueError("what was decided before a replica was closed cannot be undone")
        steps = self._trail.steps
        for _ in range(self.mark() - mark):
            self._put(*steps.pop())

    def settle(self) -> Plan:
        """What has been decided since the last call. Requests without a running replica go back to waiting."""
        for request, trace in list(self._trail.traces.items()):
            replica = request.replica
            if replica is not None and replica.state is not _RUNNING and (replica is not trace.origin or trace.evicted):
                replica = None
                self._put(request, None, trace)
            if trace.is_move(replica):
                if replica is None:
                    self._put(request, None, Trace(trace.origin, evicted=True))
                elif self.holds:
                    request.source = trace.origin
                    self.held[request.id] = request.tokens
        for replica_id in self._trail.closed:
            self.supply.give_back(replica_id)
        return self._trail.take(tuple(request.id for request in self.in_order()))

    def before(self) -> Before:
        """The cluster as `policies.plan.violations` wants it."""
        hosts = {
            r.id: Host(
                r.capacity,
                {q.id: q.tokens for q in r.requests.values()},
                shared=r.shared,
                held=r.held,
                running=r.state is _RUNNING,
                max_requests=r.max_requests,
            )
            for r in self.replicas.values()
        }
        waiting = {q.id: q.tokens for q in self.in_order()}
        pinned = frozenset(q.id for q in self.requests.values() if not q.movable)
        return Before(hosts, waiting, pinned, self.capacity, self.holds, self.starts_as is _RUNNING)

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every request is in exactly one place and every sum is right."""
        there = [q for r in self.replicas.values() for q in r.requests.values()] + list(self.waiting.values())
        assert sorted(q.id for q in there) == sorted(self.requests), "a request is lost, or in two places"
        assert all(q.replica is None and q.source is None for q in self.waiting.values()), "a waiting request is held"
        assert all(self.classes.kind(q.tokens) is q.kind for q in there), "a request is in the wrong class"
        assert sorted(self.held) == sorted(q.id for q in there if q.source is not None), "moves under way"
        held = dict.fromkeys(self.replicas, 0)
        for request in there:
            source = self._trail.leaving(request) if self.holds else None
            for replica, tokens in (request.source, self.held.get(request.id, 0)), (source, request.tokens):
                if replica is not None:
                    held[replica.id] += tokens
        for replica in self.replicas.values():
            assert all(q.replica is replica for q in replica.requests.values()), f"requests of {replica.id}"
            assert replica.load == sum(q.tokens for q in replica.requests.values()), f"load of {replica.id}"
            assert replica.held == held[replica.id], f"held on {replica.id}"
        if self._rooms is not None:
            self._rooms.check_integrity(self.running())

    # --- inside ---------------------------------------------------------------------------------------

    def _moving(self, request: Request, reason: Reason, unit: int | None) -> Trace:
        if not self.may_move(request):
            raise ValueError(f"{request.id} must stay where it is")
        trace = self._trail.trace(request)
        return Trace(trace.origin, reason, self.unit() if unit is None else unit, trace.evicted)

    def _step(self, request: Request, replica: Replica | None, trace: Trace) -> None:
        """Put the request there, and remember how it was."""
        self._trail.steps.append(Step(request, request.replica, self._trail.traces.get(request)))
        self._put(request, replica, trace)

    def _put(self, request: Request, replica: Replica | None, trace: Trace | None) -> None:
        """Change a request's replica and trace, keeping loads, held blocks, budget and index right."""
        traces = self._trail.traces
        was = traces.get(request)
        moved = was is not None and was.is_move(request.replica)
        moves = trace is not None and trace.is_move(replica)
        self._leave(request)
        self._enter(request, replica)
        known = trace or was
        if moves != moved and known is not None and known.origin is not None:
            self._charge(known.origin, request.tokens if moves else -request.tokens)
        if trace is None:
            del traces[request]
        else:
            traces[request] = trace

    def _charge(self, origin: Replica, tokens: int) -> None:
        """A request comes to move away from the replica where it began; below zero, it does no longer."""
        self.moves_left -= 1 if tokens > 0 else -1
        if self.holds:
            origin.held += tokens
            self._touch(origin)
