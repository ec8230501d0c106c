"""One streamed answer, as events at times; pure: the events and the clock are handed in.

A stream is whole when it ended with `[DONE]` and carried as many tokens as were asked for. Every prompt is
sent with `ignore_eos`, so fewer tokens mean that the endpoint lost some.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from app.client.errors import message_in
from app.replay.trace import Arrival


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    BROKEN = "broken"
    """The answer began, and ended without `[DONE]` or with too few tokens."""
    FAILED = "failed"
    """No answer began: the endpoint could not be reached or refused."""
    CANCELLED = "cancelled"
    """The replay was interrupted first."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What went wrong: a kind to count by, and the message of this one."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Record:
    """What was measured of one request; times are seconds since the replay began.

    `tokens` is the endpoint's own count, None where it sent none. `chunks_s` holds the time of each SSE
    event with output, however many tokens it carried.
    """

    arrival: Arrival
    sent_s: float
    ended_s: float
    chunks_s: tuple[float, ...]
    tokens: int | None
    outcome: Outcome
    fault: Fault | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, None if there was none."""
        return self.chunks_s[0] - self.sent_s if self.chunks_s else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Times between one chunk and the next, as they are."""
        return tuple(later - earlier for earlier, later in pairwise(self.chunks_s))


class Stream:
    """What has been seen of one answer so far; `record` may be asked at any moment."""

    def __init__(self, arrival: Arrival, sent_s: float) -> None:
        self.arrival = arrival
        self.sent_s = sent_s
        self.ended_s: float | None = None
        self.fault: Fault | None = None
        self._opened = False
        self._chunks_s: list[float] = []
        self._tokens: int | None = None

    def open(self) -> None:
        """The endpoint accepted the request and is about to stream."""
        self._opened = True

    def feed(self, event: Mapping[str, Any], now_s: float) -> None:
        """Take in one event."""
        if event.get("error"):
            self._blame("error event", message_in(event) or str(event)[:200])
        else:
            self._take(event, now_s)

    def _take(self, event: Mapping[str, Any], now_s: float) -> None:
        # The last event of some servers has a finish reason and no output: it is not a chunk.
        choices = event.get("choices") or ()
        if any(choice.get("text") or choice.get("finish_reason") is None for choice in choices):
            self._chunks_s.append(now_s)
        usage = event.get("usage")
        if usage:
            self._tokens = usage.get("completion_tokens")

    def fail(self, kind: str, message: str, now_s: float) -> None:
        """The request ended by a fault."""
        self._blame(kind, message)
        self.ended_s = now_s

    def end(self, now_s: float) -> None:
        """The answer ended with `[DONE]`; judge whether it was whole."""
        self.ended_s = now_s
        wanted = self.arrival.output_tokens
        if self._tokens is not None and self._tokens < wanted:
            self._blame("too few tokens", f"{self._tokens} of {wanted} tokens arrived")

    def _blame(self, kind: str, message: str) -> None:
        # The first fault is the cause, later ones its consequences.
        self.fault = self.fault or Fault(kind, message)

    def record(self, now_s: float) -> Record:
        """Everything measured until now."""
        return Record(
            arrival=self.arrival,
            sent_s=self.sent_s,
            ended_s=now_s if self.ended_s is None else self.ended_s,
            chunks_s=tuple(self._chunks_s),
            tokens=self._tokens,
            outcome=self._outcome(),
            fault=self.fault,
        )

    def _outcome(self) -> Outcome:
        if self.fault is not None:
            return Outcome.BROKEN if self._opened else Outcome.FAILED
        return Outcome.CANCELLED if self.ended_s is None else Outcome.OK
