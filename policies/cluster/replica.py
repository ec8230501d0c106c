"""Requests and replicas, the mutable entries of a `Cluster`.

`Cluster` is the only writer of their fields; policies and `Decisions` read them.
"""

from dataclasses import dataclass, field
from itertools import islice

from policies.cluster.classes import Kind
from policies.cost.service import SpeedLimit
from policies.model import AdapterId, ReplicaId, ReplicaState, RequestId, Role, Tokens
from policies.prefix.sharing import ActivePrompt


@dataclass(slots=True, eq=False)
class Request:
    """One request. `order` counts arrivals: of two requests the older has the smaller number. `rank` and `turn` follow
    from its class (`policies.precedence`).

    `replica` is the request's location by the decisions so far, None while it waits. `source` is set while a move from
    an earlier epoch is under way: until its end the request holds blocks there, too. `leaves` is set if it moves by the
    decisions so far, and moves take time: it will be the `source`. `adapter` is its LoRA adapter;
    None: the model alone. `prompt` are the blocks that it may share with others (`policies.prefix.sharing`); None: it
    shares none.
    """

    id: RequestId
    tokens: Tokens
    order: int
    kind: Kind
    ceiling: float
    replica: "Replica | None" = None
    source: "Replica | None" = None
    leaves: "Replica | None" = None
    adapter: AdapterId | None = None
    prompt: ActivePrompt | None = None
    pinned: bool = False
    resting: bool = False
    rank: int = 0
    turn: float = 0.0

    @property
    def place_in_line(self) -> tuple[float, int]:
        """A sort key: the first of the waiting requests to be served has the lowest one."""
        return self.turn, self.order

    @property
    def places(self) -> "list[Replica]":
        """The replicas on which the request uses blocks."""
        return [place for place in (self.replica, self.source, self.leaves) if place is not None]

    @property
    def movable(self) -> bool:
        """True if a policy may move the request now."""
        return not (self.pinned or self.resting) and self.source is None


