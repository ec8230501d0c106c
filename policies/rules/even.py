"""Evening out loads: the fullest replicas are paired with the emptiest, as in Llumnix (OSDI '24)."""

from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.cluster.search import fits
from policies.cluster.sizes import size_on
from policies.plan import Reason


def even_out(cluster: Cluster, least: float, without: Replica | None = None) -> None:
    """Pair the fullest replica with the emptiest, the second fullest with the second emptiest, and so on.

    In each pair one request moves from the full to the empty replica, if the gap between their loads shrinks by
    `least` tokens or more. The pairs end at the first gap below `least`.
    """
    ranked = sorted((r for r in cluster.hosts() if r is not without), key=lambda r: (free_when_settled(r), r.order))
    for full, empty in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
        gap = free_when_settled(empty) - free_when_settled(full)
        if gap < least:
            return
        request = _levelling(cluster, full, empty, gap)
        if request is not None and _gain(cluster, request, empty, gap) >= least:
            cluster.decisions.move(request, empty, Reason.BALANCE)


def free_when_settled(replica: Replica) -> int:
    """Tokens that are free once all moves away are over."""
    return -replica.overload


def _levelling(cluster: Cluster, full: Replica, empty: Replica, gap: int) -> Request | None:
    """The request whose move evens two replicas out most; the older of equals."""
    candidates = (q for q in full.requests.values() if cluster.decisions.may_move(q) and fits(cluster, q, empty))
    return max(candidates, key=lambda q: (_gain(cluster, q, empty, gap), -q.order), default=None)


def _gain(cluster: Cluster, request: Request, empty: Replica, gap: int) -> int:
    """Twice the tokens by which the larger of two loads shrinks if a request moves; with nothing shared, so the gap."""
    assert request.replica is not None
    return 2 * min(size_on(cluster, request, request.replica), gap - size_on(cluster, request, empty))
