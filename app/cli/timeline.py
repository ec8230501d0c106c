"""`mell timeline`: migrations as Chrome's trace events, the format of `ray timeline`.

Every source replica is a process of the trace, with as many threads as it had concurrent migrations. A migration's span
lasts from its order to the first new token at the target; the pause, from the freeze on, is its last part. Times are in
microseconds since 1970, as Ray's are, so that both can be in one trace.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from app.cli.endpoint import MellEndpoint
from app.cli.errors import Failed
from app.cli.migrations import request_name
from app.cli.terminal import Terminal
from app.client.documents import Records
from migration.protocol.record import MigrationRecord, Outcome

TraceEvent = dict[str, Any]

_FIRST_PROCESS = 1_000_000
"""Ray numbers its nodes from 0; Mell's process ids must differ."""


def timeline(endpoint: MellEndpoint, terminal: Terminal, file: Path) -> None:
    """Write all listed migrations to a file for trace viewers."""
    records = ended(endpoint.migrations())
    try:
        file.write_text(json.dumps(trace_events(records)) + "\n")
    except OSError as error:
        raise Failed(f"{file} cannot be written: {error.strerror}") from error
    terminal.write({"file": str(file), "migrations": len(records)})
    terminal.show(f"{len(records)} migrations in {file}; Perfetto and chrome://tracing open it")


def trace_events(records: Records) -> list[TraceEvent]:
    """The events of all migrations that have `ended`, for records in any order; pure."""
    shown = sorted(ended(records), key=lambda r: (r.started_at, r.id))
    events: list[TraceEvent] = []
    for process, source in enumerate(sorted({record.source for record in shown}), _FIRST_PROCESS):
        here = [record for record in shown if record.source == source]
        events.append(_meta("process_name", process, 0, f"Mell: moved away from {source}"))
        lanes = _lanes(here)
        for thread in range(max(lanes) + 1):
            events.append(_meta("thread_name", process, thread, f"migration {thread + 1}"))
        for record, thread in zip(here, lanes, strict=True):
            events += _spans(record, process, thread)
    return events


def ended(records: Records) -> Records:
    """The ended migrations of known duration."""
    return tuple(record for record in records if _seconds(record) is not None)


def _seconds(record: MigrationRecord) -> float | None:
    """The duration of an ended migration as far as it is known, else None."""
    if record.outcome is None:
        return None
    return record.whole_s if record.whole_s is not None else record.duration_s


def _lanes(records: Sequence[MigrationRecord]) -> list[int]:
    """One thread number per record, sorted by start, such that migrations on one thread do not overlap."""
    until: list[float] = []
    lanes = []
    for record in records:
        lane = next((i for i, end in enumerate(until) if end <= record.started_at), len(until))
        until[lane : lane + 1] = [record.started_at + (_seconds(record) or 0.0)]
        lanes.append(lane)
    return lanes


def _spans(record: MigrationRecord, process: int, thread: int) -> Iterable[TraceEvent]:
    seconds = _seconds(record) or 0.0

    def span(name: str, begin_s: float, lasting_s: float, colour: str, **arguments: Any) -> TraceEvent:
        place = {"pid": process, "tid": thread, "ts": round(begin_s * 1e6), "dur": round(lasting_s * 1e6)}
        return {"ph": "X", "cat": "migration", "name": name, "cname": colour, "args": arguments} | place

    colour = "good" if record.outcome is Outcome.COMMITTED else "terrible"
    members = {name: value for name, value in record.to_json().items() if value is not None}
    yield span(f"{request_name(record)} to {record.target}", record.started_at, seconds, colour, **members)
    if record.duration_s is not None and record.pause_s is not None:
        frozen_s = record.duration_s - record.pause_s
        yield span("pause", record.started_at + frozen_s, seconds - frozen_s, "bad", tokens=record.tokens)


def _meta(kind: str, process: int, thread: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
