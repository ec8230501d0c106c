"""A client's view of an answer, and the verdict on it; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from benchmarks.chaos.offers import Offer

PROMISED_TYPE = "InternalServerError"
"""The type of vLLM's error event for an answer that cannot be completed."""


class StreamVerdict(StrEnum):
    """The verdict on one request."""

    EXACT = "exact"
    TIE = "exact but for a tie"
    """Of two tokens equally likely up to rounding it has the other one, and is exact from there on."""
    WHOLE = "whole"
    """It has all its tokens; nothing is known about its text."""
    LEFT = "left"
    """The client closed its connection; the answer was exact until then."""
    PROMISED = "promised error"
    """An explicit error where an exact continuation is impossible: seeded sampling after the loss of its replica."""
    WRONG = "wrong tokens"
    SILENT = "silent end"
    """The stream ended or stalled without its last token and without an error."""
    ERROR = "other error"


GOOD = frozenset(
    {StreamVerdict.EXACT, StreamVerdict.TIE, StreamVerdict.WHOLE, StreamVerdict.LEFT, StreamVerdict.PROMISED}
)


@dataclass(slots=True)
class StreamedAnswer:
    """A streamed answer so far. Times are seconds of the event loop.

    `tokens` is the server's count in its usage, `kind` the type of an error. `done` is set by a regular end of the
    stream, `broken` is the reason for an irregular one.
    """

    sent_s: float = 0.0
    ended_s: float = 0.0
    text: str = ""
    chunks: int = 0
    finish: str | None = None
    tokens: int | None = None
    error: str | None = None
    kind: str | None = None
    done: bool = False
    left: bool = False
    broken: str | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        """Add one event. Raises KeyError or ValueError for an event that is not part of the API."""
        if "error" in event:
            self.fail(event["error"])
        elif event["choices"]:
            (choice,) = event["choices"]
            self.text += choice["text"]
            self.chunks += 1
            self.finish = choice["finish_reason"] or self.finish
        else:
            self.tokens = event["usage"]["completion_tokens"]

    def fail(self, error: dict[str, str]) -> None:
        """Add the server's error."""
        self.error, self.kind = error["message"], error["type"]


def judge(answer: StreamedAnswer, offer: Offer, want: str, lost: bool) -> tuple[StreamVerdict, str]:
    """The verdict on an answer, and the reason for a bad one.

    `want` is the text of an undisturbed run; `lost` is True if a replica was lost while the request ran.
    """
    if not want.startswith(answer.text):
        return StreamVerdict.WRONG, f"{_differ(answer.text, want)} of {len(want)} characters"
    if answer.error is not None:
        promised = offer.seeded and lost and answer.chunks > 0 and answer.kind == PROMISED_TYPE
        if promised and answer.done:
            return StreamVerdict.PROMISED, ""
        return StreamVerdict.ERROR, f"{answer.kind}: {answer.error} (after {answer.chunks} chunks)"
    if answer.left:
        return StreamVerdict.LEFT, ""
    if not answer.done or answer.finish is None:
        return StreamVerdict.SILENT, f"{answer.broken or 'the stream ended'} after {answer.chunks} chunks"
    if answer.text != want or answer.tokens != offer.output or answer.finish != "length":
        return StreamVerdict.WRONG, f"{answer.tokens} of {offer.output} tokens, finish {answer.finish}"
    return StreamVerdict.EXACT, ""


def judge_among(answer: StreamedAnswer, offer: Offer, wants: Sequence[str]) -> tuple[StreamVerdict, str]:
    """`judge` for several possible texts of undisturbed runs, the usual one first; any text is right if there are none.

    No replica was lost.
    """
    if not wants:
        verdict, reason = judge(answer, offer, answer.text, lost=False)
        return (StreamVerdict.WHOLE if verdict is StreamVerdict.EXACT else verdict), reason
    usual, *others = wants
    found = judge(answer, offer, usual, lost=False)
    if found[0] is StreamVerdict.WRONG and any(
        judge(answer, offer, want, lost=False)[0] is StreamVerdict.EXACT for want in others
    ):
        return StreamVerdict.TIE, ""
    return found


def _differ(text: str, want: str) -> str:
    same = next((i for i, (a, b) in enumerate(zip(text, want, strict=False)) if a != b), min(len(text), len(want)))
    return f"differs from character {same}"
