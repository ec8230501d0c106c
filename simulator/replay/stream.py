"""Measurement of one streamed answer from timed events; pure.

A stream is whole if it ends with `[DONE]` and has the requested number of tokens. Every request sets `ignore_eos`, so
a lower number means that the endpoint lost tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from app.client.errors import message_in
from simulator.replay.trace import TraceRequest


class StreamOutcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    BROKEN = "broken"
    """The answer began but ended without `[DONE]` or with too few tokens."""
    FAILED = "failed"
    """No answer began: the endpoint was unreachable or refused."""
    CANCELLED = "cancelled"
    """The replay was interrupted first."""


@dataclass(frozen=True, slots=True)
class StreamFault:
    """A failure: its kind, for counting, and its message."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Record:
    """Measurements of one request; times in seconds since the start of the replay.

    `tokens` is the endpoint's own count, None without one. `chunks_s` are the times of SSE events with output; an event
    may carry several tokens.
    """

    request: TraceRequest
    sent_s: float
    ended_s: float
    chunks_s: tuple[float, ...]
    tokens: int | None
    outcome: StreamOutcome
    fault: StreamFault | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, None without one."""
        return self.chunks_s[0] - self.sent_s if self.chunks_s else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Times between successive chunks."""
        return tuple(later - earlier for earlier, later in pairwise(self.chunks_s))


class AnswerStream:
    """Measures one answer; `record` may be called at any time."""

    def __init__(self, request: TraceRequest, sent_s: float) -> None:
        self.request = request
        self.sent_s = sent_s
        self.ended_s: float | None = None
        self.fault: StreamFault | None = None
        self._opened = False
        self._chunks_s: list[float] = []
        self._tokens: int | None = None

    def open(self) -> None:
        """The endpoint has accepted the request."""
        self._opened = True

    def feed(self, event: Mapping[str, Any], now_s: float) -> None:
        """Process one event."""
        if event.get("error"):
            self._set_fault("error event", message_in(event) or str(event)[:200])
        else:
            self._count(event, now_s)

    def _count(self, event: Mapping[str, Any], now_s: float) -> None:
        # The last event of some servers has a finish reason but no output, so it is not a chunk.
        choices = event.get("choices") or ()
        if any(choice.get("text") or choice.get("finish_reason") is None for choice in choices):
            self._chunks_s.append(now_s)
        usage = event.get("usage")
        if usage:
            self._tokens = usage.get("completion_tokens")

    def fail(self, kind: str, message: str, now_s: float) -> None:
        """The request has failed."""
        self._set_fault(kind, message)
        self.ended_s = now_s

    def end(self, now_s: float) -> None:
        """The answer has ended with `[DONE]`; too few tokens are a fault."""
        self.ended_s = now_s
        wanted = self.request.output_tokens
        if self._tokens is not None and self._tokens < wanted:
            self._set_fault("too few tokens", f"{self._tokens} of {wanted} tokens arrived")

    def _set_fault(self, kind: str, message: str) -> None:
        # The first fault is the cause of later ones.
        self.fault = self.fault or StreamFault(kind, message)

    def record(self, now_s: float) -> Record:
        """All measurements until now."""
        return Record(
            request=self.request,
            sent_s=self.sent_s,
            ended_s=now_s if self.ended_s is None else self.ended_s,
            chunks_s=tuple(self._chunks_s),
            tokens=self._tokens,
            outcome=self._outcome(),
            fault=self.fault,
        )

    def _outcome(self) -> StreamOutcome:
        if self.fault is not None:
            return StreamOutcome.BROKEN if self._opened else StreamOutcome.FAILED
        return StreamOutcome.CANCELLED if self.ended_s is None else StreamOutcome.OK
