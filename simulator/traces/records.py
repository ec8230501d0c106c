"""Reads the rows of a file, whatever its syntax: CSV with any separator, lines of JSON, an array, columns in an object.

Every row comes with the number of its line. A file is read once, from its beginning on, and never held as a whole,
except for a JSON object over several lines.
"""

import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

from simulator.errors import BadInput
from simulator.traces.formats import MELL_COLUMNS, NEEDED, plain, recognised

_SEPARATORS = (",", ";", "\t", "|", " ")
"""Blanks separate by any number of them."""

_SEPARATOR_LINE = re.compile(r'"?sep=.?"?', re.IGNORECASE)
"""The first line of a spreadsheet's CSV, which names its separator."""

_LONGEST_CELL = 1 << 24
"""The most characters of a cell of CSV: more than the longest prompt."""

_EXAMINED = 100
"""The objects at the beginning of a file whose members are its columns."""

_SHOWN = 12
"""The most names of columns in an error."""

_CHUNK = 1 << 20
"""The characters of JSON that are read at once."""

_LONGEST_LITERAL = 16
"""More characters than the beginning of a number, a literal or an escape has that is cut by the end of a chunk."""

_BETWEEN = re.compile(r"[\s,]*")
"""The characters between two values of JSON."""


@dataclass(frozen=True, slots=True)
class FileRecords:
    """The columns of a file by its first rows, and its rows with the numbers of their lines.

    A row is a list in the order of the columns, or an object, which may have other members than the first ones.
    """

    path: Path
    columns: tuple[str, ...]
    rows: Iterator[tuple[int, Any]]
    are_objects: bool = False

    def selected(self, names: Sequence[str | None]) -> Iterator[tuple[int, list[Any]]]:
        """The values of these columns in every row; None for one that it lacks."""
        if self.are_objects:
            for line, row in self.rows:
                if not isinstance(row, dict):
                    raise self.error(line, "the value is no object with names")
                yield line, [row.get(name) for name in names]
            return
        places = [self.columns.index(name) if name in self.columns else None for name in names]
        width = 1 + max((place for place in places if place is not None), default=0)
        for line, row in self.rows:
            if len(row) >= width:
                yield line, [None if place is None else row[place] for place in places]
            else:
                yield line, [row[place] if place is not None and place < len(row) else None for place in places]

    def error(self, line: int, problem: str) -> BadInput:
        """The error of a row."""
        printed = "".join(letter if letter.isprintable() else "?" for letter in problem)
        return BadInput(f"{self.path}, line {line}: {printed}. {self.found}")

    @property
    def found(self) -> str:
        """The columns as a sentence."""
        if not self.columns:
            return "It has no columns."
        shown = ", ".join(name or "(empty)" for name in self.columns[:_SHOWN])
        more = len(self.columns) - _SHOWN
        return f"Its columns are {shown}{f' and {more:,} more' if more > 0 else ''}."


def read_records(path: Path, text: TextIO) -> FileRecords:
    """The records in a text. Raises `BadInput` for a file without any; the iteration raises it for a damaged row."""
    csv.field_size_limit(_LONGEST_CELL)
    first, number = "", 0
    while not first.strip() or _is_preface(first.strip()):
        if not (first := text.readline()):
            raise BadInput(f"{path} is empty: it has no requests.")
        number += 1
    begin = first.lstrip()
    if begin.startswith(("[", "{")):
        return _of_values(path, _values(path, begin.removeprefix("["), number, text))
    return _of_csv(path, first, number, text)


# --- CSV -------------------------------------------------------------------------------------------------------------


def _of_csv(path: Path, first: str, number: int, text: TextIO) -> FileRecords:
    try:
        separator, names = _header(first)
    except csv.Error as error:
        raise BadInput(f"{path}, line {number} is damaged: {error}.") from None
    if not recognised(names) and all(re.fullmatch(r"[-+\d.,:;eETZ /\t|]*", name) for name in names):
        raise BadInput(
            f"{path}, line {number} has values in the place of the names of columns: {first.strip()[:80]}. Put a line "
            f"with the names first, such as {','.join(MELL_COLUMNS)}."
        )
    return FileRecords(path, tuple(names), _csv_rows(path, number, text, separator))


def _is_preface(line: str) -> bool:
    """True for a line before the names of columns: a comment, or the name of the separator."""
    if line.startswith("#"):
        return recognised(_header(line[:_CHUNK])[1]) < 2
    return _SEPARATOR_LINE.fullmatch(line) is not None


