"""Reads the requests of a trace: their times from the first request on, their lengths, and an account of the rest.

Of a window, no more is read than needed: the reader stops after a block of rows that are all later.

    failed calls      calls with an error or the status of one, or without an answer: dropped
    duplicates        requests that equal another one in time, lengths, ids and names of blocks: dropped if times
                      distinguish the requests of this trace, so that equal ones are no coincidence; else kept
    empty prompts     get one token
    turns             requests with a delay after the answer before in the place of a time, as in aiperf's sessions:
                      their prompts are counted with the conversation before them
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

from simulator.errors import BadInput
from simulator.traces.formats import NEEDED, TraceColumn, found_columns, plain
from simulator.traces.records import FileRecords, read_records
from simulator.traces.rows import CountedRequests, ReadWindow, TraceRows
from simulator.traces.text import opened_text
from simulator.traces.times import shown

_DESCRIBED = {
    TraceColumn.TIME: "arrival times (such as arrival_s or timestamp)",
    TraceColumn.PROMPT: "prompt tokens (such as prompt_tokens or input_length)",
    TraceColumn.OUTPUT: "output tokens (such as output_tokens or output_length)",
}

_COINCIDENCES = 0.01
"""Times distinguish requests if at most this share of the requests has the time of another one."""

_SAMPLE = 1000
"""The requests among which lengths must differ."""

_DECIMALS = 6
"""Times are in whole microseconds: more is lost in Unix times anyway."""


@dataclass(frozen=True, slots=True)
class Change:
    """Requests that were dropped or changed, with their shares of all requests and of all tokens that were read."""

    what: str
    requests: int
    request_share: float
    token_share: float


@dataclass(frozen=True, slots=True)
class TraceAccount:
    """The format of a file, its columns, the unit of its times, the number of its rows, and the changed requests.

    `begins` is the date and time of the first request, if the file has it. `read_to_line` is the last line that was
    read, if the rows before it are later than the window. With `unit_is_guess`, the values of the times decided about
    their unit, or make it doubtful.
    """

    format: str
    columns: tuple[str, ...]
    time_unit: str
    rows: int
    begins: str | None = None
    read_to_line: int | None = None
    unit_is_guess: bool = False
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class FileTrace:
    """The requests of a file as columns, in order of arrival.

    `at_s` are seconds from the beginning of the window on, `numbers` the places of the requests in the file. Names of
    blocks, service classes, models, sessions and pauses are by these numbers, for the requests that have them.
    """

    at_s: "array[float]"
    prompts: "array[float]"
    outputs: "array[float]"
    numbers: "array[int]"
    names: Mapping[int, "array[int]"]
    classes: Mapping[int, str]
    models: Mapping[int, str]
    sessions: Mapping[int, str]
    think_s: Mapping[int, float]
    account: TraceAccount


WHOLE = ReadWindow()


def read_trace_file(
    path: Path,
    window: ReadWindow = WHOLE,
    *,
    with_names: bool = True,
    needs_times: bool = True,
    with_models: bool = False,
) -> FileTrace:
    """The requests of a file in any known format, and the names of their blocks `with_names` and models `with_models`.

    Where times are not needed, requests without them come at intervals of a second. Raises `BadInput` if the file
    cannot be read, is no trace, or has no requests in the window.
    """
    with opened_text(path) as text:
        records = read_records(path, text)
        if "request_throughput" in records.columns:
            raise BadInput(f"{path} has only totals: vllm bench serve writes its requests with --save-detailed.")
        found = found_columns(records.columns)
        if missing := [c for c in NEEDED if found.columns[c] is None and (needs_times or c is not TraceColumn.TIME)]:
            raise _no_trace(records, missing)
        rows = TraceRows(records, found, with_names, with_models)
        rows.read_rows(window)
    return _trace(rows, window)


def _no_trace(records: FileRecords, missing: Iterable[TraceColumn]) -> BadInput:
    if {"input_lens", "output_lens"} <= {*records.columns}:
        return BadInput(
            f"{records.path} has no start_times, and so no arrival times: vllm bench serve of vLLM 0.32 writes them "
            "with --save-detailed."
        )
    lacking = " and no ".join(_DESCRIBED[column] for column in missing)
    return BadInput(f"{records.path} is no trace: it has no {lacking}. {records.found}")


def _trace(rows: TraceRows, window: ReadWindow) -> FileTrace:
    """The requests of the window. Raises `BadInput` if there is none."""
    times, column = rows.times, rows.column
    if not times:
        failed = f": all of its {rows.failed.requests:,} rows are failed calls" if rows.failed.requests else ""
        raise BadInput(f"{rows.records.path} has no requests{failed}.")
    places: Sequence[int] = range(len(times))
    if rows.late.requests:
        places = sorted(places, key=times.__getitem__)
    begins, per_second = times[places[0]], column.found_unit.per_second
    dropped, changes = _changes(rows, places)
    at_s, kept = array("d"), array("q")
    for place in places:
        at = round((times[place] - begins) / per_second, _DECIMALS)
        if window.start_s <= at < window.end_s and place not in dropped:
            at_s.append(at - window.start_s)
            kept.append(place)
    if not kept:
        raise BadInput(f"No request arrives after {window.start_s:g} s.")
    waits = rows.delays or plain(rows.found.columns[TraceColumn.SESSION] or "session") == "session"
    return FileTrace(
        at_s,
        array("d", map(rows.prompts.__getitem__, kept)),
        array("d", map(rows.outputs.__getitem__, kept)),
        array("q", map(rows.numbers.__getitem__, kept)),
        rows.names,
        rows.classes,
        rows.models,
        rows.sessions if waits else {},
        rows.think_s | {number: delay / per_second for number, delay in rows.delays.items()},
        TraceAccount(
            rows.found.name,
            tuple(name for needed in NEEDED if (name := rows.found.columns[needed]) is not None),
            column.description,
            rows.count,
            shown(begins / per_second) if column.are_unix else None,
            rows.read_to_line,
            column.unit_is_guess,
            tuple(changes),
        ),
    )


def _changes(rows: TraceRows, places: Sequence[int]) -> tuple[set[int], Iterator[Change]]:
    """The duplicates to drop, and the requests that are dropped or changed, by kind."""
    found, are_certain = _duplicates(rows, places)
    doubled = CountedRequests(len(found), sum(rows.prompts[place] + rows.outputs[place] for place in found))
    rounded = CountedRequests()
    for lengths in zip(rows.prompts, rows.outputs, strict=True):
        if any(tokens % 1 for tokens in lengths):
            rounded.count_request(sum(lengths))
    kinds = (
        ("failed calls, with an error or without an answer: dropped", rows.failed),
        (
            "duplicates, equal to another request and at the same time: " + ("dropped" if are_certain else "kept"),
            doubled,
        ),
        ("out of order: sorted by time", rows.late),
        ("without prompt tokens: one is assumed", rows.empty),
        ("with fractions of tokens: rounded", rounded),
        ("hash_ids that are no list of whole numbers from 0 on: ignored", rows.unnamed),
        ("turns after a delay: the conversation before is part of their prompts", rows.turns),
    )
    requests = max(1, rows.count)
    tokens = max(1.0, sum(rows.prompts) + sum(rows.outputs) + rows.failed.tokens)
    return found if are_certain else set(), (
        Change(what, counted.requests, counted.requests / requests, counted.tokens / tokens)
        for what, counted in kinds
        if counted.requests
    )


def _duplicates(rows: TraceRows, places: Sequence[int]) -> tuple[set[int], bool]:
    """Requests that equal an earlier one, and True if times distinguish requests, so that this is no coincidence."""
    found: set[int] = set()
    together = 0
    for _, group in groupby(places, rows.times.__getitem__):
        if len(alike := list(group)) > 1:
            distinct = {_content(rows, place): place for place in reversed(alike)}
            found |= {*alike} - {*distinct.values()}
            together += len(distinct) if len(distinct) > 1 else 0
    others = len(places) - len(found)
    differ = len({_content(rows, place) for place in islice(places, _SAMPLE)}) > 1
    return found, differ and together <= _COINCIDENCES * others


def _content(rows: TraceRows, place: int) -> tuple[object, ...]:
    """The facts about a request beside its time."""
    number = rows.numbers[place]
    return (
        rows.prompts[place],
        rows.outputs[place],
        rows.identities[place],
        rows.classes.get(number),
        rows.models.get(number),
        rows.sessions.get(number),
    )
