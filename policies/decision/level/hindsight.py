"""Hindsight: the GPUs with which the last hour would have met its service level, by the dry run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from policies.cost.service import TAIL

HOUR_S = 3600.0
"""The time that hindsight covers, in seconds."""
SHORTEST_S = 60.0
"""The shortest time for which there is hindsight, in seconds."""


@dataclass(frozen=True, slots=True)
class ShadowSample:
    """One epoch of a dry run: the real replicas, those of the shadow, and True if the shadow keeps the service level.

    `at` is in seconds. The numbers hold until the next sample.
    """

    at: float
    replicas_real: int
    replicas_needed: int
    keeps_level: bool


@dataclass(frozen=True, slots=True)
class Hindsight:
    """The last `seconds`, an hour at most: mean numbers of GPUs, and the share of the time with the level kept.

    A replica counts as one GPU. `gpus_peak` is the largest number that the shadow needed at any time.
    """

    seconds: float
    gpus_real: float
    gpus_needed: float
    gpus_peak: int
    kept: float

    @property
    def meets_level(self) -> bool:
        """True if the level was kept for all but 1 % of the time."""
        return self.kept >= 1 - TAIL

    def to_json(self) -> dict[str, Any]:
        """The member `hindsight` of `dry_run` in `/mell/state`."""
        return asdict(self) | {"meets_level": self.meets_level}


def hindsight(samples: Sequence[ShadowSample], now: float) -> Hindsight | None:
    """The hindsight at `now`, from samples in the order of time; None before `SHORTEST_S` seconds of samples."""
    begin = now - HOUR_S
    ends = [*(later.at for _, later in pairwise(samples)), now][: len(samples)]
    spans = [(end - max(begin, one.at), one) for one, end in zip(samples, ends, strict=True) if end > begin]
    seconds = sum(span for span, _ in spans)
    if seconds < SHORTEST_S:
        return None
    return Hindsight(
        seconds,
        sum(span * one.replicas_real for span, one in spans) / seconds,
        sum(span * one.replicas_needed for span, one in spans) / seconds,
        max(one.replicas_needed for _, one in spans),
        sum(span for span, one in spans if one.keeps_level) / seconds,
    )
