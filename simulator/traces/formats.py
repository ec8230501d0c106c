"""The known formats of traces, by the names of their columns.

Names are compared without case, spaces and punctuation: `Request tokens` is `requesttokens`. The name of a column of
times may end with a unit: `arrival_time_ms`, `Timestamp (seconds)`. A file with a time, a prompt and an output by any
of the names below is read, whoever wrote it; the formats give it a name and the unit of its times where these are
relative.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from simulator.traces.times import SLOWEST_KNOWN_S, SLOWEST_S, TimeUnit


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
    SUCCESS = "success"
    STATUS = "status"
    MODEL = "model"


_TIMES = (
    *("arrival", "arrivedat", "arrivaltimestamp", "arrivaltime", "timestamp", "starttime", "requesttime"),
    *("requesttimestamp", "requestarrivaltime", "createdat", "submittedat", "submittime", "receivedat", "sentat"),
    *("relativetime", "unixtime", "unixtimestamp", "epoch", "time", "ts", "datetime", "requeststarttime"),
    *("requeststart", "start"),
)
"""Names of columns of times, without the unit; in the plural, too."""

_TOKENS = (
    *("{}tokens", "num{}tokens", "n{}tokens", "numberof{}tokens", "{}tokencount", "{}tokenscount", "{}numtokens"),
    "num{}token",
)
_LENGTHS = (
    *("{}length", "{}lengths", "{}len", "{}lens", "{}sequencelength", "{}sequencelengths", "{}seqlen", "{}seqlens"),
    *("{}tokenlength", "{}tokenlen"),
)
"""Names of columns of lengths, with a gap for a part of the request such as `prompt`."""


def _length_names(parts: Sequence[str], in_tokens: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    """Names for the lengths of a part of requests. Lengths of `in_tokens` count only in names with `tokens`."""
    forms = [(part, (*_TOKENS, *_LENGTHS)) for part in parts] + [(part, _TOKENS) for part in in_tokens]
    named = [form.format(part) for part, forms_of_part in forms for form in forms_of_part]
    return (*named, *others, *(f"total{part}tokens" for part in (*parts, *in_tokens)))


_ALIASES: dict[TraceColumn, tuple[str, ...]] = {
    TraceColumn.TIME: tuple(name for stem in _TIMES for name in (stem, f"{stem}s")),
    TraceColumn.PROMPT: _length_names(("prompt", "input", "prefill"), ("context", "request"), ("promptsize", "isl")),
    TraceColumn.OUTPUT: _length_names(
        ("output", "completion", "decode"), ("generated", "generation", "gen", "response"), ("tokensize", "osl")
    ),
    TraceColumn.NAMES: ("hashids",),
    TraceColumn.CLASS: ("class",),
    TraceColumn.SESSION: ("session",),
    TraceColumn.THINK: ("thinks",),
    TraceColumn.DELAY: ("delay",),
    TraceColumn.ERROR: ("errors", "error"),
    TraceColumn.SUCCESS: ("success", "successes", "succeeded", "issuccess", "successful"),
    TraceColumn.STATUS: ("status", "statuses", "statuscode", "statuscodes", "httpstatus", "httpstatuscode"),
    TraceColumn.MODEL: ("model", "modelname"),
}
"""The names of every column, in the order of preference."""

_OPTIONAL = {
    TraceColumn.NAMES: "hash_ids",
    TraceColumn.CLASS: "class",
    TraceColumn.SESSION: "session",
    TraceColumn.THINK: "think_s",
    TraceColumn.DELAY: "delay",
    TraceColumn.ERROR: "error",
    TraceColumn.SUCCESS: "success",
    TraceColumn.STATUS: "status",
    TraceColumn.MODEL: "model",
}
"""The names of members that the first objects of a file may lack."""

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

    With a longer mean time between requests than `slowest_s`, whole numbers are of another unit.
    """

    name: str
    columns: tuple[str, str, str]
    marks: tuple[str, ...] = ()
    unit: TimeUnit = TimeUnit.SECONDS
    slowest_s: float = SLOWEST_KNOWN_S


AIPERF = TraceFormat("aiperf", ("timestamp", "inputlength", "outputlength"), ("sessionid",), unit=TimeUnit.MILLISECONDS)
"""Its sessions have requests with a delay in the place of a time."""

MELL_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
"""The columns of Mell's own format."""

