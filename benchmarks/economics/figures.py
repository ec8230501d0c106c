"""Figures of runs; pure. A measured run and a simulated one have the same figures under the same names."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.economics.case import Conditions
from benchmarks.economics.observed import Look, RunObservation, ServedRequest
from simulator.replay.summary import quantiles

EXISTING = ("STARTING", "RUNNING", "DRAINING")
"""States in which a replica holds its GPU."""

Figures = dict[str, float | None]
"""Figures by name; None if there is nothing to count."""


@dataclass(frozen=True, slots=True)
class Row:
    """A figure's row in a report: its value times `scale` is in `unit`."""

    name: str
    title: str
    unit: str = ""
    scale: float = 1.0
    digits: int = 0


ROWS = (
    Row("gpu_seconds", "GPU-seconds"),
    Row("replicas", "replicas, mean", digits=2),
    Row("ttft_p50", "time to first token, p50", "ms", 1e3),
    Row("ttft_p99", "time to first token, p99", "ms", 1e3),
    Row("tpot_p50", "time per output token, p50", "ms", 1e3, 1),
    Row("tpot_p99", "time per output token, p99", "ms", 1e3, 1),
    Row("gap_p99", "between chunks, p99", "ms", 1e3),
    Row("gap_max", "between chunks, longest", "ms", 1e3),
    Row("total_p50", "completion, p50", "s", digits=1),
    Row("total_p99", "completion, p99", "s", digits=1),
    Row("preemptions", "preemptions"),
    Row("migrations", "migrations, committed"),
    Row("migrations_kv", "of these by KV"),
    Row("migrations_tokens", "of these by tokens"),
    Row("migrations_void", "migrations, without effect"),
    Row("pause_p99", "migration pause, p99", "ms", 1e3),
    Row("requests", "requests"),
    Row("failed", "requests failed"),
    Row("lag_p99", "delay of sending, p99", "ms", 1e3),
    Row("cpu", "processors busy", "%", 1e2),
)


def figures(observed: RunObservation, conditions: Conditions) -> Figures:
    """The figures of a measured run, over the time between warm-up and last arrival and the requests of that time."""
    begin, end = conditions.warmup_s, conditions.until_s
    ordered = [m for m in observed.migrations if begin <= m.at_s < end]
    committed = [m for m in ordered if m.outcome == "committed"]
    pauses = quantiles(m.pause_s for m in committed if m.pause_s is not None)
    return {
        **usage(existing(observed.looks), begin, end),
        **delays([r for r in observed.requests if begin <= r.at_s < end]),
        "gap_p99": observed.gap_s.p99 if observed.gap_s else None,
        "gap_max": observed.gap_s.max if observed.gap_s else None,
        "preemptions": _preemptions(observed.looks, end) - _preemptions(observed.looks, begin),
        "migrations": len(committed),
        "migrations_kv": sum(m.path == "kv" for m in committed),
        "migrations_tokens": sum(m.path == "tokens" for m in committed),
        "migrations_void": len(ordered) - len(committed),
        "pause_p99": pauses.p99 if pauses else None,
        "lag_p99": observed.send_lag_s.p99 if observed.send_lag_s else None,
        "cpu": observed.cpu,
    }


def usage(counts: Sequence[tuple[float, int]], begin: float, end: float) -> Figures:
    """GPU-seconds between two moments, from (second, replicas that exist) pairs."""
    seconds = integral(counts, begin, end)
    return {"gpu_seconds": seconds, "replicas": seconds / (end - begin)}


def delays(requests: Sequence[ServedRequest]) -> Figures:
    """Latencies of requests, from the time at which each was due."""
    begun = [(r, r.first_s) for r in requests if r.first_s is not None]
    first = quantiles(first_s - r.at_s for r, first_s in begun)
    # The mean over a request's tokens, since the simulator has no times of single tokens.
    further = quantiles((r.ended_s - first_s) / (r.output - 1) for r, first_s in begun if r.whole and r.output > 1)
    total = quantiles(r.ended_s - r.at_s for r in requests if r.whole)
    return {
        "ttft_p50": first.p50 if first else None,
        "ttft_p99": first.p99 if first else None,
        "tpot_p50": further.p50 if further else None,
        "tpot_p99": further.p99 if further else None,
        "total_p50": total.p50 if total else None,
        "total_p99": total.p99 if total else None,
        "requests": len(requests),
        "failed": sum(not r.whole for r in requests),
    }


def integral(counts: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """The area under (second, count) steps from `begin` to `end`.

    A count is valid until the next one; the first one is also valid before its time. Raises `ValueError` without steps.
    """
    if not counts:
        raise ValueError("nothing was counted")
    steps = [(min(counts[0][0], begin), counts[0][1]), *counts[1:], (end, 0)]
    return sum(count * max(0.0, min(until, end) - max(at, begin)) for (at, count), (until, _) in pairwise(steps))


def existing(looks: Iterable[Look]) -> list[tuple[float, int]]:
    """(second, replicas that hold a GPU) for each look with an answer."""
    return [
        (look.at_s, sum(state in EXISTING for state in look.states.values()))
        for look in looks
        if look.states is not None
    ]


def startups(looks: Iterable[Look]) -> list[float]:
    """Start-up times in seconds: from a replica's first look to the first look that has it running."""
    since: dict[str, float] = {}
    took = []
    for look in looks:
        for replica, state in (look.states or {}).items():
            if state == "STARTING":
                since.setdefault(replica, look.at_s)
            elif state == "RUNNING" and replica in since:
                took.append(look.at_s - since.pop(replica))
    return took


def _preemptions(looks: Sequence[Look], at_s: float) -> int:
    """The number of preemptions until `at_s`."""
    return max((look.preemptions for look in looks if look.at_s <= at_s), default=0)
