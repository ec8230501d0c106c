"""One measured migration of a stream that a client reads meanwhile."""

import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.instruments.admin import Admin, OpenedStream
from benchmarks.load import TimedStream

CHUNKS_BEFORE = 20
IN_TRANSIT_S = 0.05
"""The largest delay between the source's sending of a chunk and its arrival at the client."""


@dataclass(frozen=True, slots=True)
class MoveMode:
    """A way to migrate: the path of the order, and whether the server needs the settings `STOP_AND_COPY`."""

    name: str
    path: str
    stop_and_copy: bool = False


MODES = (MoveMode("pre-copy", "kv"), MoveMode("stop-and-copy", "kv", stop_and_copy=True), MoveMode("tokens", "tokens"))
STOP_AND_COPY = {"max_rounds": 0, "final_blocks": 0}


@dataclass(frozen=True, slots=True)
class MoveSample:
    """One migration as the client measured it, and its record.

    `asked` is the path of the order, `gap_s` the stream's median gap, `resumed_at` the end of the pause in Unix time.
    `handed_s` is the gap between the last token of the source and the first of the target, which a larger gap during
    the copying does not hide; None if some chunk of the stream has several tokens.
    """

    mode: str
    asked: str
    context: int
    pause_s: float
    gap_s: float
    resumed_at: float
    record: dict[str, Any]
    handed_s: float | None = None

    @property
    def multiple(self) -> float:
        """The pause in median gaps of the same stream."""
        return self.pause_s / self.gap_s

    @property
    def committed(self) -> bool:
        """True if the request moved, by any path."""
        return bool(self.record["outcome"] == "committed")

    @property
    def as_asked(self) -> bool:
        """True if the request moved by the path of the order."""
        return self.committed and bool(self.record["path"] == self.asked)


async def move_one(
    admin: Admin, port: int, mode: MoveMode, context: int, output: int, label: str
) -> tuple[MoveSample, TimedStream]:
    """Open a stream with an uncached prompt of `context` tokens, move it after a few chunks, read it to the end.

    Raises:
        RuntimeError: the order was refused, or the stream ended too early or with an error.
        TimeoutError: the migration has no outcome in time.
    """
    opened = OpenedStream(port, label, context, output)
    try:
        await opened.reached(CHUNKS_BEFORE)
        migration = await admin.move(label, mode.path)
        stream = await opened.whole()
    finally:
        await opened.leave()
    record = await admin.record(migration)
    began, ended = find_pause(stream, record)
    gap = statistics.median(stream.gaps)
    handed = handed_over(stream, record["tokens"], context, output)
    return MoveSample(mode.name, mode.path, context, ended - began, gap, ended, record, handed), stream


def handed_over(stream: TimedStream, frozen_at: int | None, context: int, output: int) -> float | None:
    """The gap behind the last token of a context of `frozen_at` tokens; None if chunks and tokens do not correspond."""
    if frozen_at is None or len(stream.arrivals) != output or not context < frozen_at < context + output:
        return None
    return stream.gaps[frozen_at - context - 1]


def find_pause(stream: TimedStream, record: dict[str, Any]) -> tuple[float, float]:
    """The pause in Unix times, from the source's last chunk to the target's first: the largest gap at the migration.

    The pause begins before the end of the migration and may end after it: the source commits when the target has
    accepted the request, and on the token path the target computes the whole context only then. A larger gap before
    the freeze, caused by the copying, is mistaken for the pause: the figure is an upper bound.

    Raises:
        RuntimeError: the stream ended before the migration began.
    """
    first, last = record["started_at"], record["started_at"] + record["duration_s"] + IN_TRANSIT_S
    around = [(a, b) for a, b in stream.spans() if b >= first and a <= last]
    if not around:
        raise RuntimeError(f"the stream ended before migration {record['id']} began")
    return max(around, key=lambda span: span[1] - span[0])
