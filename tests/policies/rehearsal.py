"""The check that a plan can be carried out: a rehearsal on a copy of the cluster that it was made for."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from policies.cluster.cluster import Cluster
from policies.model import ReplicaId, ReplicaState, RequestId, Tokens
from policies.plan import Eviction, Move, Open, Placement, Plan


@dataclass(frozen=True, slots=True)
class Host:
    """A replica as `violations` needs it: what its requests hold, and whether it takes more.

    `unexplained` is the correction by the engine's count, `held` what requests that have left by earlier plans, those
    in `leaving`, still hold.
    """

    capacity: Tokens
    requests: Mapping[RequestId, Tokens]
    unexplained: int = 0
    held: int = 0
    running: bool = True
    max_requests: int = 1 << 30
    leaving: tuple[RequestId, ...] = ()


@dataclass(frozen=True, slots=True)
class Before:
    """The cluster that a plan was made for: every replica, the requests that wait, and those that must stay.

    `capacity` is a new replica's. With `holds`, moved requests keep their room at the source; `ready` is true if
    new replicas take requests at once. `blocks` are the names of the blocks of `block_tokens` tokens that requests may
    share.
    """

    hosts: Mapping[ReplicaId, Host]
    waiting: Mapping[RequestId, Tokens]
    pinned: frozenset[RequestId] = frozenset()
    capacity: Tokens = Tokens(0)
    holds: bool = False
    ready: bool = True
    blocks: Mapping[RequestId, frozenset[int]] = field(default_factory=dict)
    block_tokens: int = 0

    def saved(self, requests: Sequence[RequestId]) -> int:
        """The tokens of blocks that several of these requests have, each time but one."""
        blocks = [self.blocks.get(request, frozenset()) for request in requests]
        return self.block_tokens * (sum(map(len, blocks)) - len(frozenset().union(*blocks)))


def before(cluster: Cluster) -> Before:
    """The cluster as it is, for `violations` of a plan for it."""
    hosts = {
        r.id: Host(
            r.capacity,
            {q.id: q.tokens for q in r.requests.values()},
            unexplained=r.shared + cluster.prompts.saved(r.id),
            held=r.held,
            running=r.state is ReplicaState.RUNNING,
            max_requests=r.max_requests,
            leaving=tuple(q for q in cluster.held if cluster.requests[q].source is r),
        )
        for r in cluster.replicas.values()
    }
    waiting = {q.id: q.tokens for q in cluster.in_order()}
    pinned = frozenset(q.id for q in cluster.requests.values() if not q.movable)
    ready = cluster.starts_as is ReplicaState.RUNNING
    prompts = {q.id: q.prompt for q in cluster.requests.values() if q.prompt is not None}
    blocks = {q: frozenset(name for node in prompt.upwards() for name in node.names) for q, prompt in prompts.items()}
    block_tokens = cluster.prompts.block_tokens
    return Before(hosts, waiting, pinned, cluster.capacity, cluster.holds, ready, blocks, block_tokens)


def violations(plan: Plan, before: Before) -> list[str]:
    """The faults of a plan as sentences; empty if the plan can be executed.

    A replica may be over its capacity only if it was before, and then the plan must not add to it.
    """
    rehearsal = _Rehearsal(before)
    rehearsal.open(plan.opened)
    rehearsal.move(plan.moves)
    rehearsal.evict(plan.evicted)
    rehearsal.place(plan.placements, plan.queued)
    rehearsal.look()
    rehearsal.close(plan.closed)
    return rehearsal.wrong


class _Rehearsal:
    """A plan carried out on a copy of the cluster, noting what goes wrong."""

    def __init__(self, before: Before) -> None:
        self.wrong: list[str] = []
        self._before = before
        self._pinned = before.pinned
        self._hosts = dict(before.hosts)
        self._requests = {name: dict(host.requests) for name, host in before.hosts.items()}
        self._held = {name: host.held for name, host in before.hosts.items()}
        self._leaving = {name: [*host.leaving] for name, host in before.hosts.items()}
        self._waiting = dict(before.waiting)

    def open(self, opened: Sequence[Open]) -> None:
        for opening in opened:
            if opening.replica in self._hosts:
                self.wrong.append(f"{opening.replica} is opened but exists")
                continue
            self._hosts[opening.replica] = Host(self._before.capacity, {}, running=self._before.ready)
            self._requests[opening.replica] = {}
            self._held[opening.replica] = 0
            self._leaving[opening.replica] = []

    def move(self, moves: Sequence[Move]) -> None:
        self.wrong += [f"{r} is moved {n} times" for r, n in Counter(m.request for m in moves).items() if n > 1]
        for move in moves:
            if move.request in self._pinned:
                self.wrong.append(f"{move.request} must stay but is moved")
            if move.source == move.target:
                self.wrong.append(f"{move.request} is moved from {move.source} to itself")
            if move.request not in self._requests.get(move.source, {}):
                self.wrong.append(f"{move.request} is moved from {move.source} but is not there")
                continue
            tokens = self._requests[move.source].pop(move.request)
            if self._before.holds:
                self._held[move.source] += tokens
                self._leaving[move.source].append(move.request)
            self._put(move.request, move.target, tokens)

    def evict(self, evicted: Sequence[Eviction]) -> None:
        for eviction in evicted:
            if eviction.request in self._requests.get(eviction.source, {}):
                self._waiting[eviction.request] = self._requests[eviction.source].pop(eviction.request)
            else:
                self.wrong.append(f"{eviction.request} is evicted from {eviction.source} but is not there")

    def place(self, placements: Sequence[Placement], queued: Sequence[RequestId]) -> None:
        decided = Counter([*(p.request for p in placements), *queued])
        self.wrong += [f"{r} is decided on {n} times" for r, n in decided.items() if n > 1]
        self.wrong += [f"{r} is forgotten" for r in self._waiting if r not in decided]
        self.wrong += [f"{r} is not waiting" for r in decided if r not in self._waiting]
        for placement in placements:
            self._put(placement.request, placement.replica, self._waiting.get(placement.request, Tokens(0)))

    def look(self) -> None:
        """Compare what every replica holds with what it can hold."""
        for name, host in self._hosts.items():
            requests = self._requests[name]
            used = sum(requests.values()) + host.unexplained + self._held[name]
            used -= self._before.saved([*requests, *self._leaving[name]])
            was = sum(host.requests.values()) + host.unexplained + host.held
            was -= self._before.saved([*host.requests, *host.leaving])
            if used > host.capacity and used > was:
                self.wrong.append(f"{name} would hold {used} of {host.capacity} tokens")
            if len(requests) > host.max_requests and len(requests) > len(host.requests):
                self.wrong.append(f"{name} would run {len(requests)} requests of {host.max_requests}")

    def close(self, closed: Sequence[ReplicaId]) -> None:
        for name in closed:
            if name not in self._hosts:
                self.wrong.append(f"{name} is closed but does not exist")
                continue
            if self._requests[name]:
                self.wrong.append(f"{name} is closed with {len(self._requests[name])} requests on it")
            if self._held[name]:
                self.wrong.append(f"{name} is closed while {self._held[name]} tokens are held there")
            del self._hosts[name]

    def _put(self, request: RequestId, replica: ReplicaId, tokens: Tokens) -> None:
        if replica not in self._hosts:
            self.wrong.append(f"{request} goes to {replica}, which does not exist")
            return
        if not self._hosts[replica].running:
            self.wrong.append(f"{request} goes to {replica}, which takes no requests")
        self._requests[replica][request] = tokens