def _header(line: str) -> tuple[str, list[str]]:
    """The separator with which a line has the most known names of columns, and its names; they may follow a `#`."""
    line = re.sub(r"^\s*#+", "", line)
    headers = (
        (separator, [name.strip() for name in next(csv.reader([line], delimiter=separator, skipinitialspace=True))])
        for separator in _SEPARATORS
    )
    return max(headers, key=lambda each: recognised(each[1]))


def _csv_rows(path: Path, number: int, text: TextIO, separator: str) -> Iterator[tuple[int, list[str]]]:
    rows = csv.reader(text, delimiter=separator, skipinitialspace=True)
    # Where semicolons separate, commas may be decimal points.
    has_commas = separator == ";"
    try:
        for row in rows:
            if any(map(str.strip, row)):
                yield number + rows.line_num, [*map(_with_points, row)] if has_commas else row
    except csv.Error as error:
        raise BadInput(f"{path}, line {number + rows.line_num} is damaged: {error}.") from None


def _with_points(cell: str) -> str:
    """The cell with decimal points in the place of commas, unless it is a list."""
    return cell if cell.startswith("[") else cell.replace(",", ".")


# --- JSON ------------------------------------------------------------------------------------------------------------


def _of_values(path: Path, values: Iterator[tuple[int, Any]]) -> FileRecords:
    first = next(values, None)
    if first is None:
        raise BadInput(f"{path} is empty: it has no requests.")
    line, begin = first
    if not isinstance(begin, dict):
        return FileRecords(path, (), chain([first], values), are_objects=True)
    lists = [name for name, value in begin.items() if isinstance(value, list) and plain(name) != "hashids"]
    if recognised(lists) > 1:
        columns = tuple(name for name in lists if recognised([name]))
        return FileRecords(path, columns, _rows_of_columns(path, columns, chain([first], values)))
    examined = [first, *islice(values, _EXAMINED - 1)]
    inner = [value for value in begin.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if len(examined) == len(inner) == 1 and recognised([*begin], NEEDED) < 2:
        columns = _members(inner[0][:_EXAMINED])
        return FileRecords(path, columns, ((line, each) for each in inner[0]), are_objects=True)
    columns = _members(value for _, value in examined)
    return FileRecords(path, columns, chain(examined, values), are_objects=True)


def _members(values: Iterable[Any]) -> tuple[str, ...]:
    """The names of the members of all objects, in the order in which they come."""
    return tuple(dict.fromkeys(name for value in values if isinstance(value, dict) for name in value))


def _rows_of_columns(
    path: Path, columns: Sequence[str], values: Iterator[tuple[int, Any]]
) -> Iterator[tuple[int, list[Any]]]:
    """The rows of objects whose members are columns."""
    for line, value in values:
        lists = [value.get(name) if isinstance(value, dict) else None for name in columns]
        lengths = {len(each) if isinstance(each, list) else None for each in lists}
        if len(lengths) > 1 or None in lengths:
            raise BadInput(f"{path}, line {line}: {', '.join(columns)} are not lists of one length.")
        yield from ((line, list(row)) for row in zip(*lists, strict=True))


def _values(path: Path, buffer: str, line: int, text: TextIO) -> Iterator[tuple[int, Any]]:
    """Values of JSON one after the other, up to a closing bracket or the end, with the number of the line of each."""
    decoder, at, has_more = json.JSONDecoder(), 0, True
    while True:
        begin = _BETWEEN.match(buffer, at).end()  # type: ignore[union-attr]
        line += buffer.count("\n", at, begin)
        at = begin
        if at < len(buffer):
            if buffer[at] == "]":
                return
            try:
                value, end = decoder.raw_decode(buffer, at)
            except json.JSONDecodeError as error:
                is_cut = error.pos > len(buffer) - _LONGEST_LITERAL or error.msg.startswith("Unterminated string")
                if not is_cut or not has_more:
                    raise BadInput(f"{path}, line {line} is damaged, or no JSON: {error.msg}.") from None
            else:
                yield line, value
                line += buffer.count("\n", at, end)
                at = end
                continue
        elif not has_more:
            return
        # A value longer than a chunk is decoded again with twice as much of it.
        more = text.read(max(_CHUNK, len(buffer) - at))
        buffer, at, has_more = buffer[at:] + more, 0, bool(more)
