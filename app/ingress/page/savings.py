"""One sentence on the page: the replicas that Mell saves at this moment, and why no more and no fewer run.

The comparison is with worst-fit placement of the same KV caches, see `app.ingress.page.charts`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from policies.decision.level.scaling import ScaleDownBlock
from policies.model import ReplicaState
from policies.plan import Reason

_RECENT_S = 600.0
"""An emptied replica is mentioned for this time."""

_WHY_EMPTIED: Mapping[str, str] = {
    Reason.DRAIN: "its requests fitted on the others",
    Reason.EVACUATE: "it was stopping",
}


def savings(
    state: Mapping[str, Any], migrations: Sequence[Mapping[str, Any]], worst_fit: int, now: float
) -> str | None:
    """The sentence; None unless Mell acts, and without a running replica.

    `migrations` are the records of `/mell/migrations`, newest first; `worst_fit` is the number of replicas that
    worst-fit placement of the same requests takes. `now` is in seconds since 1970.
    """
    replicas = [replica for replica in state["replicas"] if replica["state"] == ReplicaState.RUNNING]
    if state.get("mode") != "act" or not replicas:
        return None
    requests = len({request["id"] for replica in replicas for request in replica["requests"]})
    served = f"{_count(len(replicas), 'replica')} {'serves' if len(replicas) == 1 else 'serve'}"
    closed = (ReplicaState.STOPPED, ReplicaState.ASLEEP)
    existing = sum(replica["state"] not in closed for replica in state["replicas"])
    saved = worst_fit - existing
    why = [part for part in (_emptied(state, migrations, now), _kept(state.get("scaling"))) if part]
    if not requests:
        return _sentence(f"{served} no requests", why)
    head = f"{served} {_count(requests, 'request')}"
    if saved > 0:
        return _sentence(f"{head}, which would take {worst_fit} replicas if each stayed on the emptiest one", why)
    return _sentence(f"{head}; without moves these would take no more replicas now", why)


def _sentence(head: str, why: Sequence[str]) -> str:
    return "; ".join([head, *why]) + "."


def _emptied(state: Mapping[str, Any], migrations: Sequence[Mapping[str, Any]], now: float) -> str | None:
    """The newest replica that requests have left by moves and that is gone."""
    present = {replica["id"] for replica in state["replicas"] if replica["state"] != ReplicaState.STOPPED}
    for record in migrations:
        ago_s = now - record["started_at"] - (record["duration_s"] or 0.0)
        if ago_s > _RECENT_S:
            return None
        if record["outcome"] != "committed" or record["source"] in present or record["reason"] not in _WHY_EMPTIED:
            continue
        why = _WHY_EMPTIED[record["reason"]]
        return f"the last request left {record['source']} {_age(ago_s)} ago, because {why}"
    return None


def _kept(scaling: Mapping[str, Any] | None) -> str | None:
    """The reason why no further replica closes."""
    if scaling is None:
        return None
    linger_s = scaling["linger_left_s"]
    least = _count(scaling["min_replicas"], "replica")
    free = (
        f"{scaling['free_replicas']:.1f} replicas are free, and {scaling['reserve_replicas']:.1f} are kept in reserve"
    )
    reasons: Mapping[str | None, str] = {
        None: f"{_count(scaling['closed'], 'replica')} will close",
        ScaleDownBlock.MINIMUM: f"no replica closes, because the settings keep at least {least}",
        ScaleDownBlock.STARTING: "no replica closes while another one starts",
        ScaleDownBlock.PREFILLS: "no replica closes: on fewer, prefills would lengthen too many steps",
        ScaleDownBlock.RESERVE: f"no replica closes: {free}",
        ScaleDownBlock.LINGER: f"an empty replica closes in {linger_s or 0:.0f} s, unless requests come",
        ScaleDownBlock.IN_USE: "no replica closes: none is empty, and none can be emptied within the limits of moves",
    }
    return reasons.get(scaling["kept"])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def _age(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s" if seconds < 99.5 else f"{seconds / 60:.0f} min"
