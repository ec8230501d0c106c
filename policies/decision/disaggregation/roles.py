"""Disaggregation: prefills on some replicas, decoding on the others.

Roles are the decision's memory and not deployments: all replicas are alike, so a role changes with an epoch and takes
no restart. Arrivals are placed on prefill replicas, and their move by KV to another one is a part of the placement
(`deciding.place`). Each epoch orders the moves of requests that have none and whose prefill has begun. A move that
begins before the first token copies the blocks as they fill, and freezes the request at that token
(docs/migration-protocol.md). A request for which no other replica has room decodes where it is.

An operator's roles come before those of the mode, and hold until they are taken back or their replica ends.
"""

from collections.abc import Callable, Sequence

from policies.cluster.replica import Replica, Request
from policies.cluster.search import fitting
from policies.decision.disaggregation.prefills import prefill_count
from policies.decision.memory import PoolMemory
from policies.model import Phase, ReplicaId, Role
from policies.plan import Reason
from policies.rules.policy import Barred

_BEGINS = (None, Phase.WAITING, Phase.PREFILL)
"""The phases, in the newest report, of a request that has no token yet; None: it is not reported."""


def set_role(memory: PoolMemory, replica: ReplicaId, role: Role | None) -> None:
    """Set an operator's role for a replica, from the next epoch on; None: the role is the mode's again."""
    if role is None:
        memory.learned.roles_by_hand.pop(replica, None)
    else:
        memory.learned.roles_by_hand[replica] = role


def assign_roles(memory: PoolMemory, acts: bool, now: float) -> None:
    """Assign every running replica its role: an operator's, else that of the disaggregation's mode.

    All replicas have both roles unless the decision `acts` and all can exchange KV, and if no replica would be left for
    prefills, or none for decoding.
    """
    cluster = memory.cluster
    if not (memory.terms.prefill_replicas or memory.learned.roles_by_hand or cluster.has_parts):
        return
    running = cluster.running()
    has_parts = acts and len(running) > 1 and _exchange_kv(memory, running)
    roles = _roles(memory, running, now) if has_parts else {}
    if len({roles.get(replica.id, Role.BOTH) for replica in running}) < 2:
        roles = {}
    for replica in cluster.replicas.values():
        cluster.set_role(replica, roles.get(replica.id, Role.BOTH))


def _roles(memory: PoolMemory, running: Sequence[Replica], now: float) -> dict[ReplicaId, Role]:
    """The roles of running replicas, whether or not any is left for each part.

    Prefill replicas stay what they are, as long as they run; an operator's count among the mode's number of them.
    """
    terms = memory.terms
    by_hand = {r.id: memory.learned.roles_by_hand[r.id] for r in running if r.id in memory.learned.roles_by_hand}
    if not terms.prefill_replicas:
        return by_hand
    others = [replica for replica in running if replica.id not in by_hand]
    given = list(by_hand.values()).count(Role.PREFILL)
    count = terms.prefill_replicas
    if terms.auto_prefills:
        most = min(count, len(running) - 1, given + len(others))
        count = prefill_count(memory, running, given, most, now)
    first = sorted(others, key=lambda r: (r.role is not Role.PREFILL, len(r.requests), r.load, r.order))
    rest = Role.BOTH if terms.auto_prefills else Role.DECODE
    return by_hand | {r.id: Role.PREFILL if at < count - given else rest for at, r in enumerate(first)}


def _exchange_kv(memory: PoolMemory, replicas: Sequence[Replica]) -> bool:
    """True if the first replica can send KV to all others, and hence each to each."""
    first, *others = replicas
    return all(memory.learned.estimates.exchange_kv(first.id, other.id) for other in others)


def barred_by_role(memory: PoolMemory, barred: Barred) -> Barred:
    """`barred`, and the replicas that are not for prefills, if others are left."""
    if not memory.cluster.has_parts:
        return barred
    running = [replica for replica in memory.cluster.running() if replica.id not in barred]
    decoding = frozenset(replica.id for replica in running if replica.role is Role.DECODE)
    return barred | decoding if len(decoding) < len(running) else barred


def soonest_prefills(memory: PoolMemory, request: Request, barred: Barred, now: float) -> frozenset[ReplicaId]:
    """The prefill replicas with room for a request on which its prefill would begin soonest; none without any."""
    cluster, queues = memory.cluster, memory.router.queues
    able = fitting(cluster, request, (replica for replica in cluster.prefills() if replica.id not in barred))
    waits = {replica.id: queues.wait_s(replica.id, now) for replica in able}
    least_s = min(waits.values(), default=0.0)
    return frozenset(replica for replica, wait_s in waits.items() if wait_s <= least_s)


def hand_over_prefills(memory: PoolMemory, barred: Callable[[Request, ReplicaId], Barred]) -> None:
    """Move requests from prefill replicas to others, the oldest first. `barred` are no targets of one at its source."""
    decisions = memory.cluster.decisions
    for replica in memory.cluster.prefills():
        for request in sorted(replica.requests.values(), key=lambda q: q.order):
            phase = memory.locations.phase(request.id)
            if phase in (Phase.PREFILL, Phase.DECODE) and decisions.may_move(request):
                _hand_over(memory, request, barred(request, replica.id))


def hand_over_target(memory: PoolMemory, request: Request, barred: Barred) -> Replica | None:
    """The replica outside of `barred` to which an arrival moves on from the replica of its prefill; None: it stays."""
    prefills = {replica.id for replica in memory.cluster.prefills()}
    return memory.rule.place(memory.cluster, request, barred | prefills)


def _hand_over(memory: PoolMemory, request: Request, barred: Barred) -> None:
    decisions = memory.cluster.decisions
    mark = decisions.mark()
    decisions.lift(request, Reason.DISAGGREGATE)
    target = memory.rule.place(memory.cluster, request, barred)
    if target is None:
        decisions.undo(mark)
    else:
        decisions.place(request, target)


def awaits_prefills(memory: PoolMemory) -> bool:
    """True if a request on a prefill replica has no token and no move yet."""
    return any(
        memory.locations.phase(q) in _BEGINS
        for replica in memory.cluster.prefills()
        for q in replica.requests
        if q not in memory.locations.under_way
    )
