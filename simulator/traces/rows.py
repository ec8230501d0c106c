"""Reads rows of requests into arrays, so that five million of them take 200 MB, and counts those that are changed."""

import math
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from sys import intern
from typing import Any

from simulator.errors import BadInput
from simulator.traces.formats import FoundColumns, TraceColumn
from simulator.traces.records import FileRecords
from simulator.traces.times import TimeColumn, date_time, is_written_date

_BLOCK = 1 << 16
"""The rows after which the reader decides if it has read enough."""

_NO_ERROR = {
    *("", "0", "0.0", "none", "null", "nil", "false", "no", "nan", "n/a", "na", "-", "--", "ok", "success", "[]", "{}"),
}
"""Text in the place of an error, in lower case, of calls without one."""

_FAILURE = re.compile(r"false|no|fail(ed|ure)?|error|timeout|cancell?ed|aborted|[45]\d\d(\D.*)?", re.IGNORECASE)
"""Text in the place of a success or a status of failed calls; HTTP statuses from 400 on are among them."""

_NO_SUCCESS = ("0", "0.0")
"""Further text in the place of a success of failed calls."""

_ROLES = len(TraceColumn)


@dataclass(frozen=True, slots=True)
class ReadWindow:
    """The part of a trace that is needed, in seconds from its first request on; the end is not in it."""

    start_s: float = 0.0
    end_s: float = math.inf


@dataclass(slots=True)
class CountedRequests:
    """Requests of one kind, and their tokens."""

    requests: int = 0
    tokens: float = 0.0

    def count_request(self, tokens: float) -> None:
        """Add a request."""
        self.requests += 1
        self.tokens += tokens


