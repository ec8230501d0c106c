"""The report protocol: replicas answer `report(version)` with their changes since that version, or with a snapshot.

A replica's `Reporter` keeps the state of its last report. The scheduler's `Roster` merges the reports of a pool and
returns their difference from the last observation. Both compare requests in the same way, so a snapshot and the changes
that lead to the same state give the same observation.

Versions rise with every answer, received or not. After a lost answer the scheduler asks with an old version and gets a
snapshot; an answer that arrives too late is dropped, and changes since another version than the roster's are refused.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from policies.decision.observation import Pool, PoolReport, Resident, Status
from policies.model import Blocks, Phase, ReplicaId, ReplicaLoad, ReplicaState, RequestId, RequestLoad, Tokens
from policies.paths.beliefs import Profile
from policies.plan import MoveReport

Standing = tuple[Phase, int, str | None]
"""A request's phase, hop, and reason not to move: whatever changes besides its size and its age."""


@dataclass(frozen=True, slots=True)
class Report:
    """A replica's report. `version` is the number of the state that it describes.

    With `since`, the report holds the changes since that version; without, it is a snapshot and `requests` are all
    requests of the replica. `requests` are new or differ in more than size and age; `sizes` are the tokens of the
    others that have grown or shrunk. `at` is the replica's clock in seconds, at which ages are measured. A snapshot has
    the `profile` that the replica measured at its start, if it did.
    """

    version: int
    status: Status
    since: int | None = None
    requests: tuple[RequestLoad, ...] = ()
    sizes: Mapping[RequestId, Tokens] = field(default_factory=dict)
    gone: tuple[RequestId, ...] = ()
    at: float = 0.0
    profile: Profile | None = None


class _Changes(NamedTuple):
    """The difference between two states of a replica's requests."""

    changed: Sequence[RequestLoad]
    sizes: Mapping[RequestId, Tokens]
    gone: Sequence[RequestId]


@dataclass(slots=True)
class _Held:
    """The last reported requests of one replica; `births` are the times of their starts by the replica's clock."""

    at: float = 0.0
    standing: dict[RequestId, Standing] = field(default_factory=dict)
    tokens: dict[RequestId, Tokens] = field(default_factory=dict)
    loads: dict[RequestId, RequestLoad] = field(default_factory=dict)
    births: dict[RequestId, float] = field(default_factory=dict)

    def changes(self, requests: Iterable[RequestLoad], at: float) -> _Changes:
        """The difference between the state held and `requests`, which are held from then on."""
        standing, tokens = self.standing, self.tokens
        changed: list[RequestLoad] = []
        sizes: dict[RequestId, Tokens] = {}
        seen: set[RequestId] = set()
        for load in requests:
            seen.add(load.id)
            if standing.get(load.id) != (load.phase, load.hop, load.immovable):
                changed.append(load)
            elif tokens[load.id] != load.tokens:
                sizes[load.id] = load.tokens
        found = _Changes(changed, sizes, [request for request in standing if request not in seen])
        self.take(found, at)
        return found

    def take(self, changes: _Changes, at: float) -> None:
        """Apply changes that were reported at `at`."""
        self.at = at
        for request in changes.gone:
            if self.standing.pop(request, None) is not None:
                del self.tokens[request], self.loads[request], self.births[request]
        for load in changes.changed:
            self.standing[load.id] = (load.phase, load.hop, load.immovable)
            self.tokens[load.id] = load.tokens
            self.loads[load.id] = load
            self.births[load.id] = at - load.age_s
        self.tokens.update(changes.sizes)

    def requests(self) -> Iterable[RequestLoad]:
        """All requests, as of the last report."""
        for request, load in self.loads.items():
            age_s = round(self.at - self.births[request], 3)
            yield replace(load, tokens=self.tokens[request], age_s=age_s)


