"""Placements: the replica of an arriving request, chosen at once and without moving any other request."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from policies.cluster.cluster import Cluster
from policies.cost.service import ReplicaSpeed
from policies.model import AdapterId, ReplicaId, RequestId, Tokens
from policies.plan import Move
from policies.precedence import DEFAULT_PRECEDENCE, Precedence
from policies.prefix.copies import Fetch
from policies.prefix.names import Naming
from policies.prefix.routing import NOT_MATCHED, Matched


@dataclass(frozen=True, slots=True)
class Place:
    """The request fits on this replica now. `matched` are the tokens of its prompt in KV caches.

    With a `fetch`, the replica copies a part of the prompt from another one first. `then` is the move that the replica
    begins at once: the request decodes on another one. If it `returns`, its context is copied back from there at its
    end.
    """

    replica: ReplicaId
    matched: Matched = NOT_MATCHED
    fetch: Fetch | None = None
    then: Move | None = None
    returns: bool = False


@dataclass(frozen=True, slots=True)
class Queue:
    """The request fits nowhere: it queues on this replica. `matched` is as in `Place`."""

    replica: ReplicaId
    matched: Matched = NOT_MATCHED


@dataclass(frozen=True, slots=True)
class NoReplica:
    """No replica accepts the request. It counts as demand until its next try, or until its placement expires.

    `wake_s` is the predicted time until a sleeping replica does, in seconds; None: none sleeps.
    """

    wake_s: float | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """A request on its way to a replica that has not reported it yet, or that waits for any replica (None).

    The placement expires at `expires_at`.
    """

    label: str
    replica: ReplicaId | None
    tokens: Tokens
    at: float
    expires_at: float
    precedence: Precedence = DEFAULT_PRECEDENCE
    adapter: AdapterId | None = None


Decision = Place | Queue | NoReplica


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A running replica for placements without the scheduler.

    `free` are its free tokens, `requests` all requests on it, with `context` tokens in total, and `backlog` the tokens
    that wait for their prefill.
    """

    free: Tokens = Tokens(0)
    requests: int = 0
    context: int = 0
    backlog: int = 0


_NO_VIEW = "this ingress has not yet heard from the scheduler, which knows the names of blocks"


@dataclass(frozen=True, slots=True)
class PlacingView:
    """The scheduler's view of the running replicas, and their step times, None before these are known.

    `naming` is their engines' naming of KV blocks, or the reason why they have none in common. `ttft_s` are the longest
    times to a first token that the service level allows, in seconds, by class. Replicas that are `asleep` take nothing.
    """

    replicas: Mapping[ReplicaId, ReplicaView] = field(default_factory=dict)
    speed: ReplicaSpeed | None = None
    naming: Naming | str = _NO_VIEW
    ttft_s: Mapping[str, float] = field(default_factory=dict)
    asleep: frozenset[ReplicaId] = frozenset()


def placing_view(
    cluster: Cluster,
    speed: ReplicaSpeed | None,
    naming: Naming | str,
    ttft_s: Mapping[str, float],
    asleep: frozenset[ReplicaId] = frozenset(),
) -> PlacingView:
    """The view of the cluster, placements since the last reports included."""
    return PlacingView(
        {r.id: ReplicaView(Tokens(max(0, r.free)), len(r.requests), r.load, r.backlog) for r in cluster.running()},
        speed,
        naming,
        ttft_s,
        asleep,
    )


class PlacingAlone:
    """Placements of one ingress without the scheduler, by its last view of `at` seconds of the ingress's clock.

    A request goes to the replica with the soonest first token among those with room for it, else among all. Before step
    times are known it goes to the one with the most free tokens. Replicas outside the view count as full.
    """

    def __init__(self, view: PlacingView, at: float) -> None:
        self._speed = view.speed
        self._replicas = dict(view.replicas)
        self._begins: dict[ReplicaId, float] = {}
        """The times at which the prefills on a replica are over."""
        if self._speed is not None:
            for name, seen in view.replicas.items():
                self._begins[name] = at + self._speed.wait_s(seen.requests, seen.context, seen.backlog)
        self._placed: dict[RequestId, tuple[ReplicaId, int]] = {}

    def place(self, request: RequestId, tokens: int, running: Collection[ReplicaId], now: float) -> ReplicaId | None:
        """The replica for a request among the `running` ones; None if there is none. The request counts there."""
        replica = min(running, key=lambda each: self._rank(each, tokens, now), default=None)
        if replica is not None:
            if self._speed is not None:
                self._begins[replica] = now + self._first_token_s(replica, tokens, now)
            self._change(replica, tokens, 1)
            self._placed[request] = replica, tokens
        return replica

    def soonest_s(self, running: Collection[ReplicaId], now: float) -> float:
        """Seconds until a prompt of one token would have its first token on the best of the `running` replicas.

        No prompt has one sooner. The wait for KV blocks is left out. 0 before step times are known, and without any
        replica.
        """
        if self._speed is None:
            return 0.0
        return min((self._first_token_s(replica, 1, now) for replica in running), default=0.0)

    def ended(self, request: RequestId) -> None:
        """The request no longer counts."""
        replica, tokens = self._placed.pop(request, (None, 0))
        if replica is not None:
            self._change(replica, -tokens, -1)

    def _rank(self, replica: ReplicaId, tokens: int, now: float) -> tuple[bool, float, int, int, ReplicaId]:
        seen = self._replicas.get(replica, _UNSEEN)
        if self._speed is None:
            return False, 0.0, -seen.free, seen.requests, replica
        return seen.free < tokens, self._first_token_s(replica, tokens, now), -seen.free, seen.requests, replica

    def _first_token_s(self, replica: ReplicaId, tokens: int, now: float) -> float:
        """Seconds to the first token of a prompt that begins behind the prefills on the replica."""
        assert self._speed is not None
        seen = self._replicas.get(replica, _UNSEEN)
        wait_s = max(0.0, self._begins.get(replica, now) - now)
        return wait_s + self._speed.prefill_s(tokens, 0, seen.requests, seen.context)

    def _change(self, replica: ReplicaId, tokens: int, requests: int) -> None:
        seen = self._replicas.get(replica, _UNSEEN)
        self._replicas[replica] = ReplicaView(
            Tokens(seen.free - tokens), seen.requests + requests, seen.context + tokens, seen.backlog
        )


_UNSEEN = ReplicaView()
