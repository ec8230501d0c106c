"""Reads a trace, cuts a window out of it, and scales its requests to a model; pure except for `read_trace`.

A trace is a file that the simulator plays, too (`simulator.traces`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from simulator.errors import BadInput, require_not_negative, require_positive
from simulator.traces.rows import ReadWindow
from simulator.traces.trace import TraceAccount, read_trace_file

SECONDS_PER_MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request: its row in the trace, its arrival time, and its lengths, shortened by `cut_tokens` to the context."""

    row: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    cut_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TraceRequests:
    """The requests of a trace file in order of arrival, in trace time, and the account of its reading."""

    requests: tuple[TraceRequest, ...]
    account: TraceAccount


@dataclass(frozen=True, slots=True)
class TraceWindow:
    """The minutes of the trace to replay, and the factor on their times."""

    minutes: float
    start_minute: float = 0.0
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        require_not_negative("start minute", self.start_minute)
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
            raise BadInput(f"The context must hold a prompt and an output token at least, got {self.context}.")
        if self.max_output is not None:
            require_positive("maximum output", self.max_output)


def read_trace(path: Path, minutes: float = math.inf) -> TraceRequests:
    """The requests of the first minutes of a trace file. Raises BadInput."""
    trace = read_trace_file(path, ReadWindow(end_s=minutes * SECONDS_PER_MINUTE), with_names=False)
    rows = zip(trace.numbers, trace.at_s, trace.prompts, trace.outputs, strict=True)
    requests = (
        TraceRequest(number, at_s, max(1, round(prompt)), max(1, round(output)))
        for number, at_s, prompt, output in rows
    )
    return TraceRequests(tuple(requests), trace.account)


def cut(requests: Sequence[TraceRequest], window: TraceWindow) -> tuple[TraceRequest, ...]:
    """The requests of a window, with times from its start, scaled by its factor. Raises BadInput if empty."""
    start_s = window.start_minute * SECONDS_PER_MINUTE
    end_s = start_s + window.minutes * SECONDS_PER_MINUTE
    inside = [request for request in requests if start_s <= request.at_s < end_s]
    if not inside:
        raise BadInput(f"The trace has no request from second {start_s:g} to {end_s:g}.")
    return tuple(replace(request, at_s=(request.at_s - start_s) * window.time_scale) for request in inside)


def fit(requests: Sequence[TraceRequest], lengths: LengthScaling) -> tuple[TraceRequest, ...]:
    """The requests with scaled lengths; requests longer than the context are shortened to it."""
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
    cut_tokens = prompt + output - context
    output = min(output, max(context // 2, context - prompt))
    return replace(request, prompt_tokens=context - output, output_tokens=output, cut_tokens=cut_tokens)
