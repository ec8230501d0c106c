"""Summary statistics of a replay's measurements; pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simulator.outcome.statistics import quantile
from simulator.replay.measurements import RUNNING, ReplaySample
from simulator.replay.stream import Record, StreamFault, StreamOutcome


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution in five numbers."""

    count: int
    mean: float
    p50: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Tally:
    """The number of faults of one kind, and the message of the first."""

    kind: str
    count: int
    first_message: str


@dataclass(frozen=True, slots=True)
class MigrationGroup:
    """The migrations with one path and one outcome."""

    path: str
    outcome: str
    count: int
    bytes: int
    pause_s: Distribution | None


@dataclass(frozen=True, slots=True)
class Summary:
    """The statistics of a replay; a distribution is None without measurements.

    `gap_s` is the time between two SSE chunks of a stream; a chunk has `tokens_per_chunk` tokens on average.
    `send_lag_s` is the delay in sending a request: unless it is small against `ttft_s`, the client is the bottleneck
    and the replay is not open loop.
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
    ttft_s: Distribution | None
    gap_s: Distribution | None
    total_s: Distribution | None
    send_lag_s: Distribution | None
    running_replicas: Distribution | None
    kv_used_percent: Distribution | None


def quantiles(values: Iterable[float]) -> Distribution | None:
    """The distribution of the values, None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    mean = sum(ordered) / len(ordered)
    return Distribution(len(ordered), mean, quantile(ordered, 0.5), quantile(ordered, 0.99), ordered[-1])


def summarize(records: Sequence[Record], samples: Sequence[ReplaySample]) -> Summary:
    """The statistics of a replay from its requests and samples."""
    outcomes = Counter(record.outcome for record in records)
    tokens = sum(_tokens(record) for record in records)
    duration_s = _duration_s(records)
    replicas = [sample.replicas for sample in samples if sample.replicas is not None]
    return Summary(
        requests=len(records),
        ok=outcomes[StreamOutcome.OK],
        broken=outcomes[StreamOutcome.BROKEN],
        failed=outcomes[StreamOutcome.FAILED],
        cancelled=outcomes[StreamOutcome.CANCELLED],
        duration_s=duration_s,
        requests_per_s=outcomes[StreamOutcome.OK] / duration_s if duration_s else 0.0,
        output_tokens=tokens,
        output_tokens_per_s=tokens / duration_s if duration_s else 0.0,
        tokens_per_chunk=_tokens_per_chunk(records),
        **{name: quantiles(values) for name, values in _latencies(records).items()},
        send_lag_s=quantiles(record.sent_s - record.request.at_s for record in records),
        running_replicas=quantiles(sum(r.state == RUNNING for r in listed) for listed in replicas),
        kv_used_percent=quantiles(r.used_percent for listed in replicas for r in listed if r.state == RUNNING),
    )


def percentiles(records: Sequence[Record]) -> dict[str, list[float] | None]:
    """The 0, 1, ... 100 % quantiles of each latency, in seconds; None without measurements."""
    ordered = {name: sorted(values) for name, values in _latencies(records).items()}
    return {name: [quantile(all_, n / 100) for n in range(101)] if all_ else None for name, all_ in ordered.items()}


def _latencies(records: Sequence[Record]) -> dict[str, list[float]]:
    return {
        "ttft_s": [record.ttft_s for record in records if record.ttft_s is not None],
        "gap_s": [gap for record in records for gap in record.gaps_s],
        "total_s": [r.ended_s - r.sent_s for r in records if r.outcome is StreamOutcome.OK],
    }


def _tokens(record: Record) -> int:
    # Without the endpoint's count, every chunk has at least one token.
    return len(record.chunks_s) if record.tokens is None else record.tokens


def _duration_s(records: Sequence[Record]) -> float:
    if not records:
        return 0.0
    return max(record.ended_s for record in records) - min(record.sent_s for record in records)


def _tokens_per_chunk(records: Sequence[Record]) -> float | None:
    counted = [record for record in records if record.tokens is not None]
    chunks = sum(len(record.chunks_s) for record in counted)
    return sum(_tokens(record) for record in counted) / chunks if chunks else None


def tally(faults: Iterable[StreamFault]) -> tuple[Tally, ...]:
    """Faults by kind, most frequent first."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for fault in faults:
        counts[fault.kind] += 1
        first.setdefault(fault.kind, fault.message)
    return tuple(Tally(kind, count, first[kind]) for kind, count in counts.most_common())


def group_migrations(items: Sequence[Mapping[str, Any]]) -> tuple[MigrationGroup, ...]:
    """Migrations by path and outcome; a running migration counts by its state."""
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