@dataclass(slots=True, eq=False)
class Replica:
    """One replica. `order` counts activations: the most recently activated replica has the largest number.

    `load` is the sum of its requests' sizes, requests on their way here included: the context that its steps attend to.
    `held` is the sum over requests that are leaving, which occupy their room here until their moves are over. `shared`
    corrects both to the KV cache in use, by the engine's count and the decisions since: it is below zero if requests
    share blocks, above if blocks belong to no request.
    `headroom` is the growth kept free for each request, `lead` a request's growth until a decision takes effect. All
    are in tokens. `queued` counts the requests in its engine's queue, without blocks, which will take `queued_tokens`.
    `idle_since` is the time, in seconds, of the epoch that first found the replica empty.

    A replica is full when its KV cache is, or when its steps would exceed the `speed` limit of a service level (None:
    no limit). `backlog` are the tokens of its requests, queued ones included, that have not been prefilled.

    `adapters` are the numbers of requests by LoRA adapter, in the order in which the adapters came. The engine runs
    requests with the first `max_adapters` of them; requests with the others wait in its queue.

    While `apart`, nothing is placed on or moved to the replica, whatever room it has: it is for the prefills of
    arrivals.
    """

    id: ReplicaId
    node: str
    capacity: Tokens
    order: int
    state: ReplicaState = ReplicaState.RUNNING
    max_requests: int = 1 << 30
    load: int = 0
    held: int = 0
    shared: int = 0
    headroom: int = 0
    lead: int = 0
    queued: int = 0
    queued_tokens: int = 0
    idle_since: float | None = None
    speed: SpeedLimit | None = None
    backlog: int = 0
    max_adapters: int = 0
    role: Role = Role.BOTH
    apart: bool = False
    adapters: dict[AdapterId, int] = field(default_factory=dict)
    requests: dict[RequestId, Request] = field(default_factory=dict)

    @property
    def room(self) -> int:
        """Tokens of the largest request that may be placed here; below zero if growth has used some of the headroom.

        An inner loop of every decision, like `strain`: so the sums are written out.
        """
        room = self.capacity - self.load - self.shared - self.held - self.headroom * len(self.requests)
        return room if self.speed is None else self._limited(room, self.speed)

    @property
    def is_idle(self) -> bool:
        """True if it has no request, leaving and queued ones included, and is not for prefills."""
        return not (self.role is Role.PREFILL or self.requests or self.held or self.queued)

    @property
    def later_room(self) -> int:
        """The room once all moves away are over."""
        room = self._unused
        return room if self.speed is None else self._limited(room, self.speed)

    def has_room(self, need: int, whole: int) -> bool:
        """True if `need` tokens of KV fit that belong to a request of `whole` tokens; the rest of it is here already.

        Steps attend to all of them.
        """
        if self._unused - self.held < need:
            return False
        return self.speed is None or self._limited(whole, self.speed) >= whole

    def _limited(self, room: int, speed: SpeedLimit) -> int:
        """The part of the room that the step time leaves to one more request."""
        return int(min(room, speed.room(len(self.requests), self._grown)))

    @property
    def _unused(self) -> int:
        """The part of the KV cache that the requests and their headroom leave."""
        return self.capacity - self.load - self.shared - self.headroom * len(self.requests)

    @property
    def _grown(self) -> int:
        """The requests' tokens with their headroom."""
        return self.load + self.headroom * len(self.requests)

    @property
    def vacancy(self) -> int:
        """The part of the capacity, in tokens, that is free once all moves away are over.

        Without a limit of steps, the headroom is not: with one, a forecast of demand contains the growth of requests.
        """
        return self._unused if self.speed is None else self.capacity - self.demand_at(self.speed)

    def demand_at(self, speed: SpeedLimit | None) -> int:
        """The part of the capacity, in tokens, that the requests here take under a limit of steps."""
        used = self.load + self.shared
        if speed is None:
            return used
        return max(used, round(self.capacity * speed.share(len(self.requests), self.load)))

    @property
    def free(self) -> int:
        """Tokens in free blocks, now."""
        return self.capacity - self.load - self.held - self.shared

    @property
    def overload(self) -> int:
        """Tokens by which the requests will exceed the capacity once all moves away are over; zero or less is fine."""
        return self.load + self.shared - self.capacity

    @property
    def strain(self) -> int:
        """The overload, in tokens, by the time a move decided now is over; zero or less is fine.

        Steps that will be too slow are an overload, too: that of the smallest request whose departure is enough. The
        growth and the steps of a single request do not count: it would fare no better on another replica.
        """
        overload, count = self.load + self.shared - self.capacity, len(self.requests)
        if count < 2:
            return overload
        strain = overload + self.lead * count
        if self.speed is None:
            return strain
        excess = self.speed.excess(count, self.load + self.lead * count)
        return max(strain, excess + self.lead) if excess else strain

    @property
    def is_slow_alone(self) -> bool:
        """True if the strain is that of steps, and the KV cache has room for the growth."""
        return self.load + self.shared + self.lead * len(self.requests) <= self.capacity

    @property
    def accepts(self) -> bool:
        """True if requests may be placed on or moved to this replica."""
        if self.apart or not self.runs_more:
            return False
        return self.speed is None or self.speed.is_in_time(len(self.requests), self.load, self.backlog)

    def runs_adapter(self, adapter: AdapterId | None) -> bool:
        """True if requests with the adapter run here, not counting those in the queue. None always runs."""
        return adapter is None or adapter in islice(self.adapters, self.max_adapters)

    def takes_adapter(self, adapter: AdapterId | None) -> bool:
        """True if a request with the adapter need not wait until no request with one of the others is left."""
        return len(self.adapters) < self.max_adapters or self.runs_adapter(adapter)

    @property
    def runs_more(self) -> bool:
        """True if the engine runs and may run one more request, in time or not."""
        return self.state is ReplicaState.RUNNING and len(self.requests) < self.max_requests
