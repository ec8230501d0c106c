"""The report protocol: replicas answer `report(version)` with their changes since that version, or with a snapshot.

A replica's `Reporter` keeps the state of its last report. The scheduler's `Roster` merges the reports of a pool and
returns their difference from the last observation. Both compare requests in the same way, so the observation is the
same whether a state was reached by a snapshot or by changes.

Versions rise with every answer, received or not. After a lost answer the scheduler's version is old, so the next answer
is a snapshot. Late answers are dropped, and changes since another version than the roster's are refused.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

from policies.decision.observation import Pool, PoolReport, Resident, Status
from policies.model import Blocks, ReplicaId, ReplicaLoad, ReplicaState, RequestId, RequestLoad, Tokens
from policies.paths.prices import Profile
from policies.plan import MoveReport
from policies.prefix.change import CacheChange
from policies.prefix.copies import CopyReport

CacheSource = Callable[[bool], CacheChange | None]
"""The change of a replica's cache since the last call, whole (True) or not; None: no change, or nothing is known."""


def no_cache(whole: bool) -> CacheChange | None:
    """Implements `CacheSource` for a replica whose cache is not known."""
    return None


@dataclass(frozen=True, slots=True)
class Report:
    """A replica's report on its state number `version`.

    With `since`, the report contains the changes since that version: `requests` are new or differ in more than size and
    age, `sizes` are the new sizes of the others in tokens, `gone` are the requests that have left. Without `since`, the
    report is a snapshot: `requests` are all of the replica's requests, and `profile` are its measurements at its start,
    if there are any. `at` is the time of the report by the replica's clock, in seconds; ages refer to it. `cache` is
    the change of the replica's KV cache likewise: whole in a snapshot, None if there is none or the cache is not known.
    """

    version: int
    status: Status
    since: int | None = None
    requests: tuple[RequestLoad, ...] = ()
    sizes: Mapping[RequestId, Tokens] = field(default_factory=dict)
    gone: tuple[RequestId, ...] = ()
    at: float = 0.0
    profile: Profile | None = None
    cache: CacheChange | None = None


class _Changes(NamedTuple):
    """The difference between two states of a replica's requests."""

    changed: Sequence[RequestLoad]
    sizes: Mapping[RequestId, Tokens]
    gone: Sequence[RequestId]


@dataclass(slots=True)
class _ReportedState:
    """The requests of one replica as of its last report. `births` are their starting times by the replica's clock."""

    at: float = 0.0
    loads: dict[RequestId, RequestLoad] = field(default_factory=dict)
    tokens: dict[RequestId, Tokens] = field(default_factory=dict)
    births: dict[RequestId, float] = field(default_factory=dict)

    def changes(self, requests: Iterable[RequestLoad], at: float) -> _Changes:
        """Replace the state by `requests`, and return the difference."""
        loads, tokens = self.loads, self.tokens
        changed: list[RequestLoad] = []
        sizes: dict[RequestId, Tokens] = {}
        seen: set[RequestId] = set()
        for load in requests:
            seen.add(load.id)
            was = loads.get(load.id)
            if was is None or _condition(was) != _condition(load):
                changed.append(load)
            elif tokens[load.id] != load.tokens:
                sizes[load.id] = load.tokens
        found = _Changes(changed, sizes, [request for request in loads if request not in seen])
        self.take(found, at)
        return found

    def take(self, changes: _Changes, at: float) -> None:
        """Apply changes that were reported at `at`."""
        self.at = at
        for request in changes.gone:
            if self.loads.pop(request, None) is not None:
                del self.tokens[request], self.births[request]
        for load in changes.changed:
            self.loads[load.id] = load
            self.tokens[load.id] = load.tokens
            self.births[load.id] = at - load.age_s
        self.tokens.update(changes.sizes)

    def requests(self) -> Iterable[RequestLoad]:
        """All requests, as of the last report."""
        for request, load in self.loads.items():
            age_s = round(self.at - self.births[request], 3)
            yield replace(load, tokens=self.tokens[request], age_s=age_s)


def _condition(load: RequestLoad) -> tuple[str, int, str | None]:
    """All of a request that may change except size and age: phase, hop, and reason not to move."""
    return load.phase, load.hop, load.immovable


class Reporter:
    """The replica's side of the protocol. Every snapshot contains `profile`.

    Versions rise from `first`, which must be above the versions of an earlier replica with the same id.
    """

    def __init__(self, profile: Profile | None = None, first: int = 0) -> None:
        self._profile = profile
        self._version = first
        self._state = _ReportedState()

    def report(self, load: ReplicaLoad, version: int | None, at: float = 0.0, cache: CacheSource = no_cache) -> Report:
        """Report `load` and `cache`: the changes if `version` is that of the last report, else a snapshot."""
        since = version if version == self._version else None
        self._version += 1
        changed, sizes, gone = self._state.changes(load.requests, at)
        status = status_of(load)
        if since is None:
            return Report(self._version, status, None, load.requests, at=at, profile=self._profile, cache=cache(True))
        return Report(self._version, status, since, tuple(changed), sizes, tuple(gone), at, cache=cache(False))


