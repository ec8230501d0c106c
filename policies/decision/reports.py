"""Reports of replicas, with versions: a snapshot for whoever does not know the last one, else what has changed.

A replica's `Reporter` remembers what it reported last. The scheduler's `Roster` puts the reports of a pool together and
says what is new since the last observation. Both compare requests in the same way, so that a snapshot and the changes
that lead to the same state come to the same observation.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from policies.decision.observation import Pool, PoolReport, Resident, Status
from policies.model import Phase, ReplicaId, ReplicaLoad, RequestId, RequestLoad, Tokens
from policies.paths.beliefs import Profile
from policies.plan import MoveReport

Standing = tuple[Phase, int, str | None]
"""What there is to know of a request on a replica beside its size: phase, hop, and why it must stay."""


@dataclass(frozen=True, slots=True)
class Report:
    """A replica's report. `version` numbers what it describes.

    With `since`, it says what has changed since that version; without, it is a snapshot, and `requests` are all that
    there are. `requests` hold what is new or differs in more than its size, `sizes` the tokens of others that differ.
    """

    version: int
    status: Status
    since: int | None = None
    requests: tuple[RequestLoad, ...] = ()
    sizes: Mapping[RequestId, Tokens] = field(default_factory=dict)
    gone: tuple[RequestId, ...] = ()


class _Changes(NamedTuple):
    """What leads from one state of a replica's requests to another."""

    changed: Sequence[RequestLoad]
    sizes: Mapping[RequestId, Tokens]
    gone: Sequence[RequestId]


@dataclass(slots=True)
class _Held:
    """What is known of the requests on one replica."""

    standing: dict[RequestId, Standing] = field(default_factory=dict)
    tokens: dict[RequestId, Tokens] = field(default_factory=dict)
    loads: dict[RequestId, RequestLoad] = field(default_factory=dict)

    def changes(self, requests: Iterable[RequestLoad]) -> _Changes:
        """What leads from here to those requests; it is known afterwards."""
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
        self.take(found)
        return found

    def take(self, changes: _Changes) -> None:
        """Such changes have been reported."""
        for request in changes.gone:
            if self.standing.pop(request, None) is not None:
                del self.tokens[request], self.loads[request]
        for load in changes.changed:
            self.standing[load.id] = (load.phase, load.hop, load.immovable)
            self.tokens[load.id] = load.tokens
            self.loads[load.id] = load
        self.tokens.update(changes.sizes)


class Reporter:
    """A replica's side: answers the version that the scheduler has with what has changed since."""

    def __init__(self) -> None:
        self._version = 0
        self._held = _Held()

    def report(self, load: ReplicaLoad, version: int | None) -> Report:
        """The replica as `load` says. Only the last version's changes are known; any other gets a snapshot."""
        known = version is not None and version == self._version
        since = self._version if known else None
        self._version += 1
        changed, sizes, gone = self._held.changes(load.requests)
        if since is None:
            return Report(self._version, status_of(load), None, load.requests)
        return Report(self._version, status_of(load), since, tuple(changed), sizes, tuple(gone))


class Roster:
    """The scheduler's side: the newest report of every replica of a pool, and what of it has not been observed yet."""

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

    def version(self, replica: ReplicaId) -> int | None:
        """The version of the replica's last report, to be told to it; None for one that is to send a snapshot."""
        return self._versions.get(replica)

    def take(self, report: Report) -> None:
        """Take a replica's report. Raises `ValueError` if it says what changed since a version that is not the last."""
        replica = report.status.id
        if report.since is not None and report.since != self._versions.get(replica):
            raise ValueError(f"{replica} reports changes since {report.since}, not {self._versions.get(replica)}")
        held = self._held.setdefault(replica, _Held())
        if report.since is None:
            changes = held.changes(report.requests)
        else:
            changes = _Changes(report.requests, report.sizes, report.gone)
            held.take(changes)
        for request in changes.gone:
            self._leaves(request, replica)
        for load in changes.changed:
            self._where.setdefault(load.id, {})[replica] = None
            self._touched[load.id] = None
        self._sizes.update(changes.sizes)
        self._statuses[replica] = report.status
        self._versions[replica] = report.version

    def take_status(self, status: Status) -> None:
        """A replica is known only by what Serve says of it: nothing is on it."""
        self.forget(status.id)
        self._statuses[status.id] = status

    def forget(self, replica: ReplicaId) -> None:
        """The replica is gone, with its requests."""
        self._statuses.pop(replica, None)
        self._versions.pop(replica, None)
        held = self._held.pop(replica, None)
        for request in held.standing if held else ():
            self._leaves(request, replica)

    def keep(self, replicas: Iterable[ReplicaId]) -> None:
        """Forget all other replicas."""
        kept = set(replicas)
        for replica in [r for r in self._statuses if r not in kept]:
            self.forget(replica)

    def observe(
        self,
        pool: Pool,
        moves: tuple[MoveReport, ...] = (),
        profiles: Mapping[ReplicaId, Profile] | None = None,
        opening: int = 0,
    ) -> PoolReport:
        """What is new since the last call. The pool's capacity is that of its largest replica, if any has reported."""
        capacity = max((s.capacity for s in self._statuses.values()), default=Tokens(0)) or pool.capacity
        fresh = sorted((s for s in self._statuses.values() if self._observed.get(s.id) != s), key=lambda s: s.id)
        lost = tuple(sorted(r for r in self._observed if r not in self._statuses))
        residents, gone = self._settle()
        sizes, self._sizes = self._sizes, {}
        self._observed = dict(self._statuses)
        pool = replace(pool, capacity=capacity)
        return PoolReport(pool, tuple(fresh), lost, residents, gone, sizes, moves, profiles or {}, opening)

    # --- inside ---------------------------------------------------------------------------------------

    def _leaves(self, request: RequestId, replica: ReplicaId) -> None:
        where = self._where[request]
        del where[replica]
        if not where:
            del self._where[request]
        self._touched[request] = None

    def _settle(self) -> tuple[tuple[Resident, ...], tuple[RequestId, ...]]:
        """Where those requests are now of which something changed, and which are nowhere."""
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
        """Where a request is. One that is on two replicas is on the first: the second may yet let go."""
        where = self._where[request]
        if len(where) == 1:
            return next(iter(where))
        return min(where, key=lambda replica: (self._held[replica].loads[request].hop, replica))


def status_of(load: ReplicaLoad) -> Status:
    """What a replica reports of itself."""
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
