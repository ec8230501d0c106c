"""Reads a trace, cuts a window out of it, and scales its requests to a model; pure except for `read_trace`.

A trace is a gzipped CSV with the columns `arrival_s,prompt_tokens,output_tokens`, one row per request.
"""

import csv
import gzip
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
SECONDS_PER_MINUTE = 60.0


class ReplayInputError(Exception):
    """Input that cannot be replayed; the message is one sentence with the reason."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: its row in the trace, its arrival time and its lengths; `clipped` if shortened to the context."""

    row: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    clipped: bool = False


@dataclass(frozen=True, slots=True)
class TraceWindow:
    """The minutes of the trace to replay, and the factor on their times."""

    minutes: float
    start_minute: float = 0.0
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.start_minute < math.inf:
            raise ReplayInputError(f"The start minute must be 0 or more, got {self.start_minute:g}.")
        require_positive("number of minutes", self.minutes)
        require_positive("time scale", self.time_scale)


@dataclass(frozen=True, slots=True)
class LengthScaling:
    """Scaling of token counts to the model; None means no limit."""

    token_scale: float = 1.0
    context: int | None = None
    max_output: int | None = None

    def __post_init__(self) -> None:
        require_positive("token scale", self.token_scale)
        if self.context is not None and self.context < 2:
            raise ReplayInputError(f"The context must hold a prompt and an output token at least, got {self.context}.")
        if self.max_output is not None:
            require_positive("maximum output", self.max_output)


def require_positive(name: str, value: float) -> None:
    """Raise ReplayInputError for zero, negative numbers, infinity and NaN."""
    if not 0 < value < math.inf:
        raise ReplayInputError(f"The {name} must be a number greater than 0, got {value:g}.")


def read_trace(path: Path) -> tuple[TraceRequest, ...]:
    """All requests of a trace file, in trace time and in order of arrival. Raises ReplayInputError."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as lines:
            rows = csv.DictReader(lines)
            missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
            if missing:
                raise ReplayInputError(f"{path} lacks the column(s) {', '.join(missing)}.")
            requests = [_request(path, number, row) for number, row in enumerate(rows)]
    except gzip.BadGzipFile:
        raise ReplayInputError(f"{path} is not a gzip file.") from None
    except OSError as error:
        raise ReplayInputError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise ReplayInputError(f"{path} is damaged: {error}.") from None
    return tuple(sorted(requests, key=lambda request: (request.at_s, request.row)))


def _request(path: Path, number: int, row: Mapping[str, str | None]) -> TraceRequest:
    try:
        at_s, prompt, output = (row[name] or "" for name in COLUMNS)
        request = TraceRequest(number, float(at_s), int(prompt), int(output))
    except ValueError:
        raise ReplayInputError(f"{path}: request {number} is not three numbers ({', '.join(COLUMNS)}).") from None
    if not math.isfinite(request.at_s) or min(request.at_s, request.prompt_tokens, request.output_tokens) < 0:
        raise ReplayInputError(f"{path}: request {number} has a negative or infinite value.")
    return request


def cut(requests: Sequence[TraceRequest], window: TraceWindow) -> tuple[TraceRequest, ...]:
    """The requests of a window, with times from its start, scaled by its factor. Raises ReplayInputError if empty."""
    start_s = window.start_minute * SECONDS_PER_MINUTE
    end_s = start_s + window.minutes * SECONDS_PER_MINUTE
    inside = [request for request in requests if start_s <= request.at_s < end_s]
    if not inside:
        raise ReplayInputError(f"The trace has no request from second {start_s:g} to {end_s:g}.")
    return tuple(replace(request, at_s=(request.at_s - start_s) * window.time_scale) for request in inside)


def fit(requests: Sequence[TraceRequest], lengths: LengthScaling) -> tuple[TraceRequest, ...]:
    """The requests with scaled lengths; requests longer than the context are shortened and marked as clipped."""
    return tuple(_fit_one(request, lengths) for request in requests)


def _fit_one(request: TraceRequest, lengths: LengthScaling) -> TraceRequest:
    prompt = max(1, round(request.prompt_tokens * lengths.token_scale))
    output = max(1, round(request.output_tokens * lengths.token_scale))
    if lengths.max_output is not None:
        output = min(output, lengths.max_output)
    context = lengths.context
    if context is None or prompt + output <= context:
        return replace(request, prompt_tokens=prompt, output_tokens=output)
    # A replay measures answers, so a long prompt must not displace them: an answer may take half of the
    # context, or more if a short prompt leaves more.
    output = min(output, max(context // 2, context - prompt))
    return replace(request, prompt_tokens=context - output, output_tokens=output, clipped=True)
