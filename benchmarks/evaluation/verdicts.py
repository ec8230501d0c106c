"""Verdicts on claims, derived from measured numbers by rules."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

NEARLY = 0.8
PARTLY = 0.4
"""The shares of the promised value from which on a claim "up to" reproduces, and reproduces partly."""

RULES = (
    f'A claim about every workload reproduces if it holds on all, partly if on some. A claim "up to" reproduces if our '
    f"best is at least {NEARLY:.0%} of the promise, partly from {PARTLY:.0%} on. A limit reproduces if nothing exceeds "
    "it."
)


class Verdict(StrEnum):
    """The verdict on a claim."""

    REPRODUCES = "reproduces"
    PARTLY = "partly"
    NOT = "does not"


@dataclass(frozen=True, slots=True)
class Finding:
    """Our number as text, and the verdict that follows from it."""

    number: str
    verdict: Verdict


def holds_on(held: Sequence[bool]) -> Verdict:
    """The verdict on a claim about every workload. Raises `ValueError` if there are no workloads."""
    if not held:
        raise ValueError("a claim about no workloads can be neither true nor false")
    if all(held):
        return Verdict.REPRODUCES
    return Verdict.PARTLY if any(held) else Verdict.NOT


def up_to(best: float, promised: float) -> Verdict:
    """The verdict on a claim that a metric reaches `promised` at best."""
    if best >= NEARLY * promised:
        return Verdict.REPRODUCES
    return Verdict.PARTLY if best >= PARTLY * promised else Verdict.NOT


def within(most: float, limit: float) -> Verdict:
    """The verdict on a claim that a metric never exceeds a limit."""
    return Verdict.REPRODUCES if most <= limit else Verdict.NOT
