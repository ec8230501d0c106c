"""The cluster as a mutable model: every request's location, and the effects of an epoch's decisions so far.

`policies.decision` brings it up to date with each observation. Policies then change it through `place`, `move`, `lift`,
`evict` and `open`; `settle` compares the outcome with the beginning of the epoch and returns the difference as a
`Plan`. So a request that is moved back and forth costs no move, and a request that is moved twice costs one. Within
`proposing`, `planned` gives the plan, and all decisions are taken back.

With `holds`, moves take time: a request that leaves a replica occupies its room there until the move is over. Without
`holds` moves are instantaneous, as in the paper's model (section VI-A).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter

from policies.cluster.changes import Crossing
from policies.cluster.classes import Classes
from policies.cluster.conditions import UNBOUNDED, EpochConditions
from policies.cluster.replica import Replica, Request
from policies.cluster.rooms import Rooms
from policies.cluster.sizes import Size, choose
from policies.cluster.supply import Supply
from policies.cluster.trail import Step, Trace, Trail
from policies.model import UP, AdapterId, ReplicaId, ReplicaState, RequestId, Role, Tokens
from policies.plan import Plan, Reason
from policies.prefix.sharing import ActivePrompt, ActivePrompts

_RUNNING = ReplicaState.RUNNING


@dataclass(slots=True, eq=False)
class Cluster:
    """Replicas, requests and their locations. `capacity` (tokens) and `max_requests` are those of a new replica:
    the unit of slack, of size classes and of spare room. The capacity of each replica is its own, and may change.

    `conditions` are those of the newest epoch, `moves_left` the number of requests that may still change their replica
    in it. `waiting` are the requests without a replica, `held` the tokens that requests on the move still hold at their
    source, and `resting` the times before which requests may not move. `has_ranks` once a request has had another rank
    than 0. `starts_as` is RUNNING if new replicas can be used at once, STARTING if they take time to start.
    """

    capacity: Tokens
    supply: Supply = field(default_factory=Supply)
    conditions: EpochConditions = UNBOUNDED
    max_requests: int = 1 << 30
    replicas: dict[ReplicaId, Replica] = field(default_factory=dict)
    requests: dict[RequestId, Request] = field(default_factory=dict)
    waiting: dict[RequestId, Request] = field(default_factory=dict)
    held: dict[RequestId, int] = field(default_factory=dict)
    resting: dict[RequestId, float] = field(default_factory=dict)
    holds: bool = False
    starts_as: ReplicaState = ReplicaState.RUNNING
    moves_left: float = field(init=False)
    has_ranks: bool = False
    prompts: ActivePrompts | None = None
    classes: Classes = field(init=False)
    _running: tuple[Replica, ...] | None = None
    _parted: int = 0
    _rooms: Rooms | None = None
    _activations: int = 0
    _arrivals: int = 0
    _trail: Trail = field(default_factory=Trail)
    _units: int = 0

    def __post_init__(self) -> None:
        self.classes = Classes(self.capacity)
        self.moves_left = self.conditions.moves

    # --- observations of replicas ---------------------------------------------------------------------

    def add_replica(
        self,
        replica_id: ReplicaId,
        node: str,
        capacity: Tokens,
        state: ReplicaState = ReplicaState.RUNNING,
        max_requests: int | None = None,
        max_adapters: int = 0,
    ) -> Replica:
        """Add a replica as the most recently activated one. Raises `ValueError` if the id is taken."""
        if replica_id in self.replicas:
            raise ValueError(f"there is a replica {replica_id}")
        self._activations += 1
        conditions = self.conditions
        replica = Replica(
            replica_id,
            node,
            capacity,
            self._activations,
            state,
            self.max_requests if max_requests is None else max_requests,
            headroom=conditions.headroom,
            lead=conditions.lead,
            speed=conditions.speed,
            max_adapters=max_adapters,
        )
        self.replicas[replica_id] = replica
        if state is _RUNNING:
            self._running = None
            if self._rooms is not None:
                self._rooms.add(replica)
        return replica

    def update_replica(
        self, replica: Replica, state: ReplicaState, capacity: Tokens, max_requests: int, max_adapters: int = 0
    ) -> None:
        """Set the replica's state and limits to the reported ones."""
        replica.max_adapters = max_adapters
        if (replica.state, replica.capacity, replica.max_requests) != (state, capacity, max_requests):
            replica.state, replica.capacity, replica.max_requests = state, capacity, max_requests
            self._running = self._rooms = None

    def lose(self, replica: Replica) -> None:
        """Remove a lost replica. Its requests wait again; requests on their way there stay at their source."""
        for request in list(replica.requests.values()):
            self.locate(request, request.source)
        for request_id in [r for r in self.held if self.requests[r].source is replica]:
            self.release(self.requests[request_id])
        self._remove(replica)
        self.supply.give_back(replica.id)
        self._rooms = None

    def saved(self, replica: Replica) -> int:
        """The tokens by which the sizes of a replica's requests exceed its KV cache in use, by their prompts."""
        return 0 if self.prompts is None else self.prompts.saved(replica.id)

    def correct(self, replica: Replica, shared: int) -> None:
        """Set the difference between the tokens in use, by the engine's count, and the sizes of the requests there."""
        if replica.shared != shared:
            replica.shared = shared
            self._touch(replica)

    def enqueue(self, replica: Replica, count: int) -> None:
        """Set the number of requests in the queue of the replica's engine, without blocks."""
        replica.queued = count

    def set_backlog(self, replica: Replica, tokens: int) -> None:
        """Set the tokens of the replica's requests that have not been prefilled."""
        replica.backlog = tokens

    def set_role(self, replica: Replica, role: Role) -> None:
        """Set a replica's part in prefill and decoding."""
        if role is not replica.role:
            self._parted += (role is not Role.BOTH) - (replica.role is not Role.BOTH)
            replica.role, replica.apart = role, False

    @contextmanager
    def prefills_apart(self) -> Iterator[None]:
        """Have nothing placed on or moved to prefill replicas; afterwards, allow it again for arrivals."""
        for replica in self.prefills():
            replica.apart = True
        try:
            yield
        finally:
            for replica in self.prefills():
                replica.apart = False

    def set_idle_since(self, replica: Replica, idle_since: float | None) -> None:
        """Set the time since which the replica is empty, where that began before it was added here."""
        replica.idle_since = idle_since

    def set_capacity(self, capacity: Tokens) -> None:
        """Set the capacity of new replicas, and every request's size class for that capacity."""
        if capacity != self.capacity:
            self.capacity = capacity
            self.classes = Classes(capacity)
            for request in self.requests.values():
                request.kind = self.classes.kind(request.tokens)
                request.ceiling = self.classes.ceiling(request.kind)

    def share_blocks(self, block_tokens: int, names: Callable[[RequestId], Sequence[int]]) -> None:
        """Have requests share the blocks of their prompts, which have `block_tokens` tokens; 0: they share none.

        `names` are those of the blocks of the requests so far.
        """
        if block_tokens == (0 if self.prompts is None else self.prompts.block_tokens):
            return
        requests = self.requests.values()
        for request in requests:
            for replica in self._users(request):
                self._share_no_more(request, replica)
            request.prompt = None
        self.prompts = ActivePrompts(block_tokens) if block_tokens else None
        for request in requests:
            request.prompt = self._begin(names(request.id), request.tokens)
            for replica in self._users(request):
                self._share(request, replica)
        self._rooms = None

    # --- observations of requests ---------------------------------------------------------------------

    def add_request(
        self,
        request_id: RequestId,
        tokens: Tokens,
        replica: Replica | None = None,
        rank: int = 0,
        turn: float = 0.0,
        adapter: AdapterId | None = None,
        names: Sequence[int] = (),
    ) -> Request:
        """Add a request as the latest arrival. It runs on `replica` already; without a replica it waits.

        `names` are those of its prompt's full blocks. Raises `ValueError` if the id is taken, or for less than one
        token.
        """
        if request_id in self.requests:
            raise ValueError(f"there is a request {request_id}")
        request = self.new_request(request_id, tokens, rank, turn, adapter)
        self._arrivals = request.order
        self.has_ranks = self.has_ranks or rank != 0
        self.requests[request_id] = request
        request.prompt = self._begin(names, tokens)
        self._enter(request, replica)
        return request

    def new_request(
        self,
        request_id: RequestId,
        tokens: Tokens,
        rank: int = 0,
        turn: float = 0.0,
        adapter: AdapterId | None = None,
        names: Sequence[int] = (),
    ) -> Request:
        """The latest arrival, as it would be if it were added. Changes nothing. Raises `ValueError` for no tokens.

        It is for queries before the next change of the cluster.
        """
        if tokens < 1:
            raise ValueError(f"{request_id} holds {tokens} tokens")
        order, kind = self._arrivals + 1, self.classes.kind(tokens)
        prompt = self.prompts.find(names, tokens) if self.prompts is not None and names else None
        return Request(
            request_id,
            tokens,
            order,
            kind,
            self.classes.ceiling(kind),
            rank=rank,
            turn=turn,
            adapter=adapter,
            prompt=prompt,
        )

    def locate(self, request: Request, replica: Replica | None, source: Replica | None = None) -> None:
        """Set the request's observed location (None: it waits), and the `source` at which it still holds blocks."""
        if request.replica is not replica:
            self._leave(request)
            self._enter(request, replica)
        if request.source is not source:
            self.release(request)
            if source is not None:
                request.source = source
                self.held[request.id] = request.tokens
                source.held += request.tokens
                self._share(request, source)
                self._touch(source)

    def release(self, request: Request) -> None:
        """End the request's move: nothing of it is left at its source."""
        if request.source is not None:
            request.source.held -= self.held.pop(request.id)
            self._share_no_more(request, request.source)
            self._touch(request.source)
            request.source = None

    def remove_request(self, request: Request) -> None:
        """Remove a request that has ended, free its room, and take back the decisions on it."""
        if request in self._trail.traces:
            self.take_back(request)
        self.release(request)
        self._leave(request)
        if request.prompt is not None and self.prompts is not None:
            self.prompts.end(request.prompt)
        self.resting.pop(request.id, None)
        del self.requests[request.id]

    def pin(self, request: Request, pinned: bool = True) -> None:
        """Forbid the request to move, or allow it again."""
        request.pinned = pinned

    def resize(self, sizes: Iterable[tuple[RequestId, Tokens]], crossed: list[Crossing]) -> int:
        """Set requests' sizes; returns the tokens by which those on replicas have grown in all.

        Requests on replicas that are in another size class by it are appended to `crossed`. The one loop over every
        running request: its work per request decides how an epoch scales. Raises `KeyError` for an unknown request.
        """
        requests = self.requests
        # Sizes come replica by replica, so mostly a replica's load is written once.
        replica: Replica | None = None
        total = grown = 0
        for request_id, tokens in sizes:
            request = requests[request_id]
            was = request.tokens
            if request.replica is not replica:
                if replica is not None:
                    replica.load += grown
                    total += grown
                    self._touch(replica)
                replica, grown = request.replica, 0
            grown += tokens - was
            request.tokens = tokens
            if tokens > request.ceiling or tokens < was:
                kind = self.classes.kind(tokens)
                if kind is not request.kind and request.replica is not None:
                    crossed.append(Crossing(request, request.kind))
                request.kind = kind
                request.ceiling = self.classes.ceiling(kind)
        if replica is not None:
            replica.load += grown
            total += grown
            self._touch(replica)
        for request_id, held in self.held.items():  # requests on the move grow at their source
            request = requests[request_id]
            assert request.source is not None
            request.source.held += request.tokens - held
            self.held[request_id] = request.tokens
            self._touch(request.source)
        return total

    # --- the conditions of an epoch -------------------------------------------------------------------

    def begin_epoch(self, conditions: EpochConditions, now: float) -> None:
        """Decide under these conditions from now on. Requests whose rest is over may move again."""
        for request_id in [r for r, until in self.resting.items() if until <= now]:
            del self.resting[request_id]
            self.requests[request_id].resting = False
        was, self.conditions = self.conditions, conditions
        self.moves_left = conditions.moves
        headroom, lead, speed = conditions.headroom, conditions.lead, conditions.speed
        if (headroom, lead) == (was.headroom, was.lead) and speed is was.speed:
            return
        for replica in self.replicas.values():
            replica.headroom, replica.lead, replica.speed = headroom, lead, speed
        self._rooms = None

    @contextmanager
    def longer_waits(self, wait_s: float) -> Iterator[None]:
        """Within the block, requests may wait for prefills for `wait_s` seconds, if the speed limit allows less."""
        conditions = self.conditions
        if conditions.speed is None or conditions.speed.wait_s >= wait_s:
            yield
            return
        self._limit_speed(replace(conditions, speed=replace(conditions.speed, wait_s=wait_s)))
        try:
            yield
        finally:
            self._limit_speed(conditions)

    def _limit_speed(self, conditions: EpochConditions) -> None:
        """Apply conditions that differ in nothing but the wait for prefills, by which no replica has more room."""
        self.conditions = conditions
        for replica in self.replicas.values():
            replica.speed = conditions.speed

    def spend_move(self) -> None:
        """Take a move that is decided outside of an epoch off the budget of the last one."""
        self.moves_left -= 1

    def rest(self, request_id: RequestId, until: float) -> None:
        """Forbid the request to move before a time."""
        self.resting[request_id] = until
        self.requests[request_id].resting = True

    # --- decisions ------------------------------------------------------------------------------------

    def may_move(self, request: Request) -> bool:
        """True if the request is movable, and the epoch has moves left or moving it adds none."""
        if request.pinned or request.resting or request.source is not None:
            return False
        return self.moves_left > 0 or self._trail.trace(request).is_free(request.replica)

    def place(self, request: Request, replica: Replica) -> None:
        """Start a waiting or lifted request on a replica. On a replica that is still starting the request waits.

        Raises `ValueError` if the request is on a replica.
        """
        if request.replica is not None:
            raise ValueError(f"{request.id} is on {request.replica.id}")
        self._step(request, replica, self._trail.trace(request))
        if self.conditions.speed is not None:
            replica.backlog += request.tokens

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
        trace = self._trail.trace(request)
        self._step(request, None, Trace(trace.origin, trace.reason, trace.unit, evicted=True))

    def open(self) -> Replica | None:
        """Open a new replica; None if the supply has none left."""
        if self.supply.left <= 0:
            return None
        replica_id, node = self.supply.take()
        replica = self.add_replica(replica_id, node, self.capacity, self.starts_as)
        self._trail.opened[replica_id] = replica
        return replica

    @property
    def opened(self) -> int:
        """The number of replicas opened since `settle`."""
        return len(self._trail.opened)

    def close(self, replica: Replica) -> None:
        """Close an empty replica. Earlier decisions cannot be undone afterwards.

        Raises `ValueError` if the replica has requests, or room held for requests on the move.
        """
        if replica.requests or replica.held:
            raise ValueError(f"{replica.id} is not empty")
        self._remove(replica)
        if self._rooms is not None:
            self._rooms.remove(replica)
        self._trail.freeze()
        if self._trail.opened.pop(replica.id, None) is not None:
            self.supply.give_back(replica.id)
        else:
            self._trail.closed[replica.id] = replica

    def note_idle(self, now: float) -> None:
        """Set the times since which replicas are empty."""
        for replica in self.running():
            if replica.role is Role.PREFILL or replica.requests or replica.held or replica.queued:
                replica.idle_since = None
            elif replica.idle_since is None:
                replica.idle_since = now

    def unit(self) -> int:
        """A number for a group of requests that move together."""
        self._units += 1
        return self._units

    def mark(self) -> int:
        """A point to which `undo` can return, until a replica is closed or the epoch ends."""
        return self._trail.first + len(self._trail.steps)

    def undo(self, mark: int) -> None:
        """Take back every place, move, lift and eviction since the mark. Newly opened replicas stay open.

        Raises `ValueError` if a replica has been closed since the mark.
        """
        if mark < self._trail.first:
            raise ValueError("decisions from before a replica was closed cannot be undone")
        steps = self._trail.steps
        for _ in range(self.mark() - mark):
            self._put(*steps.pop())

    def decided(self) -> list[tuple[Request, Trace]]:
        """The requests with a decision since `settle`, in the order of their first decision, and their traces."""
        return list(self._trail.traces.items())

    def take_back(self, request: Request) -> None:
        """Put the request back where it began the epoch. Earlier decisions cannot be undone afterwards."""
        self._put(request, self._trail.trace(request).origin, None)
        self._trail.freeze()

    def planned(self) -> Plan:
        """The decisions since `settle` as a plan. Requests without a running replica wait again."""
        for request, trace in list(self._trail.traces.items()):
            replica = request.replica
            if replica is not None and replica.state is not _RUNNING and (replica is not trace.origin or trace.evicted):
                replica = None
                self._put(request, None, trace)
            if replica is None and trace.is_move(replica):
                self._put(request, None, Trace(trace.origin, evicted=True))
        return self._trail.plan(tuple(request.id for request in self.in_order()))

    def settle(self) -> Plan:
        """End the epoch. Returns the plan, see `planned`: its moves are under way, and its closed replicas are gone."""
        plan = self.planned()
        for request, trace in self._trail.traces.items():
            if self.holds and trace.is_move(request.replica):
                request.source = trace.origin
                self.held[request.id] = request.tokens
        for replica_id in self._trail.closed:
            self.supply.give_back(replica_id)
        self._trail.forget_decisions()
        return plan

    @contextmanager
    def proposing(self) -> Iterator[None]:
        """At the end of the block, take all of its decisions back, roles included.

        Requests, replicas and the supply are then as before, in the same order. Only for a block that begins without
        decisions since `settle`, and does not call it. After an exception, nothing is taken back.
        """
        replicas = [_Standing.of(replica) for replica in self.replicas.values()]
        waiting, activations, units = tuple(self.waiting), self._activations, self._units
        yield
        self._running = self._rooms = None
        for request, trace in list(self._trail.traces.items()):
            self._put(request, trace.origin, None)
        for replica_id in self._trail.opened:
            self.supply.give_back(replica_id)
        for standing in replicas:
            standing.restore()
        self.replicas = {standing.replica.id: standing.replica for standing in replicas}
        self.waiting = {request_id: self.waiting[request_id] for request_id in waiting}
        self._activations, self._units = activations, units
        self._parted = sum(replica.role is not Role.BOTH for replica in self.replicas.values())
        self._trail.forget_decisions()

    # --- queries --------------------------------------------------------------------------------------

    def need(self, tokens: int) -> int:
        """The room that a request of that size needs: its size and headroom, but no more than an empty replica has."""
        grown = tokens + self.conditions.headroom
        return grown if grown <= self.capacity else max(tokens, self.capacity)

    def size(self, request: Request) -> Size:
        """The request's size on every replica: on its own one, that which its departure frees.

        Its blocks on a replica that it is leaving are no reason to go back there.
        """
        if request.prompt is None or self.prompts is None:
            return Size(request.tokens)
        own = tuple(replica.id for replica in self._users(request))
        return Size(request.tokens, request.prompt, self.prompts.block_tokens, own)

    def size_on(self, request: Request, replica: Replica) -> int:
        """The tokens that the request adds to a replica, or has added to its own: see `size`."""
        return request.tokens if request.prompt is None else self.size(request).on(replica)

    def distinct(self, requests: Iterable[Request]) -> int:
        """The distinct tokens of requests, if all of them were on one replica."""
        if self.prompts is None:
            return sum(request.tokens for request in requests)
        return self.prompts.distinct((request.tokens, request.prompt) for request in requests)

    def fits(self, request: Request, replica: Replica) -> bool:
        """True if the replica accepts requests and has room for this one."""
        return replica.accepts and self._has_room(replica, self.size_on(request, replica), request.tokens)

    def fitting(self, request: Request, replicas: Iterable[Replica]) -> Iterator[Replica]:
        """Those of the replicas that accept requests and have room for this one, in their order."""
        size = self.size(request)
        return (replica for replica in replicas if self._takes(replica, size))

    def tightest(self, size: Size, accept: Callable[[Replica], object] | None = None) -> Replica | None:
        """Best fit: the replica with the least room in which a request of that size and its growth fit; of equals the
        oldest. Replicas that share more of it with others come first, however much room they have.

        Considers only replicas that accept requests and for which `accept` is true.
        """
        for found in self._sharing(size, accept, False):
            return found
        return self._index().tightest(self.need(size.tokens), accept)

    def widest(self, size: Size, accept: Callable[[Replica], object] | None = None) -> Replica | None:
        """Worst fit: the replica that is left with the most room, if a request of that size and its growth fit there;
        of equals the youngest.

        Considers only replicas that accept requests and for which `accept` is true.
        """
        found = self._index().widest(self.need(size.tokens), accept)
        if size.prompt is None:
            return found
        sharing = list(self._sharing(size, accept, True))
        return choose([*sharing, *([] if found is None else [found])], size, True)

    def best_on_node(
        self, node: str, size: Size, accept: Callable[[Replica], object], widest: bool = False
    ) -> Replica | None:
        """The best fit among the replicas of one node, or with `widest` the worst fit; as everywhere."""
        need = self.need(size.tokens)
        on_node = self._index().on_node(node)
        if size.prompt is None:
            fitting = (r for r in on_node if r.accepts and r.room >= need and accept(r))
            return (max if widest else min)(fitting, key=lambda r: (r.room, r.order), default=None)
        return choose([replica for replica in on_node if self._takes(replica, size) and accept(replica)], size, widest)

    def roomiest(self) -> Iterator[Replica]:
        """Running replicas in descending order of room, up to the cluster's next change."""
        return self._index().roomiest()

    def queued(self) -> int:
        """The sum of the waiting requests' sizes, in tokens."""
        return sum(request.tokens for request in self.waiting.values())

    def is_starting(self) -> bool:
        """True while a replica is starting. A replica emptied or closed now would soon be opened again."""
        return self.conditions.awaits_start or any(r.state is not _RUNNING for r in self._trail.opened.values())

    def overloaded(self) -> list[Replica]:
        """Replicas whose requests exceed their capacity, oldest first."""
        return [r for r in self.replicas.values() if r.load + r.shared > r.capacity]

    def strained(self) -> list[Replica]:
        """Replicas that will be overloaded by the time a move decided now is over, oldest first."""
        return [r for r in self.replicas.values() if r.strain > 0]

    def running(self) -> Sequence[Replica]:
        """RUNNING replicas, oldest first."""
        if self._running is None:
            self._running = tuple(r for r in self.replicas.values() if r.state is _RUNNING)
        return self._running

    @property
    def has_parts(self) -> bool:
        """True if a replica is for prefills or for decoding alone."""
        return self._parted > 0

    def prefills(self) -> Sequence[Replica]:
        """RUNNING replicas for prefills alone, oldest first."""
        return [r for r in self.running() if r.role is Role.PREFILL] if self.has_parts else ()

    def hosts(self) -> Sequence[Replica]:
        """RUNNING replicas that requests may be moved to, oldest first; full ones, too."""
        return [r for r in self.running() if not r.apart] if self.has_parts else self.running()

    def up(self) -> int:
        """The number of replicas that are running or starting."""
        return sum(r.state in UP for r in self.replicas.values())

    def in_order(self) -> list[Request]:
        """The waiting requests in the order of their turns, of equals the oldest first."""
        return sorted(self.waiting.values(), key=attrgetter("place_in_line"))

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every request is in exactly one place and every sum is correct."""
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
            adapters = Counter(q.adapter for q in replica.requests.values() if q.adapter is not None)
            assert replica.adapters == adapters, f"adapters on {replica.id}"
        assert list(self.running()) == [r for r in self.replicas.values() if r.state is _RUNNING], "running replicas"
        assert self._parted == sum(r.role is not Role.BOTH for r in self.replicas.values()), "replicas with one part"
        if self.prompts is not None:
            self.prompts.check_integrity()
            for replica in self.replicas.values():
                users = [q for q in self.requests.values() for user in self._users(q) if user is replica]
                sizes = sum(q.tokens for q in users)
                assert sizes - self.saved(replica) == self.distinct(users), f"shared blocks on {replica.id}"
        if self._rooms is not None:
            self._rooms.check_integrity(self.running())

    # --- inside ---------------------------------------------------------------------------------------

    def _remove(self, replica: Replica) -> None:
        del self.replicas[replica.id]
        self._parted -= replica.role is not Role.BOTH
        self._running = None

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
        self._share_no_more(request, replica)
        if request.adapter is not None:
            _count(replica.adapters, request.adapter, -1)
        self._touch(replica)

    def _enter(self, request: Request, replica: Replica | None) -> None:
        request.replica = replica
        if replica is None:
            self.waiting[request.id] = request
            return
        replica.requests[request.id] = request
        replica.load += request.tokens
        self._share(request, replica)
        if request.adapter is not None:
            _count(replica.adapters, request.adapter, 1)
        self._touch(replica)

    def _moving(self, request: Request, reason: Reason, unit: int | None) -> Trace:
        if not self.may_move(request):
            raise ValueError(f"{request.id} must stay where it is")
        trace = self._trail.trace(request)
        return Trace(trace.origin, reason, self.unit() if unit is None else unit, trace.evicted)

    def _step(self, request: Request, replica: Replica | None, trace: Trace) -> None:
        """Put the request on a replica, and record its former state as a step."""
        self._trail.steps.append(Step(request, request.replica, self._trail.traces.get(request)))
        self._put(request, replica, trace)

    def _put(self, request: Request, replica: Replica | None, trace: Trace | None) -> None:
        """Change a request's replica and trace, and update loads, held blocks, budget and index with them."""
        traces = self._trail.traces
        was = traces.get(request)
        moved = was is not None and was.is_move(request.replica)
        moves = trace is not None and trace.is_move(replica)
        self._leave(request)
        self._enter(request, replica)
        either = trace or was
        if moves != moved and either is not None and either.origin is not None:
            self._charge(request, either.origin, moves)
        if trace is None:
            del traces[request]
        else:
            traces[request] = trace

    def _charge(self, request: Request, origin: Replica, moves: bool) -> None:
        """Charge a move of the request away from `origin` to the budget; if it `moves` no more, give it back."""
        self.moves_left -= 1 if moves else -1
        if self.holds:
            origin.held += request.tokens if moves else -request.tokens
            if moves:
                self._share(request, origin)
            else:
                self._share_no_more(request, origin)
            self._touch(origin)

    # --- shared blocks --------------------------------------------------------------------------------

    def _begin(self, names: Sequence[int], tokens: int) -> ActivePrompt | None:
        return self.prompts.begin(names, tokens) if self.prompts is not None and names else None

    def _users(self, request: Request) -> list[Replica]:
        """The replicas on which a request uses blocks."""
        users = [replica for replica in (request.replica, request.source) if replica is not None]
        leaving = self._trail.leaving(request) if self.holds else None
        return users if leaving is None else [*users, leaving]

    def _share(self, request: Request, replica: Replica) -> None:
        """Note that a request uses blocks of a replica."""
        if request.prompt is not None and self.prompts is not None:
            replica.shared -= self.prompts.enter(request.prompt, replica.id)

    def _share_no_more(self, request: Request, replica: Replica) -> None:
        """Note that a request uses no blocks of a replica any more, or one time less."""
        if request.prompt is not None and self.prompts is not None:
            replica.shared += self.prompts.leave(request.prompt, replica.id)

    def _has_room(self, replica: Replica, added: int, tokens: int) -> bool:
        """True if a replica has room for a request of `tokens` tokens that adds `added` ones to it."""
        if added == tokens:
            return replica.room >= self.need(tokens)
        return replica.has_room(self.need(added), self.need(tokens))

    def _takes(self, replica: Replica, size: Size) -> bool:
        """True if a replica accepts requests and has room for one of that size."""
        return replica.accepts and self._has_room(replica, size.on(replica), size.tokens)

    def _sharing(self, size: Size, accept: Callable[[Replica], object] | None, widest: bool) -> Iterator[Replica]:
        """The best replica with room of each of a size's groups, those first that share most."""

        def takes(replica: Replica) -> bool:
            return self._takes(replica, size) and (accept is None or bool(accept(replica)))

        for shared, group in size.groups():
            if len(group) * len(group) <= len(self.replicas):
                found = choose([r for r in map(self.replicas.get, group) if r is not None and takes(r)], size, widest)
            else:
                # Of a large group, the index finds one after a few looks.
                best = self._index().widest if widest else self._index().tightest
                found = best(self.need(size.tokens - shared), takes, group)
            if found is not None:
                yield found


@dataclass(frozen=True, slots=True)
class _Standing:
    """The attributes of a replica that decisions change beside its sums, with its requests and adapters in order."""

    replica: Replica
    requests: tuple[RequestId, ...]
    adapters: tuple[AdapterId, ...]
    role: Role
    backlog: int
    idle_since: float | None

    @classmethod
    def of(cls, replica: Replica) -> "_Standing":
        orders = tuple(replica.requests), tuple(replica.adapters)
        return cls(replica, *orders, replica.role, replica.backlog, replica.idle_since)

    def restore(self) -> None:
        replica = self.replica
        replica.requests = {request_id: replica.requests[request_id] for request_id in self.requests}
        replica.adapters = {adapter: replica.adapters[adapter] for adapter in self.adapters}
        replica.role, replica.apart = self.role, False
        replica.backlog, replica.idle_since = self.backlog, self.idle_since


def _count(adapters: dict[AdapterId, int], adapter: AdapterId, change: int) -> None:
    """Change the number of an adapter's requests; an adapter without requests is removed."""
    adapters[adapter] = adapters.get(adapter, 0) + change
    if not adapters[adapter]:
        del adapters[adapter]
