"""What the records of a replay amount to; pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.replay.state import RUNNING, Sample
from app.replay.stream import Fault, Outcome, Record


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution in five numbers."""

    count: int
    mean: float
    p50: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Tally:
    """How often one kind of fault was seen, and what the first one said."""

    kind: str
    count: int
    first_message: str


@dataclass(frozen=True, slots=True)
class MigrationGroup:
    """The migrations that took one path to one outcome."""

    path: str
    outcome: str
    count: int
    bytes: int
    pause_s: Quantiles | None


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of a replay; a distribution is None where nothing was measured.

    `gap_s` is the time between two SSE chunks of a stream, however many tokens a chunk carries
    (`tokens_per_chunk` on average). `send_lag_s` is how late requests were sent: when it is not small
    against `ttft_s`, the client was the bottleneck and the replay is not open loop.
    """

    requests: int
    ok: int
    broken: int
    failed: int
    cancelled: int
    duration_s: float
    requests_per_s: float
    output_tokens: int
    output_tokens_per_s: float
    tokens_per_chunk: float | None
    ttft_s: Quantiles | None
    gap_s: Quantiles | None
    total_s: Quantiles | None
    send_lag_s: Quantiles | None
    running_replicas: Quantiles | None
    kv_used_percent: Quantiles | None


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of a sorted, non-empty sequence lies, interpolated between neighbours."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def quantiles(values: Iterable[float]) -> Quantiles | None:
    """The distribution of some values, None if there are none."""
    ordered = sorted(values)
    if not ordered:
        return None
    mean = sum(ordered) / len(ordered)
    return Quantiles(len(ordered), mean, quantile(ordered, 0.5), quantile(ordered, 0.99), ordered[-1])


def summarize(records: Sequence[Record], samples: Sequence[Sample]) -> Summary:
    """The numbers of a replay from its requests and from what was seen of the replicas."""
    outcomes = Counter(record.outcome for record in records)
    tokens = sum(_tokens(record) for record in records)
    duration_s = _duration_s(records)
    replicas = [sample.replicas for sample in samples if sample.replicas is not None]
    return Summary(
        requests=len(records),
        ok=outcomes[Outcome.OK],
        broken=outcomes[Outcome.BROKEN],
        failed=outcomes[Outcome.FAILED],
        cancelled=outcomes[Outcome.CANCELLED],
        duration_s=duration_s,
        requests_per_s=outcomes[Outcome.OK] / duration_s if duration_s else 0.0,
        output_tokens=tokens,
        output_tokens_per_s=tokens / duration_s if duration_s else 0.0,
        tokens_per_chunk=_tokens_per_chunk(records),
        **{name: quantiles(values) for name, values in _latencies(records).items()},
        send_lag_s=quantiles(record.sent_s - record.arrival.at_s for record in records),
        running_replicas=quantiles(sum(one.state == RUNNING for one in all_) for all_ in replicas),
        kv_used_percent=quantiles(one.used_percent for all_ in replicas for one in all_ if one.state == RUNNING),
    )


def percentiles(records: Sequence[Record]) -> dict[str, list[float] | None]:
    """The values, in seconds, below which 0, 1, ... 100 % of each latency lie; None where nothing was measured."""
    ordered = {name: sorted(values) for name, values in _latencies(records).items()}
    return {name: [quantile(all_, n / 100) for n in range(101)] if all_ else None for name, all_ in ordered.items()}


def _latencies(records: Sequence[Record]) -> dict[str, list[float]]:
    return {
        "ttft_s": [record.ttft_s for record in records if record.ttft_s is not None],
        "gap_s": [gap for record in records for gap in record.gaps_s],
        "total_s": [r.ended_s - r.sent_s for r in records if r.outcome is Outcome.OK],
    }


def _tokens(record: Record) -> int:
    # Without the endpoint's count, a chunk is a token at least.
    return len(record.chunks_s) if record.tokens is None else record.tokens


def _duration_s(records: Sequence[Record]) -> float:
    if not records:
        return 0.0
    return max(record.ended_s for record in records) - min(record.sent_s for record in records)


def _tokens_per_chunk(records: Sequence[Record]) -> float | None:
    counted = [record for record in records if record.tokens is not None]
    chunks = sum(len(record.chunks_s) for record in counted)
    return sum(_tokens(record) for record in counted) / chunks if chunks else None


def tally(faults: Iterable[Fault]) -> tuple[Tally, ...]:
    """Faults by kind, the most frequent first."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for fault in faults:
        counts[fault.kind] += 1
        first.setdefault(fault.kind, fault.message)
    return tuple(Tally(kind, count, first[kind]) for kind, count in counts.most_common())


def group_migrations(items: Sequence[Mapping[str, Any]]) -> tuple[MigrationGroup, ...]:
    """Migrations by path and outcome; one still under way has its state for an outcome."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for item in items:
        key = (str(item.get("path")), str(item.get("outcome") or item.get("state")))
        groups.setdefault(key, []).append(item)
    return tuple(_group(*key, members) for key, members in sorted(groups.items()))


def _group(path: str, outcome: str, members: Sequence[Mapping[str, Any]]) -> MigrationGroup:
    return MigrationGroup(
        path=path,
        outcome=outcome,
        count=len(members),
        bytes=sum(item.get("bytes") or 0 for item in members),
        pause_s=quantiles(pause for item in members if (pause := item.get("pause_s")) is not None),
    )
