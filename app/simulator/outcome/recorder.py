"""Records the events of a simulation. `app.simulator.outcome.metrics` evaluates them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter

from app.simulator.world.observer import Life, Transfer
from policies.bounds import best_fit_decreasing, martello_toth_l2
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica
from policies.model import ReplicaState, Tokens
from policies.plan import Plan, Reason

STEP_GRID_S = 1e-4
"""The resolution of recorded step times, in seconds."""
STEP_SPAN_S = 10.0
"""The resolution of the times at which steps are recorded, in seconds."""


@dataclass(frozen=True, slots=True)
class EpochSample:
    """One epoch: the cluster after the decisions, and the numbers of decisions by kind.

    `held` counts the requests with KV in GPU memory; the others wait. `bound` is the Martello-Toth lower bound on the
    GPUs for the held requests, `repack` the number of GPUs for them by best-fit-decreasing. `used` and `capacity` are
    in tokens.
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


@dataclass(slots=True)
class EventRecorder:
    """An observer that keeps all events. `tick` is called in every epoch with its virtual time in seconds.

    `steps` are the tokens of decoding requests by span of `STEP_SPAN_S` and by step time in units of `STEP_GRID_S`.
    """

    tick: Callable[[float], None]
    epochs: list[EpochSample] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    preemptions: list[tuple[float, Tokens]] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    steps: dict[tuple[int, int], float] = field(default_factory=dict)

    def decided(self, now: float, cluster: Cluster, plans: Sequence[Plan]) -> None:
        """Record an epoch."""
        self.epochs.append(_epoch(now, cluster, plans))
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


def _epoch(now: float, cluster: Cluster, plans: Sequence[Plan]) -> EpochSample:
    replicas = cluster.replicas.values()
    sizes = [tokens for replica in replicas for tokens in _held(replica)]
    moves = [move for plan in plans for move in plan.moves]
    evictions = [eviction for plan in plans for eviction in plan.evicted]
    return EpochSample(
        now_s=now,
        gpus=len(replicas),
        starting=sum(replica.state is ReplicaState.STARTING for replica in replicas),
        used=sum(sizes),
        capacity=sum(replica.capacity for replica in replicas),
        held=len(sizes),
        waiting=len(cluster.requests) - len(sizes),
        bound=martello_toth_l2(sizes, cluster.capacity),
        repack=best_fit_decreasing(sizes, cluster.capacity),
        moves=len(moves),
        units=len({move.unit for move in moves}),
        tokens_moved=sum(move.tokens for move in moves),
        evictions=len(evictions),
        tokens_evicted=sum(eviction.tokens for eviction in evictions),
        opened=sum(len(plan.opened) for plan in plans),
        closed=sum(len(plan.closed) for plan in plans),
        reasons=Counter(move.reason for move in moves),
    )


def _held(replica: Replica) -> list[Tokens]:
    """The sizes of the requests that fit, oldest first: an overloaded replica preempts the youngest."""
    sizes = [request.tokens for request in replica.requests.values()]
    if sum(sizes) <= replica.capacity:
        return sizes
    ordered = sorted(replica.requests.values(), key=attrgetter("order"))
    totals = accumulate(request.tokens for request in ordered)
    return [request.tokens for request, total in zip(ordered, totals, strict=True) if total <= replica.capacity]
