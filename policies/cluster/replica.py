"""Requests and replicas as a decision sees and changes them.

`Cluster` owns these objects and is the only one that writes to them; policies read.
"""

from dataclasses import dataclass, field

from policies.cluster.classes import Kind
from policies.model import ReplicaId, ReplicaState, RequestId, Tokens


@dataclass(slots=True, eq=False)
class Request:
    """One request. `order` counts arrivals: of two requests the older has the smaller one.

    `replica` is where it lives by the decisions so far, None while it waits. `source` is set while a move that was
    decided in an earlier epoch is still under way: its blocks are then held there too.
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
        """Whether a policy may move it now."""
        return not (self.pinned or self.resting) and self.source is None


@dataclass(slots=True, eq=False)
class Replica:
    """One replica. `order` counts activations: the most recently activated one has the largest.

    `load` is what its requests hold, those included that are on their way here; `held` is what requests that
    have left by decision still hold here until their moves are done. `shared` corrects the sum of the requests'
    tokens to what the engine reports: below zero where requests share blocks, above where blocks are used by none.
    `headroom` is the growth kept free for each of them, `lead` by how much each grows until a decision takes effect.
    All are in tokens. `queued` counts requests that are in its engine's queue, without blocks. `idle_since` is the
    time, in seconds, of the epoch that first found it empty.
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
        """Tokens that may be placed here; below zero when growth has used some of the reserve."""
        return self.capacity - self.load - self.held - self.shared - self.headroom * len(self.requests)

    @property
    def free(self) -> int:
        """Tokens in free blocks, now."""
        return self.capacity - self.load - self.held - self.shared

    @property
    def overload(self) -> int:
        """Tokens by which its requests exceed its capacity once all moves away are done; zero or less is well."""
        return self.load + self.shared - self.capacity

    @property
    def strain(self) -> int:
        """Tokens by which it will be overloaded when a move that is decided now is done; zero or less is well.

        A request that is alone has nowhere better to be, however much it grows.
        """
        count = len(self.requests)
        return self.overload + (self.lead * count if count > 1 else 0)

    @property
    def accepts(self) -> bool:
        """Whether requests may be placed here or moved here."""
        return self.state is ReplicaState.RUNNING and len(self.requests) < self.max_requests
