"""Reads the numbers of a CSV file, plain or gzipped, by the names of its columns."""

import csv
import gzip
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.simulator.errors import BadInput

GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Table:
    """A file's columns and its rows, as text."""

    path: Path
    columns: tuple[str, ...]
    rows: tuple[Mapping[str, str | None], ...]

    def has(self, *columns: str) -> bool:
        """True if the file has all these columns."""
        return all(name in self.columns for name in columns)

    def numbers(self, *columns: str) -> list[tuple[float, ...]]:
        """These columns of every row. Raises `BadInput` for a missing column or a value that is not 0 or more."""
        missing = [name for name in columns if name not in self.columns]
        if missing:
            raise BadInput(f"{self.path} lacks the column(s) {', '.join(missing)}.")
        return [self._row(number, row, columns) for number, row in enumerate(self.rows)]

    def _row(self, number: int, row: Mapping[str, str | None], columns: Sequence[str]) -> tuple[float, ...]:
        try:
            values = tuple(float(row[name] or "") for name in columns)
        except ValueError:
            raise BadInput(f"{self.path}: row {number} is not all numbers ({', '.join(columns)}).") from None
        if not all(0 <= value < math.inf for value in values):
            raise BadInput(f"{self.path}: row {number} has a negative or infinite value.")
        return values


def read_table(path: Path) -> Table:
    """Read a CSV file. Raises `BadInput` if that is impossible."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data.startswith(GZIP_MAGIC) else data).decode("utf-8-sig")
        reader = csv.DictReader(text.splitlines())
        return Table(path, tuple(reader.fieldnames or ()), tuple(reader))
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path} is damaged: {error}.") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}.") from None