class Reporter:
    """The replica's side. `profile` is part of every snapshot.

    Versions rise from `first`; a replica that restarts under its old id must begin above its old versions.
    """

    def __init__(self, profile: Profile | None = None, first: int = 0) -> None:
        self._profile = profile
        self._version = first
        self._held = _Held()

    def report(self, load: ReplicaLoad, version: int | None, at: float = 0.0) -> Report:
        """Report `load`: the changes if `version` is that of the last report, else a snapshot."""
        since = version if version == self._version else None
        self._version += 1
        changed, sizes, gone = self._held.changes(load.requests, at)
        status = status_of(load)
        if since is None:
            return Report(self._version, status, None, load.requests, at=at, profile=self._profile)
        return Report(self._version, status, since, tuple(changed), sizes, tuple(gone), at)


class Roster:
    """The scheduler's side: the newest report of every replica of a pool, and the changes not yet observed."""

    def __init__(self) -> None:
        self._statuses: dict[ReplicaId, Status] = {}
        self._versions: dict[ReplicaId, int] = {}
        self._held: dict[ReplicaId, _Held] = {}
        self._where: dict[RequestId, dict[ReplicaId, None]] = {}
        self._observed: dict[ReplicaId, Status] = {}
        self._residents: dict[RequestId, ReplicaId] = {}
        self._touched: dict[RequestId, None] = {}
        self._sizes: dict[RequestId, Tokens] = {}
        self._doubled: dict[RequestId, None] = {}
        self._profiled: set[ReplicaId] = set()
        self._profiles: dict[ReplicaId, Profile] = {}

    # --- reports --------------------------------------------------------------------------------------

    def version(self, replica: ReplicaId) -> int | None:
        """The version to ask the replica with; None asks for a snapshot."""
        return self._versions.get(replica)

    def take(self, report: Report) -> None:
        """Take a replica's report. Raises `ValueError` for changes since another version than the last."""
        replica = report.status.id
        if report.since is not None and report.since != self._versions.get(replica):
            raise ValueError(f"{replica} reports changes since {report.since}, not {self._versions.get(replica)}")
        held = self._held.setdefault(replica, _Held())
        if report.since is None:
            changes = held.changes(report.requests, report.at)
        else:
            changes = _Changes(report.requests, report.sizes, report.gone)
            held.take(changes, report.at)
        for request in changes.gone:
            self._leaves(request, replica)
        for load in changes.changed:
            self._where.setdefault(load.id, {})[replica] = None
            self._touched[load.id] = None
        self._sizes.update(changes.sizes)
        self._statuses[replica] = report.status
        self._versions[replica] = report.version
        if report.profile is not None and replica not in self._profiled:
            self._profiled.add(replica)
            self._profiles[replica] = report.profile

    def forget(self, replica: ReplicaId) -> None:
        """Drop the replica and its requests; its next report is to be a snapshot."""
        self._statuses.pop(replica, None)
        self._versions.pop(replica, None)
        self._profiles.pop(replica, None)
        self._profiled.discard(replica)
        held = self._held.pop(replica, None)
        for request in held.standing if held else ():
            self._leaves(request, replica)

    def keep(self, replicas: Iterable[ReplicaId]) -> None:
        """Forget all other replicas."""
        kept = set(replicas)
        for replica in [r for r in self._statuses if r not in kept]:
            self.forget(replica)

    # --- the newest state -----------------------------------------------------------------------------

    @property
    def statuses(self) -> Mapping[ReplicaId, Status]:
        """The status of every replica that has reported."""
        return self._statuses

    def is_empty(self, replica: ReplicaId) -> bool:
        """True if no request is on the replica."""
        return not self._held[replica].standing

    def holds(self, request: RequestId) -> bool:
        """True if the request is on a replica that has reported."""
        return request in self._where

    def find(self, reference: str) -> list[tuple[ReplicaId, RequestLoad]]:
        """The requests with that id or label, with their replicas in order of id."""
        return [
            (replica, replace(load, tokens=held.tokens[request]))
            for replica, held in sorted(self._held.items())
            for request, load in held.loads.items()
            if reference in (request, load.label)
        ]

    def load(self, replica: ReplicaId) -> ReplicaLoad:
        """The replica with all of its requests, as of its last report. Costs time in proportion to the requests."""
        return load_of(self._statuses[replica], self._held[replica].requests())

    @property
    def observed(self) -> Mapping[ReplicaId, Status]:
        """The statuses as of the last observation."""
        return self._observed

    # --- the next observation -------------------------------------------------------------------------

    def observe(
        self,
        pool: Pool,
        moves: tuple[MoveReport, ...] = (),
        opening: int = 0,
        unreported: Iterable[Status] = (),
        leaving: Collection[ReplicaId] = (),
    ) -> PoolReport:
        """The changes since the last call. The pool's capacity is that of its largest replica, if any has reported.

        `unreported` are replicas without a report. Those `leaving` are DRAINING, whatever they report themselves.
        """
        statuses, observed = dict(self._statuses), self._observed
        for replica in leaving:
            if replica in statuses:
                statuses[replica] = replace(statuses[replica], state=ReplicaState.DRAINING)
        statuses.update((status.id, status) for status in unreported)
        capacity = max((s.capacity for s in statuses.values()), default=Tokens(0)) or pool.capacity
        fresh = sorted((s for s in statuses.values() if observed.get(s.id) != s), key=lambda s: s.id)
        lost = tuple(sorted(r for r in observed if r not in statuses))
        residents, gone = self._settle()
        sizes, self._sizes = self._sizes, {}
        profiles, self._profiles = self._profiles, {}
        self._observed = statuses
        pool = replace(pool, capacity=capacity)
        return PoolReport(pool, tuple(fresh), lost, residents, gone, sizes, moves, profiles, opening)

    # --- inside ---------------------------------------------------------------------------------------

    def _leaves(self, request: RequestId, replica: ReplicaId) -> None:
        where = self._where[request]
        del where[replica]
        if not where:
            del self._where[request]
        self._touched[request] = None

    def _settle(self) -> tuple[tuple[Resident, ...], tuple[RequestId, ...]]:
        """The requests that have changed, with their replicas, and those that are on no replica any more."""
        residents, gone = [], []
        for request in self._touched:
            self._sizes.pop(request, None)
            self._doubled.pop(request, None)
            where = self._where.get(request)
            if where is None:
                if self._residents.pop(request, None) is not None:
                    gone.append(request)
                continue
            if len(where) > 1:
                self._doubled[request] = None
            home = self._home(request)
            load = self._held[home].loads[request]
            tokens = self._held[home].tokens[request]
            self._residents[request] = home
            residents.append(Resident(home, load if load.tokens == tokens else replace(load, tokens=tokens)))
        for request in self._doubled:
            if request in self._sizes:
                self._sizes[request] = self._held[self._residents[request]].tokens[request]
        self._touched = {}
        return tuple(sorted(residents, key=lambda r: (-r.load.age_s, r.load.id))), tuple(sorted(gone))

    def _home(self, request: RequestId) -> ReplicaId:
        """The replica of a request; of two replicas the first, since the hand-over to the second may yet fail."""
        where = self._where[request]
        if len(where) == 1:
            return next(iter(where))
        return min(where, key=lambda replica: (self._held[replica].loads[request].hop, replica))


def status_of(load: ReplicaLoad) -> Status:
    """The status in a load."""
    return Status(
        load.id,
        load.state,
        load.node,
        load.capacity_tokens,
        load.block_size,
        load.free_blocks,
        load.max_requests,
        load.model,
    )


def load_of(status: Status, requests: Iterable[RequestLoad] = ()) -> ReplicaLoad:
    """The load of a replica with that status and those requests."""
    return ReplicaLoad(
        status.id,
        status.state,
        status.node,
        status.capacity,
        status.block_size,
        status.free_blocks or Blocks(0),
        status.max_requests,
        tuple(requests),
        status.model,
    )
