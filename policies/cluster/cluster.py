"""The cluster that decisions are made on: where every request is, and what an epoch's decisions make of it.

`policies.decision` brings it up to date with each observation. Policies then change it through `place`, `move`, `lift`,
`evict` and `open`; `settle` compares the outcome with where the epoch began and returns the difference as a `Plan`. So
a request that is moved there and back, or twice, costs what the difference costs: nothing, or one move.

With `holds`, moves take time: what leaves a replica keeps its room there until the move is over. Without it moves are
instantaneous, as in the paper's model (section VI-A).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from policies.cluster.changes import Crossing
from policies.cluster.classes import Classes
from policies.cluster.replica import Replica, Request
from policies.cluster.rooms import Rooms
from policies.cluster.supply import Demand, Supply
from policies.cluster.trail import Step, Trace, Trail
from policies.model import UP, ReplicaId, ReplicaState, RequestId, Tokens
from policies.plan import Plan, Reason

_RUNNING = ReplicaState.RUNNING


@dataclass(slots=True, eq=False)
class Cluster:
    """Where every request is. `capacity` is a new replica's in tokens, `max_requests` the most requests that it runs,
    and `headroom` the growth kept free per request, in tokens.

    `slack` is what is to stay free in all, in tokens, and `min_replicas` how many are to stay open at least.
    `waiting` are the requests without a replica, `held` what requests on the move still hold at their source, and
    `resting` until when a request may not move.

    `starts_as` is RUNNING where new replicas can be used at once, STARTING where they take their time. While
    `awaits_start`, none is emptied or closed: it would soon be opened again. `moves_left` is how many more requests may
    change their replica in this epoch.
    """

    capacity: Tokens
    supply: Supply = field(default_factory=Supply)
    headroom: int = 0
    lead: int = 0
    slack: int = 0
    min_replicas: int = 0
    max_requests: int = 1 << 30
    demand: Demand = field(default_factory=Demand)
    replicas: dict[ReplicaId, Replica] = field(default_factory=dict)
    requests: dict[RequestId, Request] = field(default_factory=dict)
    waiting: dict[RequestId, Request] = field(default_factory=dict)
    held: dict[RequestId, int] = field(default_factory=dict)
    resting: dict[RequestId, float] = field(default_factory=dict)
    holds: bool = False
    starts_as: ReplicaState = ReplicaState.RUNNING
    awaits_start: bool = False
    moves_left: float = float("inf")
    classes: Classes = field(init=False)
    _rooms: Rooms | None = None
    _activations: int = 0
    _arrivals: int = 0
    _trail: Trail = field(default_factory=Trail)
    _units: int = 0

    def __post_init__(self) -> None:
        self.classes = Classes(self.capacity)

    # --- what is observed: replicas -------------------------------------------------------------------

    def add_replica(
        self,
        replica_id: ReplicaId,
        node: str,
        capacity: Tokens,
        state: ReplicaState = ReplicaState.RUNNING,
        max_requests: int | None = None,
    ) -> Replica:
        """A replica, activated after all that are here. Raises `ValueError` if there is one of that id."""
        if replica_id in self.replicas:
            raise ValueError(f"there is a replica {replica_id}")
        self._activations += 1
        replica = Replica(
            replica_id,
            node,
            capacity,
            self._activations,
            state,
            self.max_requests if max_requests is None else max_requests,
            headroom=self.headroom,
            lead=self.lead,
        )
        self.replicas[replica_id] = replica
        if self._rooms is not None and state is _RUNNING:
            self._rooms.add(replica)
        return replica

    def update_replica(self, replica: Replica, state: ReplicaState, capacity: Tokens, max_requests: int) -> None:
        """The replica is in that state, and takes that much."""
        if (replica.state, replica.capacity, replica.max_requests) != (state, capacity, max_requests):
            replica.state, replica.capacity, replica.max_requests = state, capacity, max_requests
            self._rooms = None

    def lose(self, replica: Replica) -> None:
        """The replica is gone. What ran there waits; what was on its way there is still at its source."""
        for request in list(replica.requests.values()):
            self.locate(request, request.source)
        for request_id in [r for r in self.held if self.requests[r].source is replica]:
            self.release(self.requests[request_id])
        del self.replicas[replica.id]
        self.supply.give_back(replica.id)
        self._rooms = None

    def correct(self, replica: Replica, shared: int) -> None:
        """The engine's count of its room differs by that from the sum of the requests there; see `Replica.shared`."""
        if replica.shared != shared:
            replica.shared = shared
            self._touch(replica)

    def enqueue(self, replica: Replica, count: int) -> None:
        """So many requests are in the queue of the replica's engine, without blocks."""
        replica.queued = count

    def await_start(self, awaited: bool) -> None:
        """Whether a replica starts, or is about to."""
        self.awaits_start = awaited

    def since(self, replica: Replica, idle_since: float | None) -> None:
        """The replica turns out to have been empty for longer than it has been here."""
        replica.idle_since = idle_since

    def set_capacity(self, capacity: Tokens) -> None:
        """A new replica has that capacity; every request gets the size class that it has for such a one."""
        if capacity != self.capacity:
            self.capacity = capacity
            self.classes = Classes(capacity)
            for request in self.requests.values():
                request.kind = self.classes.kind(request.tokens)
                request.ceiling = self.classes.ceiling(request.kind)

    # --- what is observed: requests -------------------------------------------------------------------

    def add_request(self, request_id: RequestId, tokens: Tokens, replica: Replica | None = None) -> Request:
        """A request that arrived after all that are here. It runs on `replica` already; without one it waits.

        Raises `ValueError` if there is one of that id, or if it holds nothing.
        """
        if request_id in self.requests:
            raise ValueError(f"there is a request {request_id}")
        if tokens < 1:
            raise ValueError(f"{request_id} holds {tokens} tokens")
        self._arrivals += 1
        kind = self.classes.kind(tokens)
        request = Request(request_id, tokens, self._arrivals, kind, self.classes.ceiling(kind))
        self.requests[request_id] = request
        self._enter(request, replica)
        return request

    def locate(self, request: Request, replica: Replica | None, source: Replica | None = None) -> None:
        """The request turns out to be on that replica, or to wait; it still holds its blocks at `source`, if any."""
        if request.replica is not replica:
            self._leave(request)
            self._enter(request, replica)
        if request.source is not source:
            self.release(request)
            if source is not None:
                request.source = source
                self.held[request.id] = request.tokens
                source.held += request.tokens
                self._touch(source)

    def release(self, request: Request) -> None:
        """The request's move is done: nothing of it is left at its source."""
        if request.source is not None:
            request.source.held -= self.held.pop(request.id)
            self._touch(request.source)
            request.source = None

    def remove_request(self, request: Request) -> None:
        """The request is over; all that it held is free."""
        self.release(request)
        self._leave(request)
        self.resting.pop(request.id, None)
        del self.requests[request.id]

    def pin(self, request: Request, pinned: bool = True) -> None:
        """Whether the request must stay where it is."""
        request.pinned = pinned

    def resize(self, sizes: Mapping[RequestId, Tokens]) -> list[Crossing]:
        """Requests hold so many tokens now; returns those on replicas that are in another size class by it.

        The one loop over every running request; what it does per request decides how an epoch scales. Raises `KeyError`
        for a request that is not here.
        """
        crossed = []
        requests = self.requests
        for request_id, tokens in sizes.items():
            request = requests[request_id]
            was = request.tokens
            if request.replica is not None:
                request.replica.load += tokens - was
            request.tokens = tokens
            if tokens > request.ceiling or tokens < was:
                kind = self.classes.kind(tokens)
                if kind is not request.kind and request.replica is not None:
                    crossed.append(Crossing(request, request.kind))
                request.kind = kind
                request.ceiling = self.classes.ceiling(kind)
        for request_id, held in self.held.items():  # requests on the move grow at their source
            request = requests[request_id]
            assert request.source is not None
            request.source.held += request.tokens - held
            self.held[request_id] = request.tokens
        self._rooms = None
        return crossed

    # --- the bounds of an epoch -----------------------------------------------------------------------

    def reserve(self, headroom: Tokens, lead: Tokens = Tokens(0)) -> None:
        """Keep that many tokens free for the growth of each request, on every replica and on new ones.

        `lead` is by how much a request grows until a decision takes effect; the headroom is never less.
        """
        self.headroom = max(headroom, lead)
        self.lead = lead
        for replica in self.replicas.values():
            replica.headroom = self.headroom
            replica.lead = lead
        self._rooms = None

    def bound(self, moves_left: float, slack: int, min_replicas: int) -> None:
        """An epoch may make so many moves, and is to leave so many tokens free and so many replicas open."""
        self.moves_left = moves_left
        self.slack = slack
        self.min_replicas = min_replicas

    def rest(self, request_id: RequestId, until: float) -> None:
        """The request may not move before that time."""
        self.resting[request_id] = until
        self.requests[request_id].resting = True

    def wake(self, now: float) -> None:
        """Requests whose rest is over may move again."""
        for request_id in [r for r, until in self.resting.items() if until <= now]:
            del self.resting[request_id]
            self.requests[request_id].resting = False

    # --- decisions ------------------------------------------------------------------------------------

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

    def close_idle(self, now: float, linger_s: float) -> None:
        """Close replicas that have been empty for `linger_s` seconds, the youngest first, as far as `may_close`.

        None is closed while another one is starting.
        """
        for replica in reversed(self.running()):
            if replica.requests or replica.held or replica.queued:
                replica.idle_since = None
                continue
            replica.idle_since = now if replica.idle_since is None else replica.idle_since
            if now - replica.idle_since >= linger_s and not self.is_starting() and self.may_close():
                self.close(replica)

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

    def decided(self) -> list[tuple[Request, Trace]]:
        """The requests that something was decided for since `settle`, with where they began, in that order."""
        return list(self._trail.traces.items())

    def take_back(self, request: Request) -> None:
        """The request is where it began the epoch; what was decided before cannot be undone then."""
        self._put(request, self._trail.trace(request).origin, None)
        self._trail.freeze()

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

    # --- queries --------------------------------------------------------------------------------------

    def need(self, tokens: int) -> int:
        """The room that a request of that size asks for; beyond its size no more than an empty replica has."""
        grown = tokens + self.headroom
        return grown if grown <= self.capacity else max(tokens, self.capacity)

    def fits(self, request: Request, replica: Replica) -> bool:
        """Whether the request may go to the replica."""
        return replica.accepts and replica.room >= self.need(request.tokens)

    def tightest(self, tokens: int, accept: Callable[[Replica], object] | None = None) -> Replica | None:
        """Best fit: the replica with the least room in which `tokens` and their growth fit; of equals the oldest.

        Only replicas that take requests and that `accept` agrees to.
        """
        return self._index().tightest(self.need(tokens), accept)

    def widest(self, tokens: int, accept: Callable[[Replica], object] | None = None) -> Replica | None:
        """Worst fit: the replica with the most room, if `tokens` and their growth fit there; of equals the youngest.

        Only replicas that take requests and that `accept` agrees to.
        """
        return self._index().widest(self.need(tokens), accept)

    def roomiest(self, count: int) -> list[Replica]:
        """Up to `count` running replicas with the most room, that with the most first."""
        return self._index().roomiest(count)

    def total(self) -> int:
        """Tokens that all requests need, those included that wait."""
        return sum(r.load + r.shared for r in self.replicas.values()) + sum(q.tokens for q in self.waiting.values())

    def spare(self) -> int:
        """Tokens that can be placed once every replica is up, every move done and nothing waits any more.

        Only room in pieces of C/8 or more counts: what is left over on full replicas is of no use to an arrival.
        """
        rooms = (r.room + r.held for r in self.replicas.values() if r.state in UP)
        return sum(room for room in rooms if room * 8 >= self.capacity) - sum(q.tokens for q in self.waiting.values())

    def may_close(self, count: int = 1, times: float = 1.0) -> bool:
        """True if `count` running replicas can close, with their requests elsewhere, and leave enough open and free.

        Enough is free if it is so many `times` the slack.
        """
        if len(self.running()) - count < self.min_replicas:
            return False
        return not self.slack or self.spare() - count * self.capacity >= times * self.slack

    def is_starting(self) -> bool:
        """True while a replica is starting: one that is emptied or closed now would soon be opened again."""
        return self.awaits_start or any(r.state is not _RUNNING for r in self._trail.opened.values())

    def overloaded(self) -> list[Replica]:
        """Replicas whose requests need more than there is, oldest first."""
        return [r for r in self.replicas.values() if r.load + r.shared > r.capacity]

    def strained(self) -> list[Replica]:
        """Replicas that will be overloaded when a move that is decided now is done, oldest first."""
        return [r for r in self.replicas.values() if r.strain > 0]

    def running(self) -> list[Replica]:
        """Replicas that are up, oldest first."""
        return [r for r in self.replicas.values() if r.state is _RUNNING]

    def up(self) -> int:
        """How many replicas are up, or will be."""
        return sum(r.state in UP for r in self.replicas.values())

    def in_order(self) -> list[Request]:
        """The requests that wait, oldest first."""
        return sorted(self.waiting.values(), key=attrgetter("order"))

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

    def _index(self) -> Rooms:
        if self._rooms is None:
            self._rooms = Rooms(self.running())
        return self._rooms

    def _touch(self, replica: Replica) -> None:
        if self._rooms is not None:
            self._rooms.touch(replica)

    def _leave(self, request: Request) -> None:
        replica = request.replica
        if replica is None:
            del self.waiting[request.id]
            return
        del replica.requests[request.id]
        replica.load -= request.tokens
        self._touch(replica)

    def _enter(self, request: Request, replica: Replica | None) -> None:
        request.replica = replica
        if replica is None:
            self.waiting[request.id] = request
            return
        replica.requests[request.id] = request
        replica.load += request.tokens
        self._touch(replica)

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
