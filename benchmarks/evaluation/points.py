"""Outcomes with two costs, and their Pareto front."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """The outcome of a policy with its options, on two axes on which less is better."""

    policy: str
    x: float
    y: float
    label: str = ""


def front(points: Sequence[Point]) -> list[Point]:
    """The Pareto front, from left to right."""
    return sorted(
        (each for each in points if not any(beats(other, each) for other in points)),
        key=lambda each: (each.x, each.policy),
    )


def beats(one: Point, other: Point) -> bool:
    """True if `one` is better on an axis and no worse on the other."""
    return one.x <= other.x and one.y <= other.y and (one.x, one.y) != (other.x, other.y)
