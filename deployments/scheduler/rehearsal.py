"""Mode `observe`: a dry run beside the cluster, with its figures as metrics, in the log, and in `/mell/state`."""

import logging
from dataclasses import replace
from typing import Any

from deployments.metrics.telemetry import Telemetry
from policies.decision.level.hindsight import HOUR_S, Hindsight
from policies.decision.observation import PoolReport
from policies.decision.shadow import DryRun, Shadow
from policies.paths.beliefs import Profile

log = logging.getLogger("ray.serve")

LOG_EVERY_S = 300.0
"""The time between two log lines, in seconds of the dry run."""

_DURATIONS = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))
_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


class Rehearsal:
    """Runs the shadow's epochs beside the scheduler's, and exports the figures."""

    def __init__(self, shadow: Shadow, telemetry: Telemetry) -> None:
        self._shadow = shadow
        self._telemetry = telemetry
        self._profile: Profile | None = None
        self._logged_s = 0.0

    def epoch(self, seen: PoolReport, now: float) -> None:
        """Run one epoch of the shadow on the scheduler's observation at `now`."""
        self._profile = self._profile or next(iter(seen.profiles.values()), None)
        self._shadow.observe(seen, now)
        so_far = self.so_far
        if so_far is None:
            return
        self._telemetry.dry_run(so_far)
        if so_far.since_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = so_far.since_s
            log.info("dry run: %s", summary(so_far))

    @property
    def so_far(self) -> DryRun | None:
        """The figures as of the last epoch; with bytes if a replica has reported the size of a token's KV."""
        so_far = self._shadow.so_far
        if so_far is None or self._profile is None:
            return so_far
        return replace(so_far, moved_bytes=self._profile.size(so_far.moved_tokens))

    def to_json(self) -> dict[str, Any] | None:
        """The member `dry_run` of `/mell/state`; None before the dry run begins."""
        so_far = self.so_far
        return None if so_far is None else so_far.to_json() | {"said": summary(so_far)}


def summary(dry_run: DryRun) -> str:
    """The figures for people: "would have freed 3 GPUs for 41 minutes: 212 moves, 1.4 GiB".

    The number of GPUs is the mean over the whole time. With a service level, a second sentence is on the last hour.
    """
    if dry_run.since_s <= 0:
        return "has just begun"
    moves = _counted(dry_run.moves, "move")
    cost = moves if dry_run.moved_bytes is None else f"{moves}, {_size(dry_run.moved_bytes)}"
    whole = f"would have {_saved(dry_run.gpu_seconds_saved / dry_run.since_s)} {_duration(dry_run.since_s)}: {cost}"
    return whole if dry_run.hindsight is None else f"{whole}; {in_hindsight(dry_run.hindsight)}"


def in_hindsight(found: Hindsight) -> str:
    """The hindsight for people: "the last hour would have met the service level with 5 GPUs instead of 7".

    Both numbers are means over the time.
    """
    last = "hour" if found.seconds >= HOUR_S - 1 else _duration(found.seconds)
    gpus = f"{_counted(round(found.gpus_needed, 1), 'GPU')} instead of {round(found.gpus_real, 1):g}"
    if found.meets_level:
        return f"the last {last} would have met the service level with {gpus}"
    return f"the last {last} would have missed the service level for {1 - found.kept:.0%} of the time with {gpus}"


def _saved(gpus: float) -> str:
    amount = _counted(round(abs(gpus), 1), "GPU")
    if amount == "0 GPUs":
        return "freed no GPU in"
    return f"freed {amount} for" if gpus > 0 else f"taken {amount} more for"


def _duration(seconds: float) -> str:
    """The duration in the largest unit that gives a number of at least two."""
    for unit_s, name in _DURATIONS:
        if seconds >= 2 * unit_s:
            return _counted(round(seconds / unit_s), name)
    return _counted(round(seconds), "second")


def _size(count: int) -> str:
    for unit, name in _SIZES:
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"


def _counted(number: float, noun: str) -> str:
    return f"{number:g} {noun}{'' if number == 1 else 's'}"
