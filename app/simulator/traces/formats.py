"""The known formats of traces, by the names of their columns.

Names are compared without case, spaces and punctuation: `Request tokens` is `requesttokens`. A file with a time, a
prompt and an output by any of the names below is read, whoever wrote it; the formats give it a name and the unit of
its times where these are relative.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from app.simulator.traces.times import TimeUnit


class TraceColumn(StrEnum):
    """The columns that are read, in the order in which rows have them."""

    TIME = "time"
    PROMPT = "prompt"
    OUTPUT = "output"
    NAMES = "hash_ids"
    CLASS = "class"
    SESSION = "session"
    THINK = "think_s"
    DELAY = "delay"
    ERROR = "error"


_ALIASES: dict[TraceColumn, tuple[str, ...]] = {
    TraceColumn.TIME: (
        *("arrivals", "arrivedat", "arrivaltimestamp", "arrivaltime", "arrival", "arrivalms", "arrivalus", "arrivalns"),
        *("timestamp", "timestamps", "timestampms", "timestampus", "timestampns", "starttimes", "starttime"),
        *("requesttime", "requesttimestamp", "createdat", "time", "times", "ts", "datetime"),
    ),
    TraceColumn.PROMPT: (
        *("prompttokens", "contexttokens", "requesttokens", "inputlength", "inputlens", "inputtokens"),
        *(
            "numprefilltokens",
            "promptsize",
            "promptlen",
            "promptlength",
            "inputlen",
            "prefilltokens",
            "numprompttokens",
        ),
        *("numinputtokens", "isl"),
    ),
    TraceColumn.OUTPUT: (
        *("outputtokens", "generatedtokens", "responsetokens", "outputlength", "outputlens", "completiontokens"),
        *("numdecodetokens", "tokensize", "outputlen", "decodetokens", "numoutputtokens", "generationtokens", "osl"),
    ),
    TraceColumn.NAMES: ("hashids",),
    TraceColumn.CLASS: ("class",),
    TraceColumn.SESSION: ("session",),
    TraceColumn.THINK: ("thinks",),
    TraceColumn.DELAY: ("delay",),
    TraceColumn.ERROR: ("errors", "error"),
}
"""The names of every column, in the order of preference."""

_OPTIONAL = {
    TraceColumn.NAMES: "hash_ids",
    TraceColumn.CLASS: "class",
    TraceColumn.SESSION: "session",
    TraceColumn.THINK: "think_s",
    TraceColumn.DELAY: "delay",
    TraceColumn.ERROR: "error",
}
"""The names of members that the first object of a file may lack."""

TRACE_HELP = (
    "a trace: CSV or JSON lines, perhaps compressed (gz, zst, xz, bz2), in Mell's format "
    "(arrival_s,prompt_tokens,output_tokens) or that of Azure, BurstGPT, Mooncake, Qwen-Bailian, ServeGen, vidur, "
    "splitwise-sim, aiperf or vllm bench serve"
)
"""The help for options that take a trace."""

NEEDED = (TraceColumn.TIME, TraceColumn.PROMPT, TraceColumn.OUTPUT)
"""The columns of every trace."""


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """A format: its columns by their plain names, further columns that others lack, the unit of its times.

    With `is_sparse`, seconds are whole and may be far apart, so that values do not show another unit.
    """

    name: str
    columns: tuple[str, str, str]
    marks: tuple[str, ...] = ()
    unit: TimeUnit = TimeUnit.SECONDS
    is_sparse: bool = False


AIPERF = TraceFormat("aiperf", ("timestamp", "inputlength", "outputlength"), ("sessionid",), unit=TimeUnit.MILLISECONDS)
"""Its sessions have requests with a delay in the place of a time."""

MELL_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
"""The columns of Mell's own format."""

FORMATS = (
    TraceFormat("Mell", ("arrivals", "prompttokens", "outputtokens")),
    TraceFormat("Azure 2025 (multimodal)", ("timestamp", "contexttokens", "generatedtokens"), ("numimages",)),
    TraceFormat("Azure 2023/2024", ("timestamp", "contexttokens", "generatedtokens")),
    TraceFormat("BurstGPT", ("timestamp", "requesttokens", "responsetokens"), is_sparse=True),
    TraceFormat("Qwen-Bailian", ("timestamp", "inputlength", "outputlength"), ("chatid",)),
    AIPERF,
    TraceFormat("Mooncake", ("timestamp", "inputlength", "outputlength"), unit=TimeUnit.MILLISECONDS),
    TraceFormat("ServeGen", ("timestamp", "inputtokens", "outputtokens")),
    TraceFormat("vidur", ("arrivedat", "numprefilltokens", "numdecodetokens")),
    TraceFormat("splitwise-sim", ("arrivaltimestamp", "promptsize", "tokensize")),
    TraceFormat("vllm bench serve", ("starttimes", "inputlens", "outputlens")),
)
"""The named formats; the first that fits counts."""


@dataclass(frozen=True, slots=True)
class FoundColumns:
    """The format of a file: its name, the names of the columns to read, None for one that it lacks, and the unit.

    `unit_is_certain` if values do not decide about it, unless they are Unix times.
    """

    name: str
    columns: dict[TraceColumn, str | None]
    unit: TimeUnit
    unit_is_certain: bool

    @property
    def selected(self) -> list[str | None]:
        """The names of the columns to read, in the order of `TraceColumn`; later rows may have what the first lacks."""
        return [self.columns[column] or _OPTIONAL.get(column) for column in TraceColumn]


def plain(name: str) -> str:
    """The name without case, spaces and punctuation."""
    return re.sub(r"[^a-z0-9]+", "", name.lower())


def found_columns(names: Sequence[str]) -> FoundColumns:
    """The format of a file with columns of these names."""
    given: dict[str, str] = {}
    for name in names:
        given.setdefault(plain(name), name)
    chosen = next((each for each in FORMATS if all(name in given for name in (*each.columns, *each.marks))), None)
    columns = {column: next((given[n] for n in known if n in given), None) for column, known in _ALIASES.items()}
    if chosen is not None:
        columns.update({column: given[name] for column, name in zip(NEEDED, chosen.columns, strict=True)})
    if chosen is AIPERF:
        columns[TraceColumn.SESSION] = given["sessionid"]
    unit = named_unit(columns[TraceColumn.TIME] or "")
    if chosen is None:
        return FoundColumns("columns of no known format", columns, unit or TimeUnit.SECONDS, unit is not None)
    return FoundColumns(chosen.name, columns, unit or chosen.unit, unit is not None or chosen.is_sparse)


def recognised(names: Sequence[str]) -> int:
    """The number of names that are those of columns to read."""
    known = {name for aliases in _ALIASES.values() for name in aliases}
    return sum(plain(name) in known for name in names)


def named_unit(column: str) -> TimeUnit | None:
    """The unit in the name of a column of times, as in `timestamp_ms`."""
    ending = re.search(r"[_ .(\[](s|sec|secs|seconds|ms|millis|us|ns)[)\]]?$", column.strip().lower())
    if ending is None:
        return None
    units = {"ms": TimeUnit.MILLISECONDS, "millis": TimeUnit.MILLISECONDS, "us": TimeUnit.MICROSECONDS}
    return {**units, "ns": TimeUnit.NANOSECONDS}.get(ending[1], TimeUnit.SECONDS)
