"""The syntax of files: compression, encodings, separators, JSON in all its shapes, and damage."""

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
from pathlib import Path
from threading import Thread

import pytest
from backports import zstd

from simulator.errors import BadInput
from simulator.traces.trace import read_trace_file
from tests.simulator.traces.small import EXPECTED, OWN, lines, objects, read_text, requests_of, table

PLAIN = OWN.encode()
ROWS = objects(lambda n, r: {"arrival_s": r[0] / 1000, "prompt_tokens": r[1], "output_tokens": r[2]})
HEADER = "arrival_s,prompt_tokens,output_tokens"


def archive() -> bytes:
    """A tar archive."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        member = tarfile.TarInfo("trace.csv")
        member.size = len(PLAIN)
        tar.addfile(member, io.BytesIO(PLAIN))
    return content.getvalue()


CONTENTS = {
    "gz": gzip.compress(PLAIN),
    "two members of gz": gzip.compress(PLAIN[:300]) + gzip.compress(PLAIN[300:]),
    "zst": zstd.compress(PLAIN),
    "zst after a frame to skip": b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + zstd.compress(PLAIN),
    "xz": lzma.compress(PLAIN),
    "bz2": bz2.compress(PLAIN),
    "byte order mark": b"\xef\xbb\xbf" + PLAIN,
    "UTF-16": OWN.encode("utf-16"),
    "CRLF": PLAIN.replace(b"\n", b"\r\n"),
    "CR": PLAIN.replace(b"\n", b"\r"),
    "blank lines": b"\n \n" + PLAIN.replace(b"\n", b"\n\n , ,\n"),
    "no newline at the end": PLAIN.rstrip(),
    "semicolons": PLAIN.replace(b",", b";"),
    "semicolons and decimal commas": PLAIN.replace(b",", b";").replace(b".", b","),
    "tabs": PLAIN.replace(b",", b"\t"),
    "bars": PLAIN.replace(b",", b"|"),
    "spaces": PLAIN.replace(b",", b" , "),
    "blanks": PLAIN.replace(b",", b" "),
    "runs of blanks": b"  " + PLAIN.replace(b",", b"   ").replace(b"\n", b" \n   "),
    "the name of the separator": b"sep=;\r\n" + PLAIN.replace(b",", b";"),
    "comments": b'# made by hand\n\n#time and tokens, "raw\n' + PLAIN,
    "a header in a comment": b"# " + PLAIN,
    "a header in a comment, after another one": b"# made by hand\n# " + PLAIN.replace(b",", b" "),
    "long cells": table(f"text,{HEADER}", lambda n, r: ("x\n" * 100_000, r[0] / 1000, *r[1:])).encode(),
    "quotes": "".join(",".join(f'"{cell}"' for cell in row.split(",")) + "\n" for row in OWN.split()).encode(),
    "upper case": PLAIN.replace(b"arrival_s", b"ARRIVAL_S"),
    "floats": table(HEADER, lambda n, r: (r[0] / 1000, float(r[1]), f"{r[2]}.0")).encode(),
    "thousands of columns": table(
        ",".join(f"c{n}" for n in range(3000)) + f",{HEADER}", lambda n, r: (*[""] * 3000, r[0] / 1000, *r[1:])
    ).encode(),
    "another order and other columns": table(
        "output_tokens,note,arrival_s,prompt_tokens", lambda n, r: (r[2], "a,\nb", r[0] / 1000, r[1])
    ).encode(),
    "JSON lines after a failed call": b'{"arrival_s": 0, "error": "timeout"}\n' * 99 + lines(ROWS).encode(),
    "JSON lines": lines(ROWS).encode(),
    "JSON lines with a mark, blank lines and CRLF": b"\xef\xbb\xbf\r\n"
    + lines(ROWS).replace("\n", "\r\n\r\n").encode(),
    "JSON array": json.dumps(ROWS).encode(),
    "JSON array over lines": json.dumps(ROWS, indent=2).encode(),
    "JSON objects over lines": "\n".join(json.dumps(row, indent=1) for row in ROWS).encode(),
    "JSON array in an object": json.dumps({"version": 1, "requests": ROWS}, indent=1).encode(),
    "JSON columns": json.dumps({name: [row[name] for row in ROWS] for name in ROWS[0]}).encode(),
    "numbers as text": lines([{name: str(value) for name, value in row.items()} for row in ROWS]).encode(),
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_requests_are_read_from_any_syntax(tmp_path: Path, kind: str) -> None:
    assert requests_of(read_text(tmp_path, CONTENTS[kind])) == EXPECTED


def test_a_pipe_is_read(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "pipe")
    writer = Thread(target=lambda: path.write_bytes(CONTENTS["gz"]))
    writer.start()
    assert requests_of(read_trace_file(path)) == EXPECTED
    writer.join()


def test_objects_longer_than_what_is_read_at_once(tmp_path: Path) -> None:
    long = [{**row, "text": "x" * 700_000} for row in ROWS]
    assert requests_of(read_text(tmp_path, json.dumps(long))) == EXPECTED


DAMAGED = {
    "empty": (b"", "is empty: it has no requests"),
    "blank": (b"\n \n", "is empty: it has no requests"),
    "no rows": (HEADER.encode(), "has no requests"),
    "empty array": (b"[]", "is empty: it has no requests"),
    "gz cut off": (gzip.compress(PLAIN)[:-9], "is damaged"),
    "zst cut off": (zstd.compress(PLAIN)[:-9], "is damaged"),
    "zst broken": (zstd.compress(PLAIN)[:4] + b"xx", "is damaged"),
    "xz cut off": (lzma.compress(PLAIN)[:-9], "is damaged"),
    "tar": (gzip.compress(archive()), "is a tar archive: unpack it first"),
    "UTF-16 without a mark": (OWN.encode("utf-16-le"), "is no text, or UTF-16 without a byte order mark"),
    "endless quote": (
        f'{HEADER}\n1,2,"3'.encode() + b"\n" * ((1 << 24) + 9),
        "is damaged: field larger than field limit",
    ),
    "binary": (b"a,b\n\xff,2\n", "is damaged, or no text"),
    "Parquet": (b"PAR1\x15\x04", "is a Parquet file: write it as CSV first"),
    "ZIP": (b"PK\x03\x04", "is a ZIP archive or a spreadsheet"),
    "no header": (b"0.391,184,109\n1.4,3,4\n", "line 1 has values in the place of the names of columns: 0.391,184,109"),
    "no header, dates": (b"2024-03-01 12:00:00.391,184,109\n", "line 1 has values in the place of the names"),
    "no arrivals": (
        b"prompt_tokens,output_tokens\n1,2\n",
        "no arrival times .* Its columns are prompt_tokens, output_tok",
    ),
    "other columns": (
        b"a,b\n1,2\n",
        "no arrival times .* and no prompt tokens .* and no output .* Its columns are a, b",
    ),
    "many other columns": (",".join(f"c{n}" for n in range(3000)).encode() + b"\n", "c11 and 2,988 more"),
    "missing number": (
        f"{HEADER}\n1,2,3\n\n2,3,\n".encode(),
        "line 4: output_tokens is missing. Its columns are arrival_s",
    ),
    "short row": (f"{HEADER}\n1,2\n".encode(), "line 2: output_tokens is missing"),
    "word": (f"{HEADER}\n1,ten,3\n".encode(), "line 2: prompt_tokens is no number: ten"),
    "NUL": (HEADER.encode() + b"\n1,2,3" * 99 + b"\n1,\0,3\n", r"line 101: prompt_tokens is no number: \?"),
    "negative": (f"{HEADER}\n1,-2,3\n".encode(), "line 2: prompt_tokens is negative: -2"),
    "negative time": (f"{HEADER}\n-1,2,3\n".encode(), "line 2: arrival_s is negative: -1"),
    "NaN": (f"{HEADER}\n1,nan,3\n".encode(), "line 2: prompt_tokens is not a finite number: nan"),
    "NaN time": (f"{HEADER}\nNaN,2,3\n".encode(), "line 2: arrival_s is not a finite number: NaN"),
    "infinite": (f"{HEADER}\n1,2,inf\n".encode(), "line 2: output_tokens is not a finite number: inf"),
    "mixed times": (f"{HEADER}\n1,2,3\n2024-03-01,2,3\n".encode(), "line 3: date-times and numbers are mixed"),
    "JSON cut off": (lines(ROWS).encode()[:-20], "line 40 is damaged, or no JSON"),
    "JSON broken": (lines(ROWS).replace('{"arrival_s"', '{"arrival_s', 2).encode(), "line 1 is damaged, or no JSON"),
    "JSON lists": (b"[[1, 2, 3]]", "no arrival times .* It has no columns"),
    "JSON of two kinds": (lines(ROWS[:2]).encode() + b"[]\n", "line 3: the value is no object with names"),
    "JSON null": (lines([{**ROWS[0], "prompt_tokens": None}]).encode(), "line 1: prompt_tokens is missing"),
    "JSON true": (lines([{**ROWS[0], "prompt_tokens": True}]).encode(), "line 1: prompt_tokens is"),
    "JSON columns of two lengths": (
        b'{"arrival_s": [1, 2], "prompt_tokens": [1], "output_tokens": [1, 2]}',
        "are not lists of one length",
    ),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_file_that_is_no_trace_is_refused_with_the_line_and_the_columns(tmp_path: Path, kind: str) -> None:
    content, complaint = DAMAGED[kind]
    with pytest.raises(BadInput, match=complaint):
        read_text(tmp_path, content)


@pytest.mark.parametrize(("name", "reason"), [("nowhere.csv", "No such file"), (".", "Is a directory")])
def test_a_path_that_is_no_file_is_refused_by_name(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(BadInput, match=f"{tmp_path / name} cannot be read: {reason}"):
        read_trace_file(tmp_path / name)
