"""Requests and replicas, the mutable entries of a `Cluster`.

`Cluster` owns these objects and is their only writer; policies read them.
"""

from dataclasses import dataclass, field

from policies.cluster.classes import Kind
from policies.model import ReplicaId, ReplicaState, RequestId, Tokens


@dataclass(slots=True, eq=False)
class Request:
    """One request. `order` counts arrivals: of two requests the older has the smaller number.

    `replica` is the request's location by the decisions so far, None while it waits. `source` is set while a move from
    an earlier epoch is under way: until its end the request holds blocks there, too.
    """

    id: RequestId
    tokens: Tokens
    order: int
    kind: Kind
    ceiling: float
    replica: "Replica | None" = None
    source: "Replica | None" = None
    pinned: bool = False
    resting: bool = False

    @property
    def movable(self) -> bool:
        """True if a policy may move the request now."""
        return not (self.pinned or self.resting) and self.source is None


@dataclass(slots=True, eq=False)
class Replica:
    """One replica. `order` counts activations: the most recently activated replica has the largest number.

    `load` is the sum of its requests' sizes, requests on their way here included. `held` is the sum over requests that
    are leaving, which occupy their room here until their moves are over. `shared` corrects the sum of the requests'
    sizes to the engine's count: it is below zero if requests share blocks, above if blocks belong to no request.
    `headroom` is the growth kept free for each request, `lead` a request's growth until a decision takes effect. All
    are in tokens. `queued` counts the requests in its engine's queue, without blocks. `idle_since` is the time, in
    seconds, of the epoch that first found the replica empty.
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
    idle_since: float | None = None
    requests: dict[RequestId, Request] = field(default_factory=dict)

    @property
    def room(self) -> int:
        """Tokens that may be placed here; below zero if growth has used some of the headroom."""
        return self.capacity - self.load - self.held - self.shared - self.headroom * len(self.requests)

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

        The growth of a single request does not count: no other replica would have more room for it.
        """
        count = len(self.requests)
        return self.overload + (self.lead * count if count > 1 else 0)

    @property
    def accepts(self) -> bool:
        """True if requests may be placed on or moved to this replica."""
        return self.state is ReplicaState.RUNNING and len(self.requests) < self.max_requests
