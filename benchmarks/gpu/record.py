"""The record of a run on one machine: lines of JSON, each a row of one type.

The first row is the origin of all others. The page is made of a record alone, so a row has everything that its table
prints; `conditions` are those of its servers. Raw samples lie beside the record, in a file of their own.
"""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, TypeAdapter


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, the minimum and the maximum of `n` values; None: not recorded."""

    n: int
    median: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, values: Iterable[float]) -> Self | None:
        """The spread of values, rounded to four digits; None if there are none."""
        found = list(values)
        if not found:
            return None
        return cls(len(found), *(float(f"{edge(found):.4g}") for edge in (statistics.median, min, max)))


@dataclass(frozen=True, slots=True)
class OriginRow:
    """The machine and the version of everything below. `machine` has one line per GPU, or one for the CPU."""

    date: str
    commit: str
    device: Literal["cpu", "cuda"]
    machine: Sequence[str]
    software: str
    kind: Literal["origin"] = "origin"


@dataclass(frozen=True, slots=True)
class PartRow:
    """The end of a part: `whole`, or `cut` if a step ended before its last repetition, or `failed`."""

    name: str
    outcome: Literal["whole", "cut", "failed"]
    seconds: float
    kind: Literal["part"] = "part"


@dataclass(frozen=True, slots=True)
class FailureRow:
    """An error that ended a step or a part."""

    part: str
    step: str
    error: str
    kind: Literal["failure"] = "failure"


@dataclass(frozen=True, slots=True)
class NoteRow:
    """A remark, added by hand, on a section of the page."""

    section: str
    text: str
    kind: Literal["note"] = "note"


@dataclass(frozen=True, slots=True)
class StartRow:
    """The start of servers, all at once, to the last one's first healthy answer."""

    servers: str
    conditions: str
    seconds: float
    kind: Literal["start"] = "start"


@dataclass(frozen=True, slots=True)
class SuiteRow:
    """The project's own tests for GPUs; `summary` is pytest's last line."""

    command: str
    summary: str
    skipped: Sequence[str]
    passed: bool
    kind: Literal["suite"] = "suite"


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage of a move without an engine, in GB/s of the blocks' bytes. `slot_mib` is 0 for a copy of 1 GiB."""

    stage: str
    slot_mib: int
    gb_s: Spread
    kind: Literal["stage"] = "stage"


@dataclass(frozen=True, slots=True)
class NcclRow:
    """A check of NCCL, and its result."""

    check: str
    result: str
    kind: Literal["nccl"] = "nccl"


@dataclass(frozen=True, slots=True)
class MovesRow:
    """Forced moves of one kind with nothing else running: the pause at the client, and the figures of their records.

    Times are milliseconds; `gaps` are multiples of the stream's median gap. `asked` counts all moves; `figures` are of
    those that used the ordered path.
    """

    conditions: str
    transport: str
    mode: str
    context: int
    asked: int
    figures: Mapping[str, Spread]
    failures: Sequence[str] = ()
    kind: Literal["moves"] = "moves"


@dataclass(frozen=True, slots=True)
class NeighbourRow:
    """Gaps of other streams on one replica during a move, over those without: ratios of each round. Times are ms."""

    conditions: str
    transport: str
    mode: str
    role: str
    context: int
    per_replica: int
    median: Spread
    p99: Spread
    quiet_ms: Spread
    quiet_p99_ms: Spread
    kind: Literal["neighbours"] = "neighbours"


@dataclass(frozen=True, slots=True)
class ServingRow:
    """One figure of serving `streams` at once: Mell, vLLM's server, and the ratios Mell / vLLM of the pairs."""

    conditions: str
    streams: int
    prompt: int
    output: int
    figure: str
    mell: Spread
    bare: Spread
    ratio: Spread
    kind: Literal["serving"] = "serving"