FORMATS = (
    TraceFormat("Mell", ("arrivals", "prompttokens", "outputtokens")),
    TraceFormat("Azure 2025 (multimodal)", ("timestamp", "contexttokens", "generatedtokens"), ("numimages",)),
    TraceFormat("Azure 2023/2024", ("timestamp", "contexttokens", "generatedtokens")),
    TraceFormat("BurstGPT", ("timestamp", "requesttokens", "responsetokens"), slowest_s=math.inf),
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

    `identities` are further columns that distinguish requests. `unit_is_named` if the unit is in the column's name.
    With a longer mean time between requests than `slowest_s`, whole numbers are of another unit, unless it is named.
    """

    name: str
    columns: dict[TraceColumn, str | None]
    identities: tuple[str, ...]
    unit: TimeUnit
    unit_is_named: bool
    slowest_s: float

    @property
    def selected(self) -> list[str | None]:
        """The names of the columns to read, in the order of `TraceColumn`, and the `identities`.

        Later rows may have what the first ones lack.
        """
        return [*(self.columns[column] or _OPTIONAL.get(column) for column in TraceColumn), *self.identities]


def plain(name: str) -> str:
    """The name without case, spaces and punctuation."""
    return re.sub(r"[^a-z0-9]+", "", name.lower())


def found_columns(names: Sequence[str]) -> FoundColumns:
    """The format of a file with columns of these names."""
    given: dict[str, str] = {}
    for name in names:
        given.setdefault(plain(name), name)
    chosen = next((each for each in FORMATS if all(name in given for name in (*each.columns, *each.marks))), None)
    of_times = {stem: name for name in reversed(names) if (stem := _stem_and_unit(name)[0])} | given
    columns = {
        column: next((some[n] for n in known if n in some), None)
        for column, known in _ALIASES.items()
        for some in (of_times if column is TraceColumn.TIME else given,)
    }
    if chosen is not None:
        columns.update({column: given[name] for column, name in zip(NEEDED, chosen.columns, strict=True)})
    if chosen is AIPERF:
        columns[TraceColumn.SESSION] = given["sessionid"]
    named = _stem_and_unit(columns[TraceColumn.TIME] or "")[1]
    unit = named or (TimeUnit.SECONDS if chosen is None else chosen.unit)
    identities = tuple(name for key, name in given.items() if key.endswith(("id", "ids")) and key != "hashids")
    format_name = "columns of no known format" if chosen is None else chosen.name
    slowest_s = SLOWEST_S if chosen is None else chosen.slowest_s
    return FoundColumns(format_name, columns, identities, unit, named is not None, slowest_s)


def recognised(names: Sequence[str], columns: Sequence[TraceColumn] = tuple(TraceColumn)) -> int:
    """The number of names that are those of columns to read, or of some of them."""
    known = {name for column in columns for name in _ALIASES[column]}
    with_times = TraceColumn.TIME in columns
    return sum(plain(name) in known or (with_times and _stem_and_unit(name)[0] in known) for name in names)


_UNITS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), TimeUnit.SECONDS),
    **dict.fromkeys(("milliseconds", "millisecond", "millis", "msecs", "msec", "ms"), TimeUnit.MILLISECONDS),
    **dict.fromkeys(("microseconds", "microsecond", "micros", "usecs", "usec", "us", "µs"), TimeUnit.MICROSECONDS),
    **dict.fromkeys(("nanoseconds", "nanosecond", "nanos", "nsecs", "nsec", "ns"), TimeUnit.NANOSECONDS),
}
"""Units at the end of names of columns."""


def _stem_and_unit(column: str) -> tuple[str, TimeUnit | None]:
    """The plain name of a column of times without the unit at its end, and this unit; the name is empty without one."""
    words = re.findall("[a-z0-9µ]+", re.sub("(?<=[a-z])(?=[A-Z])", " ", column).lower())
    if len(words) > 1 and words[-1] in _UNITS:
        stem = words[:-2] if words[-2] == "in" else words[:-1]
        return "".join(stem), _UNITS[words[-1]]
    # Without a space before it, the unit is known by what comes before; a mere `s` is a plural.
    whole = "".join(words)
    ends = ((whole.removesuffix(name), unit) for name, unit in _UNITS.items() if name != "s" and whole.endswith(name))
    return next((each for each in ends if each[0] in _TIMES), ("", None))
