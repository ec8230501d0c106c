"""What a replay saw, handed from the shell to the report."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.replay.state import Sample
from app.replay.stream import Fault, Record


@dataclass(frozen=True, slots=True)
class Moves:
    """What became of the moves that the replay itself asked for; the last may have had no answer yet."""

    asked: int = 0
    accepted: int = 0
    rejected: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything that a replay saw.

    `missing` says, by path, what the endpoint does not offer and why this is believed; `missed` what could
    not be had at some moment though it was offered.
    """

    records: tuple[Record, ...]
    samples: tuple[Sample, ...] = ()
    migrations: tuple[Mapping[str, Any], ...] = ()
    moves: Moves = Moves()
    missing: Mapping[str, str] = field(default_factory=dict)
    missed: tuple[Fault, ...] = ()
    interrupted: bool = False
