"""Arguments and results of calls between deployments."""

from dataclasses import dataclass, field
from typing import Any

from migration.protocol.request import RequestSpec, StreamEvent
from policies.cluster.changes import Arrival
from policies.model import ReplicaId

Batch = tuple[StreamEvent, ...]
"""The events that a replica publishes to one ingress between two reads."""


@dataclass(frozen=True, slots=True)
class Submission:
    """Run a request under `hop`, after the output tokens it already has, which `model` gave (None: there are none)."""

    spec: RequestSpec
    hop: int
    outputs: tuple[int, ...]
    model: str | None = None


@dataclass(frozen=True, slots=True)
class PlaceCall:
    """Where does this request go, given that it must not go to `exclude`?"""

    arrival: Arrival
    label: str
    exclude: tuple[ReplicaId, ...]


@dataclass(frozen=True, slots=True)
class MoveAccepted:
    """The migration has begun; its record gets its outcome."""

    id: str


@dataclass(frozen=True, slots=True)
class MoveRejected:
    """Nothing was begun. `status` is the HTTP status that says so."""

    status: int
    message: str
    details: dict[str, Any] = field(default_factory=dict)


MoveAnswer = MoveAccepted | MoveRejected
