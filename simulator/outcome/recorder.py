"""Records the events of a simulation. `simulator.outcome.metrics` evaluates them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from policies.bounds import HeldRequest, Sized, best_fit_decreasing, least_bins
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.model import ReplicaState, RequestId, Tokens
from policies.plan import Plan, Reason
from policies.prefix.sharing import ActivePrompts
from simulator.world.observer import Life, Transfer

STEP_GRID_S = 1e-4
"""The resolution of recorded step times, in seconds."""
STEP_SPAN_S = 10.0
"""The resolution of the times at which steps are recorded, in seconds."""


@dataclass(frozen=True, slots=True)
class EpochSample:
    """One epoch: the cluster after the decisions, and the numbers of decisions by kind.

    `gpus` are on that number of `machines`, None if these are not counted. `held` counts the requests with KV in GPU
    memory; the others wait. `bound` is a lower bound on the GPUs for the held requests (`policies.bounds.least_bins`),
    `repack` the number of GPUs for them by best-fit-decreasing, which shares no blocks. `used` and `capacity` are in
    tokens; blocks that requests of a GPU share count once.
    """

    now_s: float
    gpus: int
    starting: int
    used: int
    capacity: int
    held: int
    waiting: int
    bound: int
    repack: int
    moves: int = 0
    units: int = 0
    tokens_moved: int = 0
    evictions: int = 0
    tokens_evicted: int = 0
    opened: int = 0
    closed: int = 0
    reasons: Mapping[Reason, int] = field(default_factory=dict)
    machines: int | None = None


@dataclass(slots=True)
class EventRecorder:
    """An observer that keeps all events. `tick` is called in every epoch with its virtual time in seconds.

    Requests of a GPU share the blocks of `block_tokens` tokens that have the same `names`; 0: they share none. Whether
    decisions count on that makes no difference here. `steps` are the tokens of decoding requests by span of
    `STEP_SPAN_S` and by step time in units of `STEP_GRID_S`.
    """

    tick: Callable[[float], None]
    names: Mapping[RequestId, Sequence[int]] = field(default_factory=dict)
    block_tokens: int = 0
    epochs: list[EpochSample] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    preemptions: list[tuple[float, Tokens]] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    steps: dict[tuple[int, int], float] = field(default_factory=dict)

    def decided(
        self, now: float, cluster: Cluster, plans: Sequence[Plan], closing: int = 0, machines: int | None = None
    ) -> None:
        """Record an epoch."""
        contents = _Contents(self.names, self.block_tokens)
        self.epochs.append(_epoch(now, cluster, plans, contents, closing, machines))
        self.tick(now)

    def stepped(self, now: float, step_s: float, tokens: float) -> None:
        """Record tokens of decoding requests."""
        key = int(now / STEP_SPAN_S), round(step_s / STEP_GRID_S)
        self.steps[key] = self.steps.get(key, 0.0) + tokens

    def transferred(self, now: float, transfer: Transfer) -> None:
        """Record a migration."""
        self.transfers.append(transfer)

    def preempted(self, now: float, tokens: Tokens) -> None:
        """Record a preemption."""
        self.preemptions.append((now, tokens))

    def finished(self, now: float, life: Life) -> None:
        """Record a request's life."""
        self.lives.append(life)


class _Contents:
    """The requests with KV in GPU memory and the blocks that they share, of one epoch."""

    def __init__(self, names: Mapping[RequestId, Sequence[int]], block_tokens: int) -> None:
        self._names = names
        self.prompts = ActivePrompts(block_tokens) if block_tokens else None

    def held(self, replica: Replica) -> list[Sized]:
        """The requests that fit, oldest first: an overloaded replica preempts the youngest."""
        requests = [self._sized(request) for request in sorted(replica.requests.values(), key=attrgetter("order"))]
        while self.used(requests) > replica.capacity:
            requests.pop()
        return requests

    def used(self, requests: Sequence[Sized]) -> int:
        """The distinct tokens of requests on one GPU."""
        if self.prompts is None:
            return sum(request.tokens for request in requests)
        return self.prompts.distinct((request.tokens, request.prompt) for request in requests)

    def _sized(self, request: Request) -> Sized:
        if self.prompts is None:
            return request
        return HeldRequest(request.tokens, self.prompts.begin(self._names.get(request.id, ()), request.tokens))


def _epoch(
    now: float, cluster: Cluster, plans: Sequence[Plan], contents: _Contents, closing: int, machines: int | None
) -> EpochSample:
    replicas = cluster.replicas.values()
    held = [contents.held(replica) for replica in replicas]
    requests = [request for each in held for request in each]
    moves = [move for plan in plans for move in plan.moves]
    evictions = [eviction for plan in plans for eviction in plan.evicted]
    return EpochSample(
        now_s=now,
        gpus=len(replicas) + closing,
        starting=sum(replica.state is ReplicaState.STARTING for replica in replicas),
        used=sum(map(contents.used, held)),
        capacity=sum(replica.capacity for replica in replicas),
        held=len(requests),
        waiting=len(cluster.requests) - len(requests),
        bound=least_bins(requests, cluster.capacity, contents.prompts),
        repack=best_fit_decreasing((request.tokens for request in requests), cluster.capacity),
        moves=len(moves),
        units=len({move.unit for move in moves}),
        tokens_moved=sum(move.tokens for move in moves),
        evictions=len(evictions),
        tokens_evicted=sum(eviction.tokens for eviction in evictions),
        opened=sum(len(plan.opened) for plan in plans),
        closed=sum(len(plan.closed) for plan in plans),
        reasons=Counter(move.reason for move in moves),
        machines=machines,
    )