class Roster:
    """The scheduler's side of the protocol: the newest state of every replica of a pool, and its unobserved changes.

    Each report is compared with the last observation as it arrives, so that an observation need not look at replicas
    and requests without changes.
    """

    def __init__(self) -> None:
        self._statuses: dict[ReplicaId, Status] = {}
        self._versions: dict[ReplicaId, int] = {}
        self._states: dict[ReplicaId, _ReportedState] = {}
        self._locations: dict[RequestId, dict[ReplicaId, None]] = {}
        # Observed statuses differ from the reported ones by design for the overridden replicas: unreported or leaving.
        self._observed: dict[ReplicaId, Status] = {}
        self._overridden: dict[ReplicaId, Status] = {}
        self._differing: dict[ReplicaId, None] = {}
        self._residents: dict[RequestId, ReplicaId] = {}
        self._changed: dict[RequestId, None] = {}
        self._sizes: dict[RequestId, Tokens] = {}
        self._doubled: dict[RequestId, None] = {}
        self._profiled: set[ReplicaId] = set()
        self._profiles: dict[ReplicaId, Profile] = {}
        self._caches: dict[ReplicaId, CacheChange] = {}
        self._whole = False
        self._due: set[ReplicaId] = set()
        """The replicas whose next report has to be a snapshot."""

    # --- reports --------------------------------------------------------------------------------------

    def version(self, replica: ReplicaId) -> int | None:
        """The version of the replica's last report, for the next request; None requests a snapshot."""
        return None if replica in self._due else self._versions.get(replica)

    def take(self, report: Report) -> None:
        """Merge a replica's report. Raises `ValueError` for changes since another version than the last."""
        replica = report.status.id
        if report.since is not None and report.since != self._versions.get(replica):
            raise ValueError(f"{replica} reports changes since {report.since}, not {self._versions.get(replica)}")
        state = self._states.get(replica)
        if state is None:
            state = self._states[replica] = _ReportedState()
        if report.since is None:
            self._due.discard(replica)
            changes = state.changes(report.requests, report.at)
        else:
            changes = _Changes(report.requests, report.sizes, report.gone)
            state.take(changes, report.at)
        for request in changes.gone:
            self._remove(request, replica)
        for load in changes.changed:
            self._locations.setdefault(load.id, {})[replica] = None
            self._changed[load.id] = None
        self._sizes.update(changes.sizes)
        self._statuses[replica] = report.status
        if self._observed.get(replica) == report.status:
            self._differing.pop(replica, None)
        else:
            self._differing[replica] = None
        self._versions[replica] = report.version
        if report.profile is not None and replica not in self._profiled:
            self._profiled.add(replica)
            self._profiles[replica] = report.profile
        if report.cache is not None and replica not in self._due:
            before = self._caches.get(replica)
            self._caches[replica] = report.cache if before is None else before.then(report.cache)

    def forget(self, replica: ReplicaId) -> None:
        """Remove the replica and its requests. Its next report must be a snapshot."""
        self._statuses.pop(replica, None)
        self._differing.pop(replica, None)
        self._versions.pop(replica, None)
        self._profiles.pop(replica, None)
        self._profiled.discard(replica)
        self._caches.pop(replica, None)
        self._due.discard(replica)
        state = self._states.pop(replica, None)
        for request in state.loads if state else ():
            self._remove(request, replica)

    def restart(self) -> None:
        """Have the next observation be whole: of those before, some may not have been taken completely.

        The contents of caches and the profiles are not kept here, so replicas report them anew, in snapshots.
        """
        self._whole = True
        self._due = set(self._statuses)
        self._locations = {}
        for replica, state in self._states.items():
            for request in state.loads:
                self._locations.setdefault(request, {})[replica] = None
        self._observed, self._overridden = {}, {}
        self._differing = dict.fromkeys(self._statuses)
        self._changed = dict.fromkeys(self._locations)
        self._residents, self._sizes, self._doubled = {}, {}, {}
        self._profiled, self._profiles, self._caches = set(), {}, {}

    # --- the newest state -----------------------------------------------------------------------------

    @property
    def statuses(self) -> Mapping[ReplicaId, Status]:
        """The status of every replica that has reported."""
        return self._statuses

    def is_empty(self, replica: ReplicaId) -> bool:
        """True if no request is on the replica, as far as it has reported."""
        state = self._states.get(replica)
        return state is None or not state.loads

    def holds(self, request: RequestId) -> bool:
        """True if the request is on a replica that has reported."""
        return request in self._locations

    def find(self, reference: str) -> list[tuple[ReplicaId, RequestLoad]]:
        """The requests with that id or label, each with its replica, in order of the replicas' ids."""
        return [
            (replica, replace(load, tokens=state.tokens[request]))
            for replica, state in sorted(self._states.items())
            for request, load in state.loads.items()
            if reference in (request, load.label)
        ]

    def load(self, replica: ReplicaId) -> ReplicaLoad:
        """The replica with all of its requests, as of its last report. Takes time in proportion to their number."""
        return load_of(self._statuses[replica], self._states[replica].requests())

    def loads(self, leaving: Collection[ReplicaId] = ()) -> Iterable[ReplicaLoad]:
        """Every replica that has reported, as by `load`. Replicas in `leaving` count as DRAINING."""
        draining = self._draining(leaving)
        for replica in self._statuses:
            load = self.load(replica)
            yield replace(load, state=draining[replica].state) if replica in draining else load

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
        copies: tuple[CopyReport, ...] = (),
    ) -> PoolReport:
        """The changes since the last call; after a restart, a snapshot.

        The capacity in `pool` is replaced by the largest nominal one of the reported replicas.

        `unreported` are the statuses of replicas without a report. Replicas in `leaving` count as DRAINING.
        """
        statuses, observed, former = dict(self._statuses), self._observed, self._overridden
        overridden = self._draining(leaving)
        overridden.update((status.id, status) for status in unreported)
        statuses.update(overridden)
        capacity = max((s.nominal or s.capacity for s in statuses.values()), default=Tokens(0)) or pool.capacity
        apart = former | overridden
        fresh = [statuses[r] for r in self._differing if r not in apart]
        fresh += [statuses[r] for r in apart if r in statuses and observed.get(r) != statuses[r]]
        fresh.sort(key=attrgetter("id"))
        lost = tuple(sorted(r for r in observed if r not in statuses))
        residents, gone = self._settle()
        sizes, self._sizes = self._sizes, {}
        profiles, self._profiles = self._profiles, {}
        caches, self._caches = self._caches, {}
        self._observed, self._overridden, self._differing = statuses, overridden, {}
        whole, self._whole = self._whole, False
        pool = replace(pool, capacity=capacity)
        return PoolReport(
            pool, tuple(fresh), lost, residents, gone, sizes, moves, profiles, opening, caches, copies, whole
        )

    # --- inside ---------------------------------------------------------------------------------------

    def _draining(self, leaving: Iterable[ReplicaId]) -> dict[ReplicaId, Status]:
        """The statuses of leaving replicas: Serve is stopping them, and they need not know it yet."""
        statuses = self._statuses
        return {r: replace(statuses[r], state=ReplicaState.DRAINING) for r in leaving if r in statuses}

    def _remove(self, request: RequestId, replica: ReplicaId) -> None:
        locations = self._locations[request]
        del locations[replica]
        if not locations:
            del self._locations[request]
        self._changed[request] = None

    def _settle(self) -> tuple[tuple[Resident, ...], tuple[RequestId, ...]]:
        """The changed requests with their replicas, oldest first, and the requests that have left all replicas."""
        residents, gone = [], []
        for request in self._changed:
            self._sizes.pop(request, None)
            locations = self._locations.get(request)
            if locations is None or len(locations) == 1:
                self._doubled.pop(request, None)
            else:
                self._doubled[request] = None
            if locations is None:
                if self._residents.pop(request, None) is not None:
                    gone.append(request)
                continue
            home = self._residents[request] = self._home(request, locations)
            state = self._states[home]
            load, tokens = state.loads[request], state.tokens[request]
            residents.append(Resident(home, load if load.tokens == tokens else replace(load, tokens=tokens)))
        for request in self._doubled:
            if request in self._sizes:
                self._sizes[request] = self._states[self._residents[request]].tokens[request]
        self._changed = {}
        return tuple(sorted(residents, key=lambda r: (-r.load.age_s, r.load.id))), tuple(sorted(gone))

    def _home(self, request: RequestId, locations: Collection[ReplicaId]) -> ReplicaId:
        """The replica of a request. Of two it is the source of the move, since the hand-over may still fail."""
        if len(locations) == 1:
            return next(iter(locations))
        return min(locations, key=lambda replica: (self._states[replica].loads[request].hop, replica))


def status_of(load: ReplicaLoad) -> Status:
    """The load without its requests."""
    return Status(
        load.id,
        load.state,
        load.node,
        load.capacity_tokens,
        load.block_size,
        load.free_blocks,
        load.max_requests,
        load.model,
        load.steps,
        load.step_tokens,
        load.max_adapters,
        load.nominal_tokens,
    )


def load_of(status: Status, requests: Iterable[RequestLoad] = ()) -> ReplicaLoad:
    """The inverse of `status_of`: a replica's load, of its status and its requests."""
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
        status.steps,
        status.step_tokens,
        status.max_adapters,
        status.nominal,
    )
