"""The requests in a recording of a live scheduler, and the speed of its replicas.

    arrival    the first call for the placement of a request, with its service class; a request without one is older
               than the recording, and is left out
    prompt     the tokens of that call
    output     the growth until the last report. The growth after it is not recorded: half of an epoch at the request's
               own rate is added. An answer that began and ended between two epochs counts as one token
    end        a request that is still there in the last epoch counts as ended there

Step times are fitted to the replicas' reports. The start-up time is the median time from STARTING to RUNNING,
without waits for memory.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from policies.cost.fit import StepFit
from policies.cost.steps import StepCosts
from policies.decision.experience import WaitedTimes
from policies.decision.limits import Terms
from policies.decision.observation import PoolReport, Status
from policies.decision.recording import Epoch, PlacedCall, parse_recording
from policies.model import ReplicaId, ReplicaState, RequestId, Tokens
from policies.precedence import NO_CLASSES, ServiceClasses
from simulator.errors import BadInput
from simulator.traces.trace import Change, TraceAccount
from simulator.workload.workload import ArrivalTrace, Recorded


@dataclass(frozen=True, slots=True)
class RecordedReplicas:
    """Measurements of a recording's replicas; None for those that it does not contain.

    `capacity` is in tokens, `step_tokens` the most tokens of a step, `token_bytes` the KV of a token. `classes` are the
    service classes of their scheduler.
    """

    capacity: Tokens | None = None
    startup_s: float | None = None
    steps: StepCosts | None = None
    step_tokens: int | None = None
    token_bytes: float | None = None
    classes: ServiceClasses = NO_CLASSES


@dataclass(frozen=True, slots=True)
class RecordedTraffic:
    """The requests of a recording, in seconds since its first arrival, and the measurements of its replicas."""

    trace: ArrivalTrace
    replicas: RecordedReplicas


@dataclass(slots=True)
class _Course:
    """One request so far: its arrival, its prompt, its newest size, and the times of its first and last growth."""

    at_s: float
    prompt: int
    size: int
    service_class: str
    grew_s: float | None = None
    last_s: float = 0.0

    def recorded(self, epoch_s: float, has_ended: bool) -> Recorded:
        """The request as a row of a trace."""
        growth = self.size - self.prompt
        rest = 0.0
        if has_ended and self.grew_s is not None:
            rest = growth / (self.last_s - self.grew_s + epoch_s) * epoch_s / 2
        return Recorded(self.at_s, self.prompt, max(1.0, growth + rest), service_class=self.service_class)


@dataclass(slots=True)
class _Reader:
    """Follows the epochs of a recording."""

    courses: dict[RequestId, _Course] = field(default_factory=dict)
    ended: list[_Course] = field(default_factory=list)
    unplaced: dict[RequestId, int] = field(default_factory=dict)
    """The sizes of requests that are older than the recording."""
    statuses: dict[ReplicaId, Status] = field(default_factory=dict)
    starting: dict[ReplicaId, float] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)
    waited: WaitedTimes = field(default_factory=WaitedTimes)
    token_bytes: list[float] = field(default_factory=list)
    steps: StepFit = field(default_factory=StepFit)

    def take(self, epoch: Epoch) -> None:
        """Add an epoch."""
        for entry in epoch.entries:
            if isinstance(entry, PlacedCall) and entry.arrival.id not in self.courses:
                arrival = entry.arrival
                name = arrival.precedence.service_class
                self.courses[arrival.id] = _Course(entry.at, arrival.tokens, arrival.tokens, name)
        self.waited.add((replica for replica in epoch.seen.waiting if replica in self.starting), epoch.seen.now)
        for pool in epoch.seen.pools:
            for status in pool.replicas:
                self._take_status(status, epoch.seen.now)
            self.token_bytes += [profile.token_bytes for profile in pool.profiles.values()]
            self._take_requests(pool, epoch.seen.now)

    def _take_status(self, status: Status, now: float) -> None:
        if (was := self.statuses.get(status.id)) is not None:
            self.steps.add(status.steps.since(was.steps), now)
        self.statuses[status.id] = status
        if status.state is ReplicaState.STARTING:
            self.starting.setdefault(status.id, now)
        elif (since := self.starting.pop(status.id, None)) is not None:
            took_s = now - since - self.waited.take(status.id)
            if status.state is ReplicaState.RUNNING:
                self.starts.append(took_s)

    def _take_requests(self, pool: PoolReport, now: float) -> None:
        sizes = {resident.load.id: resident.load.tokens for resident in pool.requests} | dict(pool.sizes)
        for request, size in sizes.items():
            course = self.courses.get(request)
            if course is None:
                self.unplaced[request] = size
            elif size > course.size:
                course.grew_s = now if course.grew_s is None else course.grew_s
                course.size, course.last_s = size, now
        gone = (
            [q for q, course in self.courses.items() if course.grew_s and q not in sizes] if pool.whole else pool.gone
        )
        for request in gone:
            if (course := self.courses.pop(request, None)) is not None:
                self.ended.append(course)

    def replicas(self, terms: Terms) -> RecordedReplicas:
        """The measurements of all replicas, and the classes of the recorded `terms`."""
        capacities = [status.capacity for status in self.statuses.values() if status.capacity]
        fitted = self.steps.fitted
        return RecordedReplicas(
            min(capacities, default=None),
            median(self.starts) if self.starts else None,
            None if fitted is None else fitted.costs,
            max((status.step_tokens for status in self.statuses.values()), default=0) or None,
            median(self.token_bytes) if self.token_bytes else None,
            terms.classes,
        )


def is_recording(path: Path) -> bool:
    """True if the file begins like a recording: with a line of the scheduler's terms."""
    try:
        with path.open("rb") as file:
            terms = json.loads(file.readline(_LINE_BYTES)) if path.is_file() else None
    except (OSError, ValueError):
        return False
    return isinstance(terms, dict) and terms.keys() >= _TERMS


