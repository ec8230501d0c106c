"""What the scheduler answers to an order to move a request."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class MoveAccepted:
    """The migration has begun; its outcome is told by its record."""

    id: str


@dataclass(frozen=True, slots=True)
class MoveRejected:
    """Nothing was begun. `status` is the HTTP status that says so."""

    status: int
    message: str
    details: dict[str, Any] = field(default_factory=dict)


MoveAnswer = MoveAccepted | MoveRejected
