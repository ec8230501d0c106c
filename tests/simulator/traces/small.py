"""Forty requests, and files that contain them in the known formats."""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

from simulator.traces.trace import FileTrace, read_trace_file

Request = tuple[int, int, int]
"""Milliseconds, prompt tokens and output tokens."""


def _made() -> list[Request]:
    chance, at_ms, requests = Random(3), 391, []
    for _ in range(40):
        requests.append((at_ms, chance.randint(80, 850), chance.randint(15, 180)))
        at_ms += chance.randint(40, 1300)
    return requests


REQUESTS: Sequence[Request] = _made()
BEGIN = datetime(2024, 3, 1, 12, tzinfo=UTC)


def table(header: str, row: Callable[[int, Request], Sequence[object]], separator: str = ",") -> str:
    """A CSV file."""
    text = io.StringIO()
    rows = csv.writer(text, delimiter=separator, lineterminator="\n")
    rows.writerow(header.split(","))
    rows.writerows(row(number, request) for number, request in enumerate(REQUESTS))
    return text.getvalue()


def objects(member: Callable[[int, Request], Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of a JSON file."""
    return [member(number, request) for number, request in enumerate(REQUESTS)]


def lines(rows: Sequence[Mapping[str, Any]]) -> str:
    """A file of JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def moment(at_ms: int, form: str) -> str:
    """A date-time."""
    text = datetime.fromtimestamp(BEGIN.timestamp() + at_ms / 1000, UTC).strftime(form)
    return text.replace("!", f"{at_ms % 1000:03d}")


OWN = table("arrival_s,prompt_tokens,output_tokens", lambda n, r: (r[0] / 1000, r[1], r[2]))


def read_text(folder: Path, content: str | bytes, name: str = "trace", **options: Any) -> FileTrace:
    """The requests of a file with this content."""
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_trace_file(path, **options)


def requests_of(trace: FileTrace) -> list[tuple[float, float, float]]:
    """Times, prompts and outputs."""
    return list(zip(trace.at_s, trace.prompts, trace.outputs, strict=True))


EXPECTED = [
    (round((at_ms - REQUESTS[0][0]) / 1000, 6), float(prompt), float(output)) for at_ms, prompt, output in REQUESTS
]
"""The requests as they are read."""