@dataclass(slots=True)
class TraceRows:
    """The rows of a file so far."""

    records: FileRecords
    found: FoundColumns
    with_names: bool
    with_models: bool = False
    times: "array[float]" = field(default_factory=lambda: array("d"))
    prompts: "array[float]" = field(default_factory=lambda: array("d"))
    outputs: "array[float]" = field(default_factory=lambda: array("d"))
    numbers: "array[int]" = field(default_factory=lambda: array("q"))
    identities: "array[int]" = field(default_factory=lambda: array("q"))
    """Hashes of the ids of requests and of the names of their blocks."""
    names: dict[int, "array[int]"] = field(default_factory=dict)
    classes: dict[int, str] = field(default_factory=dict)
    sessions: dict[int, str] = field(default_factory=dict)
    models: dict[int, str] = field(default_factory=dict)
    think_s: dict[int, float] = field(default_factory=dict)
    delays: dict[int, float] = field(default_factory=dict)
    """Pauses in the unit of the times."""
    conversations: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The time of the latest request of every session, and the tokens of the conversation."""
    column: TimeColumn = field(init=False)
    has_times: bool = field(init=False)
    count: int = 0
    latest: float = -math.inf
    failed: CountedRequests = field(default_factory=CountedRequests)
    empty: CountedRequests = field(default_factory=CountedRequests)
    late: CountedRequests = field(default_factory=CountedRequests)
    turns: CountedRequests = field(default_factory=CountedRequests)
    unnamed: CountedRequests = field(default_factory=CountedRequests)
    """Requests with names of blocks that cannot be read."""
    read_to_line: int | None = None

    def __post_init__(self) -> None:
        self.column = TimeColumn(self.found.unit, self.found.unit_is_named, self.found.slowest_s)
        self.has_times = self.found.columns[TraceColumn.TIME] is not None

    def read_rows(self, window: ReadWindow) -> None:
        """Read the rows, up to a block that is wholly after the window."""
        block = 0
        for line, values in self.records.selected(self.found.selected):
            self._read_row(line, values)
            self.count += 1
            if len(self.times) - block == _BLOCK:
                least, block = self._enter_block(block), len(self.times)
                if least >= self.column.least + window.end_s * self.column.found_unit.per_second:
                    self.read_to_line = line
                    break
        else:
            self._enter_block(block)
        self._refuse_written_dates()

    def _enter_block(self, begin: int) -> float:
        """Enter the times from `begin` on into the facts about their column. Returns the least of them."""
        block, column = self.times[begin:], self.column
        if not block:
            return math.inf
        least, most = min(block), max(block)
        column.count, column.least, column.most = len(self.times), min(column.least, least), max(column.most, most)
        column.have_fractions = column.have_fractions or not all(map(float.is_integer, block))
        return least

    def _refuse_written_dates(self) -> None:
        column = self.column
        if column.are_dates or column.is_named or not (self.has_times and all(map(is_written_date, self.times))):
            return
        if self.times:
            name, date = self.found.columns[TraceColumn.TIME], f"{column.least:.0f}"
            raise BadInput(
                f"{self.records.path}: {name} is a date as a number, such as {date}: write dates with the time of day, "
                "as in 2024-03-01 12:00:00.5."
            )

    def _read_row(self, line: int, values: Sequence[Any]) -> None:
        time, prompt, output, names, service_class, session, think, delay, error, success, status, model = values[
            :_ROLES
        ]
        identity = _identity(names, *values[_ROLES:])
        if _is_failed(error, success, status):
            self.failed.count_request(_or_0(prompt) + _or_0(output))
            return
        prompt = self._amount(line, TraceColumn.PROMPT, prompt)
        output = self._amount(line, TraceColumn.OUTPUT, output)
        if not output:
            self.failed.count_request(prompt)
            return
        if not prompt:
            self.empty.count_request(output)
            prompt = 1.0
        number = self.count
        if session is not None and session != "":
            session = self._session(line, session)
            self.sessions[number] = session
            if _is_empty(time) and not _is_empty(delay) and session in self.conversations:
                self.delays[number] = self._amount(line, TraceColumn.DELAY, delay)
                begin, before = self.conversations[session]
                time, prompt, names = begin + self.delays[number], before + prompt, None
                self.turns.count_request(prompt + output)
        at = self._time(line, time)
        if number in self.sessions:
            self.conversations[self.sessions[number]] = at, prompt + output
        if not _is_empty(think):
            self.think_s[number] = self._amount(line, TraceColumn.THINK, think)
        if service_class:
            self.classes[number] = str(service_class)
        if self.with_models and not _is_empty(model):
            self.models[number] = intern(str(model))
        if self.with_names and not _is_empty(names):
            self._read_names(number, names, prompt + output)
        if at < self.latest:
            self.late.count_request(prompt + output)
        else:
            self.latest = at
        self.times.append(at)
        self.prompts.append(prompt)
        self.outputs.append(output)
        self.numbers.append(number)
        self.identities.append(identity)

    def _amount(self, line: int, column: TraceColumn, value: Any) -> float:
        """A number that is 0 or more."""
        try:
            number = float(value)
            if 0 <= number < math.inf and value is not True:
                return number
        except (ValueError, TypeError):
            number = math.nan
        raise self.records.error(line, _problem(self.found.columns[column] or column, value, number))

    def _time(self, line: int, value: Any) -> float:
        """A time in the unit of the column."""
        if not self.has_times:
            return float(self.count)
        try:
            at, are_dates = float(value), False
        except (ValueError, TypeError):
            if not isinstance(value, str) or _is_empty(value):
                return self._amount(line, TraceColumn.TIME, value)
            try:
                at, are_dates = date_time(value), True
            except ValueError:
                name = self.found.columns[TraceColumn.TIME]
                problem = f"{name} is neither a number nor a date-time: {value[:80]}"
                raise self.records.error(line, problem) from None
        if are_dates is not self.column.are_dates:
            if self.times:
                raise self.records.error(line, "date-times and numbers are mixed")
            self.column.are_dates = are_dates
        return at if are_dates or 0 <= at < math.inf else self._amount(line, TraceColumn.TIME, value)

    def _read_names(self, number: int, names: Any, tokens: float) -> None:
        if (read := _block_names(names)) is None:
            self.unnamed.count_request(tokens)
        else:
            self.names[number] = read

    def _session(self, line: int, session: Any) -> str:
        if not isinstance(session, str | int):
            raise self.records.error(line, "the session is neither a name nor a number")
        return str(session)


def _is_empty(value: Any) -> bool:
    """True for a value that a row lacks."""
    return value is None or (isinstance(value, str) and not value.strip())


def _identity(*values: Any) -> int:
    """A hash of the ids of a request; 0 if it has none."""
    return 0 if all(map(_is_empty, values)) else hash(tuple(map(str, values)))


def _is_failed(error: Any, success: Any, status: Any) -> bool:
    """True for a call with an error, without success, or with the status of a failure."""
    if error and str(error).strip().lower() not in _NO_ERROR:
        return True
    if success is None and status is None:
        return False
    succeeded = str(success).strip()
    return succeeded in _NO_SUCCESS or any(map(_FAILURE.fullmatch, (succeeded, str(status).strip())))


def _block_names(names: Any) -> "array[int] | None":
    """The names of blocks in a list, or in text such as `[1, 2]`; None if they are no whole numbers from 0 on."""
    if isinstance(names, str):
        names = re.sub(r"^[\[(]|[\])]$", "", names.strip()).replace(",", " ").replace(";", " ").split()
    if not isinstance(names, list):
        return None
    try:
        return array("Q", [int(name) if isinstance(name, str) else name for name in names])
    except (TypeError, ValueError, OverflowError):
        return None


def _or_0(value: Any) -> float:
    """The number of tokens of a failed call, which may lack it."""
    try:
        number = float(value)
    except (ValueError, TypeError):
        return 0.0
    return number if 0 < number < math.inf else 0.0


def _problem(name: str, value: Any, number: float) -> str:
    if _is_empty(value):
        return f"{name} is missing"
    if number < 0:
        return f"{name} is negative: {value}"
    if isinstance(value, str) and value.strip().lower().lstrip("+-") not in ("nan", "inf", "infinity"):
        return f"{name} is no number: {value[:80]}"
    return f"{name} is not a finite number: {value}"