@dataclass(frozen=True, slots=True)
class EqualityRow:
    """Two runs of the same prompts: the number of streams with equal texts, of those that ran whole in both."""

    conditions: str
    sampling: Literal["greedy", "seeded"]
    server: str
    first: str
    second: str
    streams: int
    equal: int
    moved: int | None = None
    kind: Literal["equality"] = "equality"


@dataclass(frozen=True, slots=True)
class FaultRow:
    """A drain or a kill -9 of a replica while streams run.

    `held` are its streams, `broken` those of all that did not end with their last token. `empty_s` is the time until
    the replica has no request; None: not within the part.
    """

    conditions: str
    fault: Literal["drain", "kill"]
    streams: int
    held: int | None
    broken: Sequence[str]
    longest_gap_s: float | None
    empty_s: float | None
    outcomes: Mapping[str, int]
    kind: Literal["fault"] = "fault"


@dataclass(frozen=True, slots=True)
class ReplacementRow:
    """The time from a fault until as many replicas run as before it; None: not within the part."""

    conditions: str
    fault: Literal["drain", "kill"]
    seconds: float | None
    kind: Literal["replacement"] = "replacement"


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """The memory of one process, or of the whole device, in MiB. `slots_mib` is the part of its staging slots."""

    conditions: str
    owner: str
    what: str
    mib: float
    slots_mib: float = 0.0
    kind: Literal["memory"] = "memory"


Row = (
    OriginRow
    | PartRow
    | FailureRow
    | NoteRow
    | StartRow
    | SuiteRow
    | StageRow
    | NcclRow
    | MovesRow
    | NeighbourRow
    | ServingRow
    | EqualityRow
    | FaultRow
    | ReplacementRow
    | MemoryRow
)
_ROW: TypeAdapter[Row] = TypeAdapter(Annotated[Row, Field(discriminator="kind")])
R = TypeVar("R")


class OtherOrigin(Exception):
    """A record cannot be continued: it is of another machine, device or commit."""


class RunRecord:
    """The rows of a run, in memory and, unless `path` is None, in a file that another run continues."""

    def __init__(self, rows: Iterable[Row], path: Path | None = None) -> None:
        self.rows = list(rows)
        self._path = path

    @classmethod
    def read(cls, path: Path) -> Self:
        """The record of a file. An incomplete last line is ignored.

        Raises:
            pydantic.ValidationError: another line is no row.
        """
        return cls([_ROW.validate_json(line) for line in path.read_text().split("\n")[:-1]])

    @classmethod
    def resume(cls, path: Path, origin: OriginRow) -> Self:
        """The record at `path`, begun with `origin` if there is none. Raises OtherOrigin."""
        if not path.exists():
            begun = cls([], path)
            begun.add(origin)
            return begun
        found = cls.read(path)
        if (
            (was := found.origin).commit != origin.commit
            or was.device != origin.device
            or was.machine != origin.machine
        ):
            raise OtherOrigin(f"{path} is of commit {was.commit} on {was.device} ({', '.join(was.machine)})")
        path.write_text("".join(_line(row) for row in found.rows))
        return cls(found.rows, path)

    @property
    def origin(self) -> OriginRow:
        """The first row. Raises ValueError if it is of another type."""
        if self.rows and isinstance(first := self.rows[0], OriginRow):
            return first
        raise ValueError("a record begins with its origin")

    def add(self, row: Row) -> None:
        """Append a row."""
        self.rows.append(row)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(_line(row))

    def of(self, kind: type[R]) -> list[R]:
        """The rows of one type, in their order."""
        return [row for row in self.rows if isinstance(row, kind)]

    @property
    def done(self) -> set[str]:
        """The parts that need not run again."""
        return {row.name for row in self.of(PartRow) if row.outcome != "failed"}


def _line(row: Row) -> str:
    values: dict[str, Any] = asdict(row)
    return json.dumps({"kind": values.pop("kind"), **values}) + "\n"
