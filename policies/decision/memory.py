"""What decisions remember of a pool, and how an observation changes it.

The cluster in it is kept from epoch to epoch; an observation costs what it changes. Every request stands where
`_standing` says, a function of what was reported of the request, of the moves under way and of the placements since:

    reported on a replica that is up       there, or at the target of its move, holding its blocks at the source, too
    queued there, without blocks           it waits, and the replica is its home
    on a replica that is to be gone        it waits, and leaves; one that must stay is not in the cluster at all
    placed since the last report           on that replica, until the replica reports it or the placement expires
    reported on no replica                 it waits (the idealised model)

So where a decision put a request is forgotten with the next observation, unless that says that it came to it.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import NamedTuple, TypeVar

from policies.causes import PAIR_FAILURES
from policies.cluster.changes import Changes, Crossing, Departure
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.cluster.supply import Supply
from policies.decision.breaker import Breaker
from policies.decision.experience import Experience
from policies.decision.limits import Terms
from policies.decision.observation import SETTLED, PoolReport, Resident, Status
from policies.decision.placement import Placed
from policies.model import UP, Phase, ReplicaId, ReplicaState, RequestId, Tokens
from policies.paths.estimates import Estimates
from policies.plan import Move, MoveReport, Plan, Reason
from policies.rules.policy import Policy
from policies.rules.registry import policy

SLICE = 2048
"""The number of requests that are taken from an observation between two pauses: 2 to 4 ms of work."""

T = TypeVar("T")

SILENT_S = 30.0
"""How long a move counts as under way of which nothing more is reported; its source has its own, shorter limits."""


@dataclass(frozen=True, slots=True)
class Underway:
    """A move that was ordered at `since` or reported then, and has not ended."""

    move: Move
    since: float


class _Standing(NamedTuple):
    """Where a request is in the cluster: on `replica` (None: it waits), holding blocks at `source`, too.

    `home` is the replica that a waiting request is on after all, which it `leaves` if that is to be gone.
    """

    replica: Replica | None
    source: Replica | None = None
    pinned: bool = False
    home: ReplicaId | None = None
    leaves: bool = False


_NOWHERE = _Standing(None)


class PoolMemory:
    """One pool's memory. Only `policies.decision` changes it.

    `homes` maps a waiting request to the replica that it is on after all, `leaving` are those whose replica is to be
    gone. `learns` is False for a memory that is given another's experience.
    """

    def __init__(self, terms: Terms, rule: Policy | None = None, experience: Experience | None = None) -> None:
        self.terms = terms
        self.rule = policy(terms.policy) if rule is None else rule
        self.learns = experience is None
        self.experience = experience or Experience(terms.epoch_s, terms.decode_rate)
        self.breaker = Breaker()
        self.estimates = Estimates(terms.boundaries, terms.epoch_s)
        self.cluster = Cluster(
            Tokens(1),
            Supply(terms.per_node),
            holds=terms.moves_take_time,
            starts_as=ReplicaState.STARTING if terms.starts_take_time else ReplicaState.RUNNING,
        )
        self.statuses: dict[ReplicaId, Status] = {}
        self.homes: dict[RequestId, ReplicaId] = {}
        self.leaving: dict[RequestId, None] = {}
        self.under_way: dict[RequestId, Underway] = {}
        self.placed: dict[RequestId, Placed] = {}
        self._residents: dict[RequestId, Resident] = {}
        self._absent: dict[RequestId, Tokens] = {}
        self._decoding = 0
        self._stale: dict[RequestId, None] = {}
        self._unsettled: dict[RequestId, None] = {}
        self._expected: dict[ReplicaId, None] = {}
        self._closed: dict[ReplicaId, float | None] = {}

    def observe(self, seen: PoolReport, now: float) -> Changes:
        """Bring the cluster up to date with an observation; returns the changes that a policy reacts to."""
        return finish(self.observe_in_slices(seen, now))

    def observe_in_slices(self, seen: PoolReport, now: float) -> Generator[None, None, Changes]:
        """As `observe`, pausing where arrivals may be placed: every request is in one place, and every sum is right."""
        cluster = self.cluster
        if seen.pool.capacity:
            cluster.set_capacity(seen.pool.capacity)
        for report in seen.moves:
            self._take_move(report, now)
        self._expire(now)
        crossed: list[Crossing] = []
        departed: list[tuple[int, Departure]] = []
        grown = 0
        sizes = self._sizes(seen.sizes)
        for _ in range(0, len(seen.sizes), SLICE):
            grown += cluster.resize(islice(sizes, SLICE), crossed)
            yield
        for first in range(0, len(seen.gone), SLICE):
            departed += self._take_gone(seen.gone[first : first + SLICE])
            yield
        self._measure_growth(seen.requests, grown, now)
        self._take_requests(seen.requests, crossed)
        yield
        doomed = self._take_replicas(seen, now)
        self._relocate(doomed)
        for replica in doomed.values():
            cluster.lose(replica)
        self._expect(seen)
        self._admit_at_home()
        yield
        self._correct()
        cluster.await_start(seen.opening > 0 or self.experience.awaits_start(now))
        for report in seen.moves:
            if report.by_hand and report.moved and report.request in cluster.requests:
                cluster.rest(report.request, now + self.terms.limits.by_hand_s)
        yield
        crossed.sort(key=lambda crossing: crossing.request.order)
        return Changes(
            tuple(
                departure for _, departure in sorted(departed, key=itemgetter(0)) if departure.replica.id not in doomed
            ),
            tuple(crossing for crossing in crossed if self._is_there(crossing.request)),
            tuple(cluster.in_order()),
        )

    def ordered(self, plan: Plan, touched: Iterable[Request], now: float) -> None:
        """That has been decided; whatever of it an observation does not confirm did not happen."""
        self._stale.update((request.id, None) for request in touched)
        if self.terms.moves_take_time:
            self.under_way.update((move.request, Underway(move, now)) for move in plan.moves)
        self._expected.update(
            (opening.replica, None) for opening in plan.opened if opening.replica in self.cluster.replicas
        )

    def closing(self, idle: Mapping[ReplicaId, float | None]) -> None:
        """Those replicas are to close, empty since then."""
        self._closed.update(idle)

    def place(self, request_id: RequestId, placed: Placed) -> None:
        """A request has been placed."""
        self.placed[request_id] = placed
        self._stale[request_id] = None
        self._unsettled[request_id] = None

    def order(self, move: Move, now: float) -> None:
        """A move is made that no epoch decided on: an operator's."""
        self.under_way[move.request] = Underway(move, now)
        self._stale[move.request] = None

    def phase(self, request: RequestId) -> Phase | None:
        """What a request does, as last reported; None for one that no replica has reported."""
        resident = self._residents.get(request)
        return resident.load.phase if resident else None

    # --- moves and replicas ---------------------------------------------------------------------------

    def _take_move(self, report: MoveReport, now: float) -> None:
        pair = (report.source, report.target)
        known = self.under_way.get(report.request)
        self._stale[report.request] = None
        if report.moved is None:
            move = Move(report.request, *pair, report.tokens or Tokens(0), Reason.MANUAL, 0, report.path)
            same = known is not None and (known.move.source, known.move.target) == pair
            self.under_way[report.request] = Underway(known.move if known is not None and same else move, now)
            return
        if known is not None and (known.move.source, known.move.target) == pair:
            del self.under_way[report.request]
            if report.moved:
                self.breaker.succeeded(pair)
                self.experience.moved(report.took_s or 0.0)
            elif report.cause in PAIR_FAILURES:
                self.breaker.failed(pair, now)
        self.estimates.learn(report, now)

    def _expire(self, now: float) -> None:
        for request, underway in list(self.under_way.items()):
            if underway.since <= now - SILENT_S:
                del self.under_way[request]
                self._stale[request] = None
        for request, placed in list(self.placed.items()):
            if placed.expires_at <= now:
                del self.placed[request]
                self._stale[request] = None

    def _take_replicas(self, seen: PoolReport, now: float) -> dict[ReplicaId, Replica]:
        """Add and change replicas; returns those that are to leave the cluster once their requests have."""
        cluster = self.cluster
        if self.learns:
            self.experience.saw(seen.replicas, seen.lost, now)
        changed = dict.fromkeys((*seen.lost, *self._closed, *self._expected))
        turned = self._take_statuses(seen)
        again = (self.statuses[r] for r in self._closed if r in self.statuses)
        for status in (*seen.replicas, *again):
            changed[status.id] = None
            if status.state in UP:
                self._add_or_change(status)
        self._closed.clear()
        self._expected.clear()
        for replica_id, profile in seen.profiles.items():
            self.estimates.profile(replica_id, profile)
        if changed:
            self._stale.update(dict.fromkeys(self.under_way))
            self._stale.update(dict.fromkeys(self.placed))
        if turned:
            self._stale.update((q, None) for q, resident in self._residents.items() if resident.replica in turned)
        return {r: cluster.replicas[r] for r in changed if r in cluster.replicas and not self._is_up(r)}

    def _take_statuses(self, seen: PoolReport) -> set[ReplicaId]:
        """Remember what replicas report of themselves; returns those that take requests no longer, or again."""
        turned = set()
        for replica_id in seen.lost:
            self.statuses.pop(replica_id, None)
            self._closed.pop(replica_id, None)
            self.breaker.forget(replica_id)
        if seen.lost:
            self.estimates.keep(self.statuses)
        for status in seen.replicas:
            was = self.statuses.get(status.id)
            self.statuses[status.id] = status
            if was is not None and (was.state in UP) is not (status.state in UP):
                turned.add(status.id)
        return turned

    def _is_up(self, replica: ReplicaId) -> bool:
        status = self.statuses.get(replica)
        return status is not None and status.state in UP

    def _add_or_change(self, status: Status) -> None:
        cluster = self.cluster
        replica = cluster.replicas.get(status.id)
        capacity = status.capacity or cluster.capacity
        most = status.max_requests or cluster.max_requests
        if replica is None:
            replica = cluster.add_replica(status.id, status.node, capacity, status.state, most)
            cluster.set_idle_since(replica, self._closed.get(status.id))
            cluster.supply.claim(status.id)
        else:
            cluster.update_replica(replica, status.state, capacity, most)

    def _expect(self, seen: PoolReport) -> None:
        """Have those replicas in the cluster that were asked for and that nobody has reported yet."""
        cluster = self.cluster
        cluster.supply.allow(float("inf"))
        for _ in range(seen.opening):
            replica_id, node = cluster.supply.take()
            cluster.add_replica(replica_id, node, cluster.capacity, ReplicaState.STARTING)
            self._expected[replica_id] = None
        if seen.pool.max_replicas is not None:
            known = sum(status.state is not ReplicaState.STOPPED for status in self.statuses.values())
            cluster.supply.allow(max(0, seen.pool.max_replicas - known - seen.opening))

    # --- requests -------------------------------------------------------------------------------------

    def _take_gone(self, gone: Iterable[RequestId]) -> Iterator[tuple[int, Departure]]:
        """Forget requests that have ended; yields departures from replicas with the order of the requests' arrival."""
        cluster = self.cluster
        for request_id in gone:
            resident = self._residents.pop(request_id, None)
            if resident is not None and resident.load.phase is Phase.DECODE:
                self._decoding -= 1
            if request_id in self.placed:
                self._stale[request_id] = None
                continue
            self._forget(request_id)
            self._stale.pop(request_id, None)
            self.estimates.forget(request_id)
            request = cluster.requests.get(request_id)
            if request is None:
                continue
            if request.replica is not None:
                yield request.order, Departure(request_id, request.kind, request.replica)
            cluster.remove_request(request)

    def _sizes(self, sizes: Mapping[RequestId, Tokens]) -> Iterator[tuple[RequestId, Tokens]]:
        """The sizes of requests in the cluster; those of requests on replicas that are to be gone are kept."""
        if not self._absent:
            return iter(sizes.items())
        self._absent.update((q, sizes[q]) for q in self._absent if q in sizes)
        return ((q, tokens) for q, tokens in sizes.items() if q not in self._absent)

    def _measure_growth(self, changed: Iterable[Resident], grown: int, now: float) -> None:
        """Requests that were and are decoding have grown by `grown` tokens in all: none of the `changed` ones."""
        if self.learns:
            known = (self._residents.get(resident.load.id) for resident in changed)
            others = sum(resident is not None and resident.load.phase is Phase.DECODE for resident in known)
            self.experience.grew(grown, self._decoding - others, now)

    def _take_requests(self, residents: Sequence[Resident], crossed: list[Crossing]) -> None:
        """Take requests that are new or have changed; those in another size class are appended to `crossed`."""
        cluster = self.cluster
        others = ((cluster.requests.get(resident.load.id), resident.load.tokens) for resident in residents)
        resized = [(q.id, Tokens(max(1, tokens))) for q, tokens in others if q is not None and q.tokens != tokens]
        if resized:
            cluster.resize(resized, crossed)
        for resident in residents:
            request_id = resident.load.id
            was = self._residents.get(request_id)
            self._residents[request_id] = resident
            self._decoding += resident.load.phase is Phase.DECODE
            self._decoding -= was is not None and was.load.phase is Phase.DECODE
            placed = self.placed.get(request_id)
            if placed is not None and placed.replica == resident.replica:
                del self.placed[request_id]
            self._stale[request_id] = None

    def _relocate(self, doomed: Mapping[ReplicaId, Replica]) -> None:
        """Have every request stand where it is to, of which something has changed."""
        replicas = self.cluster.replicas
        up = {r: replica for r, replica in replicas.items() if r not in doomed} if doomed else replicas
        stale, self._stale = self._stale, {}
        for request_id in stale:
            self._stand(request_id, self._standing(request_id, up))

    def _standing(self, request_id: RequestId, up: Mapping[ReplicaId, Replica]) -> _Standing | None:
        """Where a request is, given the replicas that are up; None if it is not in the cluster."""
        placed = self.placed.get(request_id)
        if placed is not None and (replica := up.get(placed.replica)) is not None:
            return _Standing(replica, pinned=True)
        resident = self._residents.get(request_id)
        if resident is None:
            return None
        if resident.replica is None:
            return _NOWHERE
        home = up.get(resident.replica)
        underway = self.under_way.get(request_id)
        target = None if underway is None else up.get(underway.move.target)
        stays = resident.load.immovable is not None or resident.load.phase is Phase.MOVING
        if target is not None:
            return _Standing(target, home if home is not target else None, pinned=True)
        if home is None:
            return None if stays else _Standing(None, home=resident.replica, leaves=True)
        if resident.load.phase is Phase.WAITING and not stays:
            return _Standing(None, home=resident.replica)
        return _Standing(home, pinned=stays)

    def _stand(self, request_id: RequestId, standing: _Standing | None) -> None:
        cluster = self.cluster
        request = cluster.requests.get(request_id)
        absent = self._forget(request_id)
        if standing is None:
            if request_id in self._residents:
                tokens = absent or self._residents[request_id].load.tokens
                self._absent[request_id] = tokens if request is None else request.tokens
            if request is not None:
                cluster.remove_request(request)
            return
        if request is None:
            tokens = absent or self._reported(request_id)
            request = cluster.add_request(request_id, Tokens(max(1, tokens)), standing.replica)
        cluster.locate(request, standing.replica, standing.source)
        if request.pinned is not standing.pinned:
            cluster.pin(request, standing.pinned)
        if standing.home is not None:
            self.homes[request_id] = standing.home
            if standing.leaves:
                self.leaving[request_id] = None
        if standing.replica is not None:
            resident = self._residents.get(request_id)
            if standing.source is not None or resident is None or resident.load.phase not in SETTLED:
                self._unsettled[request_id] = None

    def _is_there(self, request: Request) -> bool:
        """Whether the request is on a replica, after what else was observed of it."""
        return request.replica is not None and self.cluster.requests.get(request.id) is request

    def _forget(self, request_id: RequestId) -> Tokens | None:
        """Forget how the request stood; the tokens that it held if it was not in the cluster."""
        self.homes.pop(request_id, None)
        self.leaving.pop(request_id, None)
        self._unsettled.pop(request_id, None)
        return self._absent.pop(request_id, None)

    def _reported(self, request_id: RequestId) -> Tokens:
        resident = self._residents.get(request_id)
        return self.placed[request_id].tokens if resident is None else resident.load.tokens

    def _admit_at_home(self) -> None:
        """What is queued where there is room for it now runs there in the engine's next step, whatever is decided."""
        cluster = self.cluster
        queued: dict[ReplicaId, int] = {}
        for request in sorted((cluster.requests[q] for q in self.homes), key=lambda q: q.order):
            home = cluster.replicas.get(self.homes[request.id]) if request.id not in self.leaving else None
            if home is None:
                continue
            if home.free >= request.tokens:
                cluster.locate(request, home)
                del self.homes[request.id]
                self._stale[request.id] = self._unsettled[request.id] = None
            else:
                queued[home.id] = queued.get(home.id, 0) + 1
        for replica in cluster.replicas.values():
            if replica.queued or replica.id in queued:
                cluster.enqueue(replica, queued.get(replica.id, 0))

    def _correct(self) -> None:
        """Set the difference between what every engine has in use and what the replica's requests should.

        Requests that prefill, or are on their way, may have all of their blocks by now, or none.
        """
        cluster = self.cluster
        uncertain: dict[ReplicaId, int] = {}
        for request_id in self._unsettled:
            request = cluster.requests[request_id]
            if request.replica is not None:
                uncertain[request.replica.id] = uncertain.get(request.replica.id, 0) + request.tokens
        for status in self.statuses.values():
            if status.free_blocks is not None and status.state is ReplicaState.RUNNING:
                replica = cluster.replicas[status.id]
                unsure = uncertain.get(status.id, 0)
                used = max(0, status.capacity - status.free_blocks * status.block_size)
                unexplained = used - (replica.load + replica.held - unsure)
                cluster.correct(replica, unexplained - min(max(unexplained, 0), unsure))


def finish(slices: Generator[None, None, T]) -> T:
    """The result of work in slices, done without a pause."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: T = end.value
            return result
