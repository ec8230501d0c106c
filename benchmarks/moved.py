"""One measured migration: a stream that is moved while a client reads it."""

import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.admin import Admin, Opened
from benchmarks.load import Stream

CHUNKS_BEFORE = 20
ON_ITS_WAY_S = 0.05
"""A chunk that left the source before the migration ended may be that late at the client."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to migrate: the path that is asked for, and the settings of the server that serves it."""

    name: str
    path: str
    stop_and_copy: bool = False


MODES = (Mode("pre-copy", "kv"), Mode("stop-and-copy", "kv", stop_and_copy=True), Mode("tokens", "tokens"))
STOP_AND_COPY = {"max_rounds": 0, "final_blocks": 0}


@dataclass(frozen=True, slots=True)
class Sample:
    """One migration at the client (`pause_s`, and `gap_s`: the stream's median gap), and as its record tells it."""

    mode: str
    asked: str
    context: int
    pause_s: float
    gap_s: float
    resumed_at: float
    record: dict[str, Any]

    @property
    def multiple(self) -> float:
        """The pause in median gaps of the same stream."""
        return self.pause_s / self.gap_s

    @property
    def committed(self) -> bool:
        """Whether the request moved at all."""
        return bool(self.record["outcome"] == "committed")

    @property
    def as_asked(self) -> bool:
        """Whether it moved by the path that was asked for."""
        return self.committed and bool(self.record["path"] == self.asked)


async def move_one(admin: Admin, port: int, mode: Mode, context: int, output: int, label: str) -> tuple[Sample, Stream]:
    """Open a stream after a prompt of `context` unseen tokens, move it after a few chunks, read it to the end."""
    opened = Opened(port, label, context, output)
    try:
        await opened.reached(CHUNKS_BEFORE)
        migration = await admin.move(label, mode.path)
        stream = await opened.whole()
    finally:
        await opened.leave()
    record = await admin.record(migration)
    began, ended = find_pause(stream, record)
    gap = statistics.median(stream.gaps)
    return Sample(mode.name, mode.path, context, ended - began, gap, ended, record), stream


def find_pause(stream: Stream, record: dict[str, Any]) -> tuple[float, float]:
    """From the source's last token to the target's first, as Unix times: the largest gap around the migration.

    It began before the migration ended. It may end later than that: the source lets go once the target has
    accepted the request, and on the token path the target computes the whole context only then. A gap that
    copying caused before the freeze is taken for the pause when it is larger: the figure is an upper bound.
    """
    first, last = record["started_at"], record["started_at"] + record["duration_s"] + ON_ITS_WAY_S
    around = [(a, b) for a, b in stream.spans() if b >= first and a <= last]
    if not around:
        raise RuntimeError(f"the stream was over before migration {record['id']} began")
    return max(around, key=lambda span: span[1] - span[0])
