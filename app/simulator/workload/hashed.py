"""Reads traces of requests with the names of their prompts' blocks, as Mooncake's: JSON lines, plain or gzipped.

A line is an object with `arrival_s`, `prompt_tokens`, `output_tokens` and `hash_ids`: one number per block of the
prompt, the last of which may not be full. Equal numbers stand for equal blocks after equal blocks. It may have a
`session`, a name or a number: its requests are sent one after the other, in the order of the trace, `think_s` seconds
(default: 0) after the end of the answer before.
"""

import gzip
import json
import math
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from app.simulator.errors import BadInput
from app.simulator.workload.table import GZIP_MAGIC


class HashedRow(NamedTuple):
    """A line: times in seconds, lengths in tokens, the names of the prompt's blocks, and the session; empty: none."""

    arrival_s: float
    prompt: float
    output: float
    names: tuple[int, ...]
    session: str
    think_s: float


def is_hashed(path: Path) -> bool:
    """True if the file begins like such a trace: with an object that has hash_ids."""
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == GZIP_MAGIC
        with gzip.open(path) if zipped else path.open("rb") as lines:
            first = lines.readline(LINE_BYTES)
    except (OSError, EOFError, zlib.error):
        return False
    return first.startswith(b"{") and b'"hash_ids"' in first


LINE_BYTES = 1 << 16
"""The bytes of a line that are read to recognise a trace."""


_MOST = (1 << 64) - 1
"""The largest name of a block."""


def read_hashed(path: Path) -> list[HashedRow]:
    """The requests of a trace. Raises `BadInput` if that is impossible."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data.startswith(GZIP_MAGIC) else data).decode("utf-8")
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is damaged: {error}.") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}.") from None
    return [_row(path, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def _row(path: Path, number: int, line: str) -> HashedRow:
    try:
        given: Any = json.loads(line)
        arrival_s, prompt, output = (float(given[name]) for name in ("arrival_s", "prompt_tokens", "output_tokens"))
        names = tuple(given["hash_ids"])
        session, think_s = given.get("session", ""), float(given.get("think_s", 0.0))
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(f"{path}: line {number} is no request with hash_ids: {error!r}.") from None
    numbers = (arrival_s, prompt, output, think_s)
    if not all(0 <= value < math.inf for value in numbers) or not all(
        type(name) is int and 0 <= name <= _MOST for name in names
    ):
        raise BadInput(f"{path}: line {number} has a value that is no number, negative or infinite.")
    if not isinstance(session, str | int):
        raise BadInput(f"{path}: line {number} has a session that is neither a name nor a number.")
    return HashedRow(arrival_s, prompt, output, names, str(session), think_s)
