"""What ingresses send to replicas and to the scheduler, many at a time."""

from dataclasses import dataclass

from migration.protocol.request import RequestSpec
from policies.cluster.changes import Arrival
from policies.model import ReplicaId


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
