"""The replicas and requests of a pool, and the only writer of their fields.

`policies.decision` brings a cluster up to date with each observation. Policies then change it through its `decisions`
(`policies.cluster.decisions`), and search it for room with `policies.cluster.search`.

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
from policies.cluster.decisions import Decisions
from policies.cluster.replica import Replica, Request
from policies.cluster.rooms import Rooms
from policies.cluster.supply import Supply
from policies.model import UP, AdapterId, ReplicaId, ReplicaState, RequestId, Role, Tokens
from policies.prefix.sharing import ActivePrompts

_RUNNING = ReplicaState.RUNNING


@dataclass(slots=True, eq=False)
class Cluster:
    """Replicas, requests and their locations. `capacity` (tokens) and `max_requests` are those of a new replica:
    the unit of slack, of size classes and of spare room. The capacity of each replica is its own, and may change.

    `conditions` are the bounds of the newest epoch, `decisions` its decisions so far. `waiting` are the requests
    without a replica, `held` the tokens that requests on the move still hold at their source, and `resting` the times
    before which requests may not move. `has_ranks` once a request has had another rank than 0. `starts_as` is RUNNING
    if new replicas can be used at once, STARTING if they take time to start. `prompts` has the blocks that requests
    share. With `by_machine`, replicas are emptied and closed machine by machine: a machine is a node, and costs money
    until its last replica has closed.
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
    has_ranks: bool = False
    by_machine: bool = False
    prompts: ActivePrompts = field(default_factory=ActivePrompts)
    classes: Classes = field(init=False)
    decisions: Decisions = field(init=False)
    _running: tuple[Replica, ...] | None = None
    _parted: int = 0
    _rooms: Rooms | None = None
    _activations: int = 0
    _arrivals: int = 0

    def __post_init__(self) -> None:
        self.classes = Classes(self.capacity)
        self.decisions = Decisions(self)

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

    def set_node(self, replica: Replica, node: str) -> None:
        """Set the node of a replica. An empty `node` is unknown, as before the replica is put anywhere: no change."""
        if node and node != replica.node:
            replica.node, self._rooms = node, None

    def remove_replica(self, replica: Replica) -> None:
        """Remove a replica without requests."""
        del self.replicas[replica.id]
        self._parted -= replica.role is not Role.BOTH
        self._running = None
        if self._rooms is not None:
            self._rooms.remove(replica)

    def lose(self, replica: Replica) -> None:
        """Remove a lost replica. Its requests wait again; requests on their way there stay at their source."""
        for request in list(replica.requests.values()):
            self.locate(request, request.source)
        for request_id in [r for r in self.held if self.requests[r].source is replica]:
            self.release(self.requests[request_id])
        self.remove_replica(replica)
        self.supply.give_back(replica.id)
        self._rooms = None

    def correct(self, replica: Replica, shared: int) -> None:
        """Set the difference between the tokens in use, by the engine's count, and the sizes of the requests there."""
        if replica.shared != shared:
            replica.shared = shared
            self._touch(replica)

    def enqueue(self, replica: Replica, count: int, tokens: int) -> None:
        """Set the number and the size of the requests in the queue of the replica's engine, without blocks."""
        replica.queued, replica.queued_tokens = count, tokens

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

    def note_idle(self, now: float) -> None:
        """Set the times since which replicas are empty."""
        for replica in self.running():
            if not replica.is_idle:
                replica.idle_since = None
            elif replica.idle_since is None:
                replica.idle_since = now

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
        if block_tokens == self.prompts.block_tokens:
            return
        requests = self.requests.values()
        for request in requests:
            for replica in request.places:
                self._share_no_more(request, replica)
            request.prompt = None
        self.prompts = ActivePrompts(block_tokens)
        for request in requests:
            request.prompt = self.prompts.begin(names(request.id), request.tokens)
            for replica in request.places:
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
        request.prompt = self.prompts.begin(names, tokens)
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
        return Request(
            request_id,
            tokens,
            order,
            kind,
            self.classes.ceiling(kind),
            rank=rank,
            turn=turn,
            adapter=adapter,
            prompt=self.prompts.find(names, tokens),
        )

    def locate(self, request: Request, replica: Replica | None, source: Replica | None = None) -> None:
        """Set the request's observed location (None: it waits), and the `source` at which it still holds blocks."""
        if request.replica is not replica:
            self.put(request, replica)
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
        self.decisions.take_back(request)
        self.release(request)
        self._leave(request)
        if request.prompt is not None:
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

    def set_conditions(self, conditions: EpochConditions) -> None:
        """Set the conditions of decisions, and every replica's headroom, lead and speed limit."""
        was, self.conditions = self.conditions, conditions
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

    def rest(self, request_id: RequestId, until: float) -> None:
        """Forbid the request to move before a time."""
        self.resting[request_id] = until
        self.requests[request_id].resting = True

    def end_rests(self, now: float) -> None:
        """Allow the requests whose rest is over to move again."""
        for request_id in [r for r, until in self.resting.items() if until <= now]:
            del self.resting[request_id]
            self.requests[request_id].resting = False

    # --- decided changes (`policies.cluster.decisions`) -----------------------------------------------

    def put(self, request: Request, replica: Replica | None) -> None:
        """Put a request on a replica, behind the other ones there; None: it waits."""
        self._leave(request)
        self._enter(request, replica)

    def set_leaving(self, request: Request, origin: Replica | None) -> None:
        """Hold the request's room on `origin`, which it leaves by a decision; None: return that room.

        Nothing is held if moves are instantaneous.
        """
        if not self.holds:
            return
        if request.leaves is not None:
            request.leaves.held -= request.tokens
            self._share_no_more(request, request.leaves)
            self._touch(request.leaves)
        if origin is not None:
            origin.held += request.tokens
            self._share(request, origin)
            self._touch(origin)
        request.leaves = origin

    def depart(self, request: Request) -> None:
        """The decided move of a request, if there is one, is under way: its room is held until `release`."""
        if request.leaves is not None:
            request.source, request.leaves = request.leaves, None
            self.held[request.id] = request.tokens

    def snapshot(self) -> "Snapshot":
        """The replicas, their order and the order of requests, as `restore` puts them back."""
        replicas = tuple(_Standing.of(replica) for replica in self.replicas.values())
        return Snapshot(replicas, tuple(self.waiting), self._activations)

    def restore(self, before: "Snapshot") -> None:
        """Restore what decisions have changed, with every request back on its replica of then."""
        for standing in before.replicas:
            standing.restore()
        self.replicas = {standing.replica.id: standing.replica for standing in before.replicas}
        self.waiting = {request_id: self.waiting[request_id] for request_id in before.waiting}
        self._activations = before.activations
        self._parted = sum(replica.role is not Role.BOTH for replica in self.replicas.values())
        self._running = self._rooms = None

    # --- queries --------------------------------------------------------------------------------------

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

    def rooms(self) -> Rooms:
        """The index of the running replicas by room."""
        if self._rooms is None:
            self._rooms = Rooms(self.running())
        return self._rooms

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every request is in exactly one place and every sum is correct."""
        there = [q for r in self.replicas.values() for q in r.requests.values()] + list(self.waiting.values())
        assert sorted(q.id for q in there) == sorted(self.requests), "a request is lost, or in two places"
        assert all(q.replica is None and q.source is None for q in self.waiting.values()), "a waiting request is held"
        assert all(self.classes.kind(q.tokens) is q.kind for q in there), "a request is in the wrong class"
        assert sorted(self.held) == sorted(q.id for q in there if q.source is not None), "moves under way"
        held = dict.fromkeys(self.replicas, 0)
        for request in there:
            for replica, tokens in (request.source, self.held.get(request.id, 0)), (request.leaves, request.tokens):
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
        self.prompts.check_integrity()
        for replica in self.replicas.values():
            users = [q for q in self.requests.values() for user in q.places if user is replica]
            sizes = sum(q.tokens for q in users)
            distinct = self.prompts.distinct((q.tokens, q.prompt) for q in users)
            assert sizes - self.prompts.saved(replica.id) == distinct, f"shared blocks on {replica.id}"
        if self._rooms is not None:
            self._rooms.check_integrity(self.running())

    # --- inside ---------------------------------------------------------------------------------------

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

    def _share(self, request: Request, replica: Replica) -> None:
        """Note that a request uses blocks of a replica."""
        if request.prompt is not None:
            replica.shared -= self.prompts.enter(request.prompt, replica.id)

    def _share_no_more(self, request: Request, replica: Replica) -> None:
        """Note that a request uses no blocks of a replica any more, or one time less."""
        if request.prompt is not None:
            replica.shared += self.prompts.leave(request.prompt, replica.id)


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


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state that decisions change beside sums, in order: of replicas, waiting requests and activations."""

    replicas: tuple[_Standing, ...]
    waiting: tuple[RequestId, ...]
    activations: int


def _count(adapters: dict[AdapterId, int], adapter: AdapterId, change: int) -> None:
    """Change the number of an adapter's requests; an adapter without requests is removed."""
    adapters[adapter] = adapters.get(adapter, 0) + change
    if not adapters[adapter]:
        del adapters[adapter]
