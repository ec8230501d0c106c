"""`mell timeline`: migrations as Chrome's trace events, the format of `ray timeline`; pure.

Every source replica is a process of the trace, with as many threads as it had migrations at a time. A migration spans
from its order to the first new token at the target, and the pause is the end of it, from the freeze on. Times are in
microseconds since 1970, as Ray's are, so that both can stand in one trace.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from app.cli.views.migrations import name_of
from app.client.documents import Records
from migration.record import MigrationRecord, Outcome

Event = dict[str, Any]

_FIRST_PROCESS = 1_000_000
"""Ray counts its nodes from 0, and these are beside them."""


def timeline(records: Records) -> list[Event]:
    """The events of all migrations that have `ended`, whatever the order of the records."""
    shown = sorted(ended(records), key=lambda r: (r.started_at, r.id))
    events: list[Event] = []
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
    """Those that have ended, and of which somebody has told how long they took."""
    return tuple(record for record in records if _seconds(record) is not None)


def _seconds(record: MigrationRecord) -> float | None:
    """How long it took as far as anybody has told; None if it has not ended, or nobody has."""
    if record.outcome is None:
        return None
    return record.whole_s if record.whole_s is not None else record.duration_s


def _lanes(records: Sequence[MigrationRecord]) -> list[int]:
    """A thread for each, in the order of their beginnings, so that no two on one thread overlap."""
    until: list[float] = []
    lanes = []
    for record in records:
        lane = next((i for i, end in enumerate(until) if end <= record.started_at), len(until))
        until[lane : lane + 1] = [record.started_at + (_seconds(record) or 0.0)]
        lanes.append(lane)
    return lanes


def _spans(record: MigrationRecord, process: int, thread: int) -> Iterable[Event]:
    seconds = _seconds(record) or 0.0

    def span(name: str, begin_s: float, lasting_s: float, colour: str, **told: Any) -> Event:
        place = {"pid": process, "tid": thread, "ts": round(begin_s * 1e6), "dur": round(lasting_s * 1e6)}
        return {"ph": "X", "cat": "migration", "name": name, "cname": colour, "args": told} | place

    colour = "good" if record.outcome is Outcome.COMMITTED else "terrible"
    told = {name: value for name, value in record.to_json().items() if value is not None}
    yield span(f"{name_of(record)} to {record.target}", record.started_at, seconds, colour, **told)
    if record.duration_s is not None and record.pause_s is not None:
        frozen_s = record.duration_s - record.pause_s
        yield span("pause", record.started_at + frozen_s, seconds - frozen_s, "bad", tokens=record.tokens)


def _meta(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
