"""Opens a file of text, plain or compressed, in UTF-8 or with a byte order mark."""

import bz2
import codecs
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

from simulator.errors import BadInput

_PEEKED = 512
"""The bytes at the beginning of a file that show its kind."""


def _open_zstd(raw: IO[bytes]) -> Any:
    # Imported here: only files of this kind need the package.
    try:
        from backports import zstd
    except ImportError:
        raise BadInput("The file is compressed with zstd, which needs the Python package backports.zstd.") from None
    return zstd.open(raw)


_COMPRESSED: tuple[tuple[bytes, Callable[[IO[bytes]], Any]], ...] = (
    (b"\x1f\x8b", gzip.open),
    (b"\x28\xb5\x2f\xfd", _open_zstd),
    # Frames to skip, with which the files of pzstd begin.
    *((bytes([first]) + b"\x2a\x4d\x18", _open_zstd) for first in range(0x50, 0x60)),
    (b"\xfd7zXZ\x00", lzma.open),
    (b"BZh", bz2.open),
)
"""The first bytes of compressed files, and their readers."""

_UNREADABLE: tuple[tuple[bytes, str], ...] = (
    (
        b"PAR1",
        "a Parquet file: write it as CSV first, for example with python -c "
        "\"import pandas; pandas.read_parquet('in.parquet').to_csv('out.csv.gz', index=False)\"",
    ),
    (b"ARROW1", "an Arrow file: write it as CSV first, for example with pandas.read_feather(...).to_csv(...)"),
    (b"PK\x03\x04", "a ZIP archive or a spreadsheet: unpack it, or save the table as CSV"),
    (b"7z\xbc\xaf", "a 7z archive: unpack it first"),
    (b"SQLite", "a SQLite database: write the table as CSV first"),
)
"""The first bytes of known files that are not read, and a description of each with a remedy."""

_TAR_AT = 257
"""The place of the mark of a tar archive."""

_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))

_DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, UnicodeError)


@contextmanager
def opened_text(path: Path) -> Iterator[TextIO]:
    """The text of a file, to read from its beginning to its end once; it may be a pipe.

    Raises `BadInput` inside of the context, too, if the file cannot be read or is damaged.
    """
    try:
        with path.open("rb") as raw:
            yield _text(path, raw)
    except _damaged() as error:
        raise BadInput(f"{path} is damaged, or no text: {error}.") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}.") from None


def _damaged() -> tuple[type[Exception], ...]:
    """The exceptions of readers for damaged data; that of zstd only if its package was needed."""
    zstd = sys.modules.get("backports.zstd")
    return _DAMAGED if zstd is None else (*_DAMAGED, zstd.ZstdError)


def _text(path: Path, raw: io.BufferedReader) -> TextIO:
    begin = raw.peek(_PEEKED)
    for magic, kind in _UNREADABLE:
        if begin.startswith(magic):
            raise BadInput(f"{path} is {kind}.")
    data: io.BufferedReader = raw
    for magic, reader in _COMPRESSED:
        if begin.startswith(magic):
            data = io.BufferedReader(reader(raw))
    begin = data.peek(_PEEKED)[:_PEEKED]
    encoding = next((name for mark, name in _MARKS if begin.startswith(mark)), "utf-8")
    if begin[_TAR_AT:].startswith(b"ustar"):
        raise BadInput(f"{path} is a tar archive: unpack it first.")
    if encoding != "utf-16" and b"\0" in begin:
        raise BadInput(f"{path} is no text, or UTF-16 without a byte order mark: save it as UTF-8.")
    return io.TextIOWrapper(data, encoding=encoding, newline="")
