"""Reading a trace, cutting a window out of it and scaling it to a model; pure but for opening the file.

A trace is a gzipped CSV with the columns `arrival_s,prompt_tokens,output_tokens`, one row per request.
"""

import csv
import gzip
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from app.replay.errors import BadInput

COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
SECONDS_PER_MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come: its row in the trace, when it is due and how long it is."""

    row: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    clipped: bool = False


@dataclass(frozen=True, slots=True)
class Window:
    """Which minutes of the trace to replay, and by what factor to stretch them."""

    minutes: float
    start_minute: float = 0.0
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.start_minute < math.inf:
            raise BadInput(f"The start minute must be 0 or more, got {self.start_minute:g}.")
        require_positive("number of minutes", self.minutes)
        require_positive("time scale", self.time_scale)


@dataclass(frozen=True, slots=True)
class Lengths:
    """How token counts become what the model can take; None means no such limit."""

    token_scale: float = 1.0
    context: int | None = None
    max_output: int | None = None

    def __post_init__(self) -> None:
        require_positive("token scale", self.token_scale)
        if self.context is not None and self.context < 2:
            raise BadInput(f"The context must hold a prompt and an output token at least, got {self.context}.")
        if self.max_output is not None:
            require_positive("maximum output", self.max_output)


def require_positive(what: str, value: float) -> None:
    """Refuse zero, negative numbers, infinity and NaN."""
    if not 0 < value < math.inf:
        raise BadInput(f"The {what} must be a number greater than 0, got {value:g}.")


def read_trace(path: Path) -> tuple[Arrival, ...]:
    """All requests of a trace file, in trace time and in order of arrival."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as lines:
            rows = csv.DictReader(lines)
            missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
            if missing:
                raise BadInput(f"{path} lacks the column(s) {', '.join(missing)}.")
            arrivals = [_arrival(path, number, row) for number, row in enumerate(rows)]
    except gzip.BadGzipFile:
        raise BadInput(f"{path} is not a gzip file.") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}.") from None
    except (EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path} is damaged: {error}.") from None
    return tuple(sorted(arrivals, key=lambda arrival: (arrival.at_s, arrival.row)))


def _arrival(path: Path, number: int, row: Mapping[str, str | None]) -> Arrival:
    try:
        at_s, prompt, output = (row[name] or "" for name in COLUMNS)
        arrival = Arrival(number, float(at_s), int(prompt), int(output))
    except ValueError:
        raise BadInput(f"{path}: request {number} is not three numbers ({', '.join(COLUMNS)}).") from None
    if not math.isfinite(arrival.at_s) or min(arrival.at_s, arrival.prompt_tokens, arrival.output_tokens) < 0:
        raise BadInput(f"{path}: request {number} has a negative or infinite value.")
    return arrival


def cut(arrivals: Sequence[Arrival], window: Window) -> tuple[Arrival, ...]:
    """The requests of a window, with times counted from its start and stretched by its factor."""
    start_s = window.start_minute * SECONDS_PER_MINUTE
    end_s = start_s + window.minutes * SECONDS_PER_MINUTE
    inside = [arrival for arrival in arrivals if start_s <= arrival.at_s < end_s]
    if not inside:
        raise BadInput(f"The trace has no request from second {start_s:g} to {end_s:g}.")
    return tuple(replace(arrival, at_s=(arrival.at_s - start_s) * window.time_scale) for arrival in inside)


def fit(arrivals: Sequence[Arrival], lengths: Lengths) -> tuple[Arrival, ...]:
    """The same requests with scaled lengths; what exceeds the context is clipped and marked so."""
    return tuple(_fit_one(arrival, lengths) for arrival in arrivals)


def _fit_one(arrival: Arrival, lengths: Lengths) -> Arrival:
    prompt = max(1, round(arrival.prompt_tokens * lengths.token_scale))
    output = max(1, round(arrival.output_tokens * lengths.token_scale))
    if lengths.max_output is not None:
        output = min(output, lengths.max_output)
    context = lengths.context
    if context is None or prompt + output <= context:
        return replace(arrival, prompt_tokens=prompt, output_tokens=output)
    # A long prompt must not squeeze out the answer, which is what a replay is about: the answer may
    # take up to half of the context, or more where a short prompt leaves more.
    output = min(output, max(context // 2, context - prompt))
    return replace(arrival, prompt_tokens=context - output, output_tokens=output, clipped=True)
