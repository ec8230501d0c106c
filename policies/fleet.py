"""Replicas and the requests on them: what is there, how events change it, and where there is room."""

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from policies.classes import Classes
from policies.demand import Demand
from policies.model import UP, ReplicaId, ReplicaState, RequestId, Tokens
from policies.rooms import Rooms
from policies.supply import Supply
from policies.working import Replica, Request

_RUNNING = ReplicaState.RUNNING


@dataclass(slots=True, eq=False)
class Fleet:
    """Where every request is. `capacity` is a new replica's in tokens, `max_requests` the most requests that it runs,
    and `headroom` the growth kept free per request, in tokens.

    `slack` is what is to stay free in all, in tokens, and `min_replicas` how many are to stay open at least.
    `waiting` are the requests without a replica, `held` what requests on the move still hold at their source, and
    `resting` until when a request may not move.
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
    classes: Classes = field(init=False)
    _rooms: Rooms | None = None
    _activations: int = 0
    _arrivals: int = 0

    def __post_init__(self) -> None:
        self.classes = Classes(self.capacity)

    # --- what happens ---------------------------------------------------------------------------------

    def add_replica(
        self, replica_id: ReplicaId, node: str, capacity: Tokens, state: ReplicaState = ReplicaState.RUNNING
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
            self.max_requests,
            headroom=self.headroom,
            lead=self.lead,
        )
        self.replicas[replica_id] = replica
        if self._rooms is not None and state is _RUNNING:
            self._rooms.add(replica)
        return replica

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

    def host(self, request: Request, replica: Replica) -> None:
        """A waiting request turns out to run on that replica already."""
        self._leave(request)
        self._enter(request, replica)

    def leave_behind(self, request: Request, source: Replica) -> None:
        """The request turns out to be on its way from `source`, and to hold its blocks there, too."""
        request.source = source
        self.held[request.id] = request.tokens
        source.held += request.tokens
        self._touch(source)

    def remove_request(self, request: Request) -> None:
        """The request is over; all that it held is free."""
        self.release(request)
        self._leave(request)
        self.resting.pop(request.id, None)
        del self.requests[request.id]

    def release(self, request: Request) -> None:
        """The request's move is done: nothing of it is left at its source."""
        if request.source is not None:
            request.source.held -= self.held.pop(request.id)
            self._touch(request.source)
            request.source = None

    def return_home(self, request: Request) -> None:
        """The request's move came to nothing: it lives where it was."""
        source = request.source
        if source is not None:
            self.release(request)
            self._leave(request)
            self._enter(request, source)

    def hold_more(self) -> None:
        """Requests on the move have grown at their source."""
        for request_id, held in self.held.items():
            request = self.requests[request_id]
            assert request.source is not None
            request.source.held += request.tokens - held
            self.held[request_id] = request.tokens

    def lose(self, replica: Replica) -> None:
        """The replica is gone. What ran there waits; what was on its way there is still at its source."""
        for request in list(replica.requests.values()):
            if request.source is not None:
                self.return_home(request)
            else:
                self._leave(request)
                self._enter(request, None)
        for request_id in list(self.held):
            if self.requests[request_id].source is replica:
                self.release(self.requests[request_id])
        del self.replicas[replica.id]
        self.supply.give_back(replica.id)
        self.invalidate()

    def invalidate(self) -> None:
        """Loads have been changed from outside: the order by room is to be made anew."""
        self._rooms = None

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

    def rest(self, request_id: RequestId, until: float) -> None:
        """The request may not move before that time."""
        self.resting[request_id] = until
        self.requests[request_id].resting = True

    def wake(self, now: float) -> None:
        """Requests whose rest is over may move again."""
        for request_id in [r for r, until in self.resting.items() if until <= now]:
            del self.resting[request_id]
            self.requests[request_id].resting = False

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
        """Whether so many running replicas less, with their requests elsewhere, leave enough open and enough free.

        Enough is free if it is so many `times` the slack.
        """
        if len(self.running()) - count < self.min_replicas:
            return False
        return not self.slack or self.spare() - count * self.capacity >= times * self.slack

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

    # --- inside ---------------------------------------------------------------------------------------

    def _index(self) -> Rooms:
        if self._rooms is None:
            self._rooms = Rooms(self.running())
        return self._rooms

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

    def _touch(self, replica: Replica) -> None:
        if self._rooms is not None:
            self._rooms.touch(replica)
