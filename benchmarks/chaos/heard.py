"""What a client heard of its request, and whether that is what it was promised; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from benchmarks.chaos.offers import Offer

PROMISED_TYPE = "service_unavailable_error"


class Verdict(StrEnum):
    """How one request went."""

    EXACT = "exact"
    TIE = "exact but for a tie"
    """Where two tokens were as likely but for rounding it took the other one, and went on from there exactly."""
    LEFT = "left"
    """Its client left; what it had until then was exact."""
    PROMISED = "promised error"
    """An explicit error where continuing exactly is impossible: seeded sampling whose replica was lost."""
    WRONG = "wrong tokens"
    SILENT = "silent end"
    """The stream ended, or never did, without its last token and without an error."""
    ERROR = "other error"


GOOD = frozenset({Verdict.EXACT, Verdict.TIE, Verdict.LEFT, Verdict.PROMISED})


@dataclass(slots=True)
class Heard:
    """One answer so far. `tokens` is the server's own count, `kind` the type of an error.

    `broken` is what ended the connection other than the server's last word. Times are seconds since the start.
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
        """Take in one event. Raises KeyError or ValueError for one that is not of the API."""
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
        """The server says that it cannot answer."""
        self.error, self.kind = error["message"], error["type"]


def judge(heard: Heard, offer: Offer, want: str, lost: bool) -> tuple[Verdict, str]:
    """How it went, and what of it is not as it should be.

    `want` is the text of an undisturbed run; `lost` is whether a replica was lost while the request ran.
    """
    if not want.startswith(heard.text):
        return Verdict.WRONG, f"{_differ(heard.text, want)} of {len(want)} characters"
    if heard.error is not None:
        promised = offer.seeded and lost and heard.chunks > 0 and heard.kind == PROMISED_TYPE
        if promised and heard.done:
            return Verdict.PROMISED, ""
        return Verdict.ERROR, f"{heard.kind}: {heard.error} (after {heard.chunks} chunks)"
    if heard.left:
        return Verdict.LEFT, ""
    if not heard.done or heard.finish is None:
        return Verdict.SILENT, f"{heard.broken or 'the stream ended'} after {heard.chunks} chunks"
    if heard.text != want or heard.tokens != offer.output or heard.finish != "length":
        return Verdict.WRONG, f"{heard.tokens} of {offer.output} tokens, finish {heard.finish}"
    return Verdict.EXACT, ""


def judge_among(heard: Heard, offer: Offer, wants: Sequence[str]) -> tuple[Verdict, str]:
    """As `judge`, of a request that lost no replica; `wants` are the texts of undisturbed runs, the usual one first."""
    usual, *others = wants
    found = judge(heard, offer, usual, lost=False)
    if found[0] is Verdict.WRONG and any(judge(heard, offer, want, lost=False)[0] is Verdict.EXACT for want in others):
        return Verdict.TIE, ""
    return found


def _differ(text: str, want: str) -> str:
    same = next((i for i, (a, b) in enumerate(zip(text, want, strict=False)) if a != b), min(len(text), len(want)))
    return f"differs from character {same}"