_TERMS = {"policy", "epoch_s"}
"""Members of the first line of a recording."""

_LINE_BYTES = 1 << 20
"""More bytes than the first line of a recording has."""


def read_recording(path: Path) -> tuple[Terms, Iterator[Epoch]]:
    """The terms and epochs of a recording. For an invalid line, the call or the iteration raises `ValueError`."""
    return parse_recording(path.read_bytes().splitlines(), str(path))


def read_traffic(path: Path) -> RecordedTraffic:
    """The requests and replicas of a recording.

    Raises `BadInput` if the recording cannot be read, or contains no arrival.
    """
    try:
        terms, epochs = read_recording(path)
        reader = _Reader()
        for epoch in epochs:
            reader.take(epoch)
    except (OSError, ValueError) as error:
        raise BadInput(f"The recording cannot be read: {error}") from None
    rows = list(_rows(reader, terms.epoch_s))
    if not rows:
        raise BadInput(f"{path} contains no arrival of a request.")
    first_s = min(row.at_s for row in rows)
    shifted = (replace(row, at_s=row.at_s - first_s) for row in rows)
    trace = ArrivalTrace(tuple(sorted(shifted, key=lambda row: row.at_s)), _account(reader, rows))
    return RecordedTraffic(trace, reader.replicas(terms))


def _account(reader: _Reader, rows: Sequence[Recorded]) -> TraceAccount:
    """The requests that are left out, and those whose end is not recorded."""
    kinds = (
        ("older than the recording: left out", list(reader.unplaced.values())),
        ("without a recorded end: counted as ended", [course.size for course in reader.courses.values()]),
    )
    requests = len(rows) + len(reader.unplaced)
    tokens = sum(row.prompt + row.output for row in rows) + sum(reader.unplaced.values())
    changes = (Change(what, len(sizes), len(sizes) / requests, sum(sizes) / tokens) for what, sizes in kinds if sizes)
    return TraceAccount("recording of a scheduler", (), "seconds", requests, changes=tuple(changes))


def _rows(reader: _Reader, epoch_s: float) -> Iterator[Recorded]:
    for courses, have_ended in ((reader.ended, True), (reader.courses.values(), False)):
        for course in courses:
            yield course.recorded(epoch_s, have_ended)
