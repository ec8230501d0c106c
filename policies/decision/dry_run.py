"""What a dry run comes to, as numbers and as a sentence."""

from dataclasses import asdict, dataclass
from typing import Any

from policies.model import Bytes, Tokens

_DURATIONS = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))
_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a scheduler that only observes would have done in `since_s` seconds.

    `replicas_now` exist and `replicas_needed` would, `requests_waiting` would wait for a place there. The GPU-seconds
    are the integrals of the two numbers over time, so a replica counts as one GPU. `moves` and their tokens are what
    it would have taken; `moved_bytes` is their KV, None as long as no replica has told what a token takes.
    """

    since_s: float
    replicas_now: int
    replicas_needed: int
    requests_waiting: int
    gpu_seconds_real: float
    gpu_seconds_needed: float
    moves: int
    moved_tokens: Tokens
    moved_bytes: Bytes | None = None

    @property
    def gpu_seconds_saved(self) -> float:
        """Below zero where acting would have taken more: requests queue while replicas could be added."""
        return self.gpu_seconds_real - self.gpu_seconds_needed

    def to_json(self) -> dict[str, Any]:
        """As `/mell/state` shows it."""
        return asdict(self) | {"gpu_seconds_saved": self.gpu_seconds_saved, "said": said(self)}


def said(dry_run: DryRun) -> str:
    """For people: "would have freed 3 GPUs for 41 minutes: 212 moves, 1.4 GiB".

    The number of GPUs is the mean over all of the time.
    """
    if dry_run.since_s <= 0:
        return "has just begun"
    moves = _counted(dry_run.moves, "move")
    cost = moves if dry_run.moved_bytes is None else f"{moves}, {_size(dry_run.moved_bytes)}"
    return f"would have {_saved(dry_run.gpu_seconds_saved / dry_run.since_s)} {_duration(dry_run.since_s)}: {cost}"


def _saved(gpus: float) -> str:
    amount = _counted(round(abs(gpus), 1), "GPU")
    if amount == "0 GPUs":
        return "freed no GPU in"
    return f"freed {amount} for" if gpus > 0 else f"taken {amount} more for"


def _duration(seconds: float) -> str:
    """In the largest unit of which there are at least two."""
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
