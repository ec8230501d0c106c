"""What `/mell/state` and `/mell/migrations` say, as values; pure.

The documents come from another process, maybe of another version: members that are not known are passed over, and one
that is missing raises KeyError, TypeError or ValueError.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from migration.record import MigrationRecord, Outcome
from policies.causes import Cause
from policies.model import Phase, ReplicaState
from policies.plan import Path, Reason

Records = tuple[MigrationRecord, ...]
_FIELDS = frozenset(field.name for field in fields(MigrationRecord))


@dataclass(frozen=True, slots=True)
class Request:
    """A request on a replica; `tokens` is its context so far, prompt included."""

    id: str
    label: str
    tokens: int
    phase: str
    hop: int

    @property
    def name(self) -> str:
        """What the client calls it, else its id: either may be given to `mell move`."""
        return self.label or self.id


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica; tokens are those of its KV cache, 0 while it starts."""

    id: str
    state: str
    node: str
    used_tokens: int
    capacity_tokens: int
    preemptions: int
    requests: tuple[Request, ...]

    @property
    def waiting(self) -> int:
        """Requests queued without KV blocks."""
        return sum(request.phase == Phase.WAITING for request in self.requests)

    @property
    def used_share(self) -> float:
        """Share of the KV cache in use, 0 to 1; 0 while its size is not known."""
        return min(1.0, self.used_tokens / self.capacity_tokens) if self.capacity_tokens else 0.0


@dataclass(frozen=True, slots=True)
class State:
    """`/mell/state`. `as_of` is in seconds since 1970, 0 as long as no scheduler has said anything.

    `dry_run` is what acting would have come to, where the scheduler only observes.
    """

    as_of: float
    mode: str
    policy: str | None
    wanted: int | None
    dry_run: str | None
    resting: tuple[tuple[str, str], ...]
    replicas: tuple[Replica, ...]

    @property
    def running(self) -> tuple[Replica, ...]:
        """The replicas that take requests."""
        return tuple(r for r in self.replicas if r.state == ReplicaState.RUNNING)

    def requests(self) -> Mapping[str, Request]:
        """All requests by id; one that is being handed over counts as what its later run says."""
        found: dict[str, Request] = {}
        for request in (request for replica in self.replicas for request in replica.requests):
            if request.id not in found or found[request.id].hop < request.hop:
                found[request.id] = request
        return found

    def replica(self, id: str) -> Replica | None:
        """The replica of that id, None if there is none."""
        return next((replica for replica in self.replicas if replica.id == id), None)


def parse_state(document: Any) -> State:
    """Read `/mell/state`."""
    return State(
        as_of=float(document["as_of"]),
        mode=str(document["mode"]),
        # What follows is not there before the scheduler has said anything.
        policy=document.get("policy"),
        wanted=document.get("wanted_replicas"),
        dry_run=document.get("dry_run", {}).get("said"),
        resting=tuple((str(source), str(target)) for source, target in document.get("resting_pairs", ())),
        replicas=tuple(_replica(item) for item in document["replicas"]),
    )


def parse_migrations(document: Any) -> Records:
    """Read `/mell/migrations`: newest first."""
    return tuple(_record(item) for item in document["migrations"])


def _replica(item: Mapping[str, Any]) -> Replica:
    return Replica(
        id=str(item["id"]),
        state=str(item["state"]),
        node=str(item["node"]),
        used_tokens=int(item["used_tokens"] or 0),
        capacity_tokens=int(item["capacity_tokens"] or 0),
        preemptions=int(item["preemptions"]),
        requests=tuple(_request(request) for request in item["requests"]),
    )


def _request(item: Mapping[str, Any]) -> Request:
    return Request(
        id=str(item["id"]),
        label=str(item["label"]),
        tokens=int(item["tokens"]),
        phase=str(item["phase"]),
        hop=int(item["hop"]),
    )


def _record(item: Mapping[str, Any]) -> MigrationRecord:
    known = {name: value for name, value in item.items() if name in _FIELDS}
    outcome, cause = known.get("outcome"), known.get("cause")
    known |= {
        "path": Path(known["path"]),
        "trigger": Reason(known["trigger"]),
        "outcome": Outcome(outcome) if outcome else None,
        "cause": Cause(cause) if cause else None,
    }
    return MigrationRecord(**known)
