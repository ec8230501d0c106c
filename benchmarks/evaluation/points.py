"""Outcomes that cost two things, and which of them no other beats."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Point:
    """What a policy with some options came to, on two axes on which less is better; `label` says what is special."""

    policy: str
    x: float
    y: float
    label: str = ""


def front(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats, from left to right."""
    return sorted(
        (each for each in points if not any(beats(other, each) for other in points)),
        key=lambda each: (each.x, each.policy),
    )


def beats(one: Point, other: Point) -> bool:
    """Whether one is better on an axis and no worse on the other."""
    return one.x <= other.x and one.y <= other.y and (one.x, one.y) != (other.x, other.y)


def height(line: Sequence[Point], x: float) -> float | None:
    """Where a line through the points is at `x`, straight between neighbours; None left and right of all of them."""
    xs, ys = zip(*sorted((each.x, each.y) for each in line), strict=True)
    return float(np.interp(x, xs, ys)) if xs[0] <= x <= xs[-1] else None
