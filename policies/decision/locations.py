"""Where things are: the replicas and requests of a pool, from reports, moves under way and placements.

Nothing here is learned: a snapshot of the pool's replicas contains all of it, so an epoch that fails costs only a new
`Locations` (`PoolMemory`). From epoch to epoch an observation costs time in proportion to its changes. `_location`
derives every request's location from the newest report, the moves under way and the placements since:

    State of the request                       Location in the cluster
    on a replica that is up                    that replica
    on the move to another replica             the target, with blocks at the source, too, unless it waits there for
                                               other reasons than its prefill
    in a replica's queue, without blocks       waiting, with that replica as its home
    on a replica that is about to stop         waiting and leaving; an immovable request is not in the cluster
    placed since the last report               the chosen replica, until its report or until the placement expires;
                                               on the move from there already: as on the move
    on no replica                              waiting, until the placement expires (in the idealised model: for ever)

So a decision's location for a request lasts until the next observation, and longer only if that confirms it.

A request's marks follow from its location:

    stale       a report, a move, a placement or a decision has come since its location was derived
    unsettled   on a replica or on the move, and may lack some of its blocks; never waiting, never absent
    absent      not in the cluster, since it cannot leave a replica that is about to stop; its size is kept here
    at home     waiting in the queue of a replica (`homes`); `leaving` if that replica is about to stop

Of replicas, the expected ones are in the cluster and not listed yet; the closed ones are those of the last plan.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from policies.cluster.changes import Arrival, Crossing, Departure
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.cluster.sizes import size_on
from policies.cluster.supply import Supply
from policies.decision.limits import Terms
from policies.decision.observation import SETTLED, PoolReport, Resident, Status
from policies.decision.placement import Placed
from policies.decision.slices import in_slices
from policies.model import UP, AdapterId, Phase, ReplicaId, ReplicaState, RequestId, RequestLoad, Role, Tokens
from policies.plan import Move, MoveReport, Plan, Reason
from policies.precedence import Precedence
from policies.prefix.routing import Router

SILENT_S = 30.0
"""The time after which a move without new reports no longer counts as under way, in seconds.

The source's own time-outs are shorter.
"""


@dataclass(frozen=True, slots=True)
class Underway:
    """A move that has not ended. `since` is the time of its order or of the newest report."""

    move: Move
    since: float


class _Location(NamedTuple):
    """A request's location: `replica` (None: waiting) and, for a request on the move, the `source` of its blocks.

    `home` is the replica whose queue a waiting request is in. The request `leaves` a home that is about to stop.
    """

    replica: Replica | None
    source: Replica | None = None
    pinned: bool = False
    home: ReplicaId | None = None
    leaves: bool = False


_NOWHERE = _Location(None)


class Locations:
    """The replicas and requests of one pool: what they have reported, and the cluster that follows.

    `homes` are the replicas of waiting requests, by request; `leaving` are the requests whose replica is about to stop.
    `router` has the content of the replicas' caches, and the prefills that wait there. `capacity` is that of a new
    replica, in tokens.
    """

    def __init__(self, terms: Terms, router: Router, capacity: Tokens) -> None:
        self._has_level = terms.has_level
        self._moves_take_time = terms.moves_take_time
        self._classes = terms.classes
        self.router = router
        self.cluster = Cluster(
            capacity,
            Supply(terms.per_node),
            holds=terms.moves_take_time,
            starts_as=ReplicaState.STARTING if terms.starts_take_time else ReplicaState.RUNNING,
            by_machine=terms.by_machine,
        )
        self.statuses: dict[ReplicaId, Status] = {}
        self.homes: dict[RequestId, ReplicaId] = {}
        self.leaving: dict[RequestId, None] = {}
        self.under_way: dict[RequestId, Underway] = {}
        self.placed: dict[RequestId, Placed] = {}
        self.decoding = 0
        """The number of requests that decode, by the newest reports."""
        self._residents: dict[RequestId, Resident] = {}
        self._absent: dict[RequestId, Tokens] = {}
        self._stale: dict[RequestId, None] = {}
        self._unsettled: dict[RequestId, None] = {}
        self._expected: dict[ReplicaId, None] = {}
        self._closed: dict[ReplicaId, float | None] = {}

    # --- decisions ------------------------------------------------------------------------------------

    def add_plan(self, plan: Plan, decided: Iterable[Request], now: float) -> None:
        """Add a plan, made by decisions on the `decided` requests.

        The next observation locates these requests anew: its reports alone decide where they really are.
        """
        self._stale.update((request.id, None) for request in decided)
        if self._moves_take_time:
            self.under_way.update((move.request, Underway(move, now)) for move in plan.moves)
        self._expected.update(
            (opening.replica, None) for opening in plan.opened if opening.replica in self.cluster.replicas
        )

    def add_closings(self, idle: Mapping[ReplicaId, float | None]) -> None:
        """Add the plan's closed replicas, with the times since which they are empty."""
        self._closed.update(idle)

    def add_placement(self, request_id: RequestId, placed: Placed) -> None:
        """Add the placement of an arrival, or of a request that a replica has lost or refused."""
        self._forget_location(request_id)
        self.under_way.pop(request_id, None)
        self.placed[request_id] = placed
        self._stale[request_id] = None
        if placed.replica is None:
            return
        if self._has_level:
            replica = self.cluster.replicas[placed.replica]
            self.cluster.set_backlog(replica, replica.backlog + placed.tokens)
        self._unsettled[request_id] = None

    def drop_placement(self, request_id: RequestId) -> None:
        """Drop the placement of a request, if it has one. Its next report has its location."""
        if self.placed.pop(request_id, None) is not None:
            self._stale[request_id] = None

    def add_order(self, move: Move, now: float) -> None:
        """Add a move that is ordered between two epochs, by an operator or with a placement."""
        self.under_way[move.request] = Underway(move, now)
        self._stale[move.request] = None

    def add_request(
        self,
        request_id: RequestId,
        tokens: Tokens,
        precedence: Precedence,
        replica: Replica | None = None,
        adapter: AdapterId | None = None,
        names: Sequence[int] = (),
    ) -> Request:
        """Add a request to the cluster, with the rank and the turn of its class."""
        return self.cluster.add_request(request_id, tokens, replica, *self._in_line(precedence), adapter, names)

    def new_request(self, arrival: Arrival) -> Request:
        """The request of an arrival, as `add_request` would add it. Changes nothing."""
        in_line = self._in_line(arrival.precedence)
        return self.cluster.new_request(arrival.id, arrival.tokens, *in_line, arrival.adapter, arrival.names)

    def _in_line(self, precedence: Precedence) -> tuple[int, float]:
        """The rank and the turn of a request."""
        classes = self._classes
        return classes.rank(precedence.service_class), classes.turn(precedence)

    # --- queries --------------------------------------------------------------------------------------

    def present_classes(self) -> set[str]:
        """The service classes of all requests."""
        present = {resident.load.precedence.service_class for resident in self._residents.values()}
        return present | {placed.precedence.service_class for placed in self.placed.values()}

    def model_of(self, request: RequestId) -> str | None:
        """The model on a waiting request's replica, with which alone the request continues; None without a replica."""
        home = self.homes.get(request)
        status = None if home is None else self.statuses.get(home)
        return None if status is None else status.model

    def role(self, replica: ReplicaId) -> Role:
        """A replica's part in prefill and decoding."""
        found = self.cluster.replicas.get(replica)
        return Role.BOTH if found is None else found.role

    def phase(self, request: RequestId) -> Phase | None:
        """A request's phase in the newest report; None if no replica has reported the request."""
        resident = self._residents.get(request)
        return resident.load.phase if resident else None

    def moves_between(self, source: ReplicaId, target: ReplicaId) -> bool:
        """True if a move from `source` to `target` is under way."""
        moves = (underway.move for underway in self.under_way.values())
        return any((move.source, move.target) == (source, target) for move in moves)

    def asks_again(self, request: RequestId) -> bool:
        """True if a request that no replica has accepted will ask for one again: no report has it."""
        placed = self.placed.get(request)
        return placed is not None and placed.replica is None and request not in self._residents

    def is_unstarted(self, request: RequestId) -> bool:
        """True for a request that is queued, in prefill, or on its way to a replica."""
        return request in self.cluster.requests and self.phase(request) not in SETTLED

    # --- moves ----------------------------------------------------------------------------------------

    def take_move(self, report: MoveReport, now: float) -> bool:
        """Follow a move by its newest report. True if it has ended, and was expected to be under way."""
        pair = (report.source, report.target)
        underway = self.under_way.get(report.request)
        self._stale[report.request] = None
        same = underway is not None and (underway.move.source, underway.move.target) == pair
        if report.moved is None:
            move = Move(report.request, *pair, report.tokens or Tokens(0), report.reason, 0, report.path)
            self.under_way[report.request] = Underway(underway.move if underway is not None and same else move, now)
            return False
        if report.moved:
            self.router.moved(report.request, *pair, now)
            self._follow_placed(report)
        if same:
            del self.under_way[report.request]
        return same

    def _follow_placed(self, report: MoveReport) -> None:
        """Expect a request that has moved on before its first report from the target."""
        placed = self.placed.get(report.request)
        if placed is not None and placed.replica == report.source:
            self.placed[report.request] = replace(placed, replica=report.target)

    def expire(self, now: float) -> None:
        """Drop moves without news, and placements that no report has confirmed in time."""
        for request, underway in list(self.under_way.items()):
            if underway.since <= now - SILENT_S:
                del self.under_way[request]
                self._stale[request] = None
        for request, placed in list(self.placed.items()):
            if placed.expires_at <= now:
                del self.placed[request]
                self.under_way.pop(request, None)
                self.router.ended(request)
                self._stale[request] = None

    # --- requests -------------------------------------------------------------------------------------

    def take_gone(self, gone: Iterable[RequestId]) -> Iterator[tuple[int, Departure]]:
        """Remove requests that have ended. Yields their departures from replicas, each with the request's order."""
        cluster = self.cluster
        for request_id in gone:
            resident = self._residents.pop(request_id, None)
            if resident is not None and resident.load.phase is Phase.DECODE:
                self.decoding -= 1
            if request_id in self.placed:
                self._stale[request_id] = None
                continue
            self._forget_location(request_id)
            self._stale.pop(request_id, None)
            self.router.ended(request_id)
            request = cluster.requests.get(request_id)
            if request is None:
                continue
            if request.replica is not None:
                yield request.order, Departure(request_id, request.kind, request.replica)
            cluster.remove_request(request)

    def known_sizes(self, sizes: Mapping[RequestId, Tokens]) -> Iterator[tuple[RequestId, Tokens]]:
        """The sizes of requests in the cluster. Stores those of absent requests, which must stay where they are."""
        if not self._absent:
            return iter(sizes.items())
        self._absent.update((q, sizes[q]) for q in self._absent if q in sizes)
        return ((q, tokens) for q, tokens in sizes.items() if q not in self._absent)

    def take_requests(
        self, residents: Sequence[Resident], crossed: list[Crossing], moving: Collection[RequestId]
    ) -> int:
        """Store new and changed requests. Appends those in another size class to `crossed`.

        A move that was ordered with a placement has begun if the request's first report comes with one of the move:
        then it is `moving`. Returns the number of those that decode now. All other decoding requests have also decoded
        before.
        """
        cluster = self.cluster
        others = ((cluster.requests.get(resident.load.id), resident.load.tokens) for resident in residents)
        resized = [(q.id, Tokens(max(1, tokens))) for q, tokens in others if q is not None and q.tokens != tokens]
        if resized:
            cluster.resize(resized, crossed)
        decoding = 0
        for resident in residents:
            request_id = resident.load.id
            was = self._residents.get(request_id)
            self._residents[request_id] = resident
            if request_id in self._absent:
                self._absent[request_id] = resident.load.tokens
            decoding += resident.load.phase is Phase.DECODE
            self.decoding -= was is not None and was.load.phase is Phase.DECODE
            placed = self.placed.get(request_id)
            # One that waits for a replica runs by its first report; a later one may be of a replica that it has left.
            found_one = placed is not None and placed.replica is None and was is None
            if found_one or (placed is not None and placed.replica == resident.replica):
                del self.placed[request_id]
                if request_id not in moving:
                    self.under_way.pop(request_id, None)
            self._stale[request_id] = None
        self.decoding += decoding
        return decoding

    # --- replicas -------------------------------------------------------------------------------------

    def take_replicas(self, seen: PoolReport) -> dict[ReplicaId, Replica]:
        """Add and update replicas. Returns those to remove from the cluster after their requests have been relocated.

        A closed replica that is still up has not closed yet, or will not: it is added again.
        """
        cluster = self.cluster
        statuses, switched = self._take_statuses(seen)
        statuses += (self.statuses[r] for r in self._closed if r in self.statuses)
        changed = dict.fromkeys((*seen.lost, *self._closed, *self._expected, *(status.id for status in statuses)))
        for status in statuses:
            if status.state in UP:
                self._add_or_change(status)
        self._closed.clear()
        self._expected.clear()
        if changed:
            self._stale.update(dict.fromkeys(self.under_way))
            self._stale.update(dict.fromkeys(self.placed))
        if switched:
            self._stale.update((q, None) for q, resident in self._residents.items() if resident.replica in switched)
        return {r: cluster.replicas[r] for r in changed if r in cluster.replicas and not self._is_up(r)}

    def _take_statuses(self, seen: PoolReport) -> tuple[list[Status], set[ReplicaId]]:
        """Store the reported statuses.

        Returns those that are new, closed or different in more than their free blocks, and the replicas that have come
        up or gone down.
        """
        changed, switched = [], set()
        for replica_id in seen.lost:
            self.statuses.pop(replica_id, None)
            self._closed.pop(replica_id, None)
            self.router.forget(replica_id)
        if seen.lost:
            for request in [q for q, underway in self.under_way.items() if underway.move.source in seen.lost]:
                del self.under_way[request]
                self._stale[request] = None
        statuses, closed = self.statuses, self._closed
        for status in seen.replicas:
            was = statuses.get(status.id)
            statuses[status.id] = status
            if was is None or status.id in closed:
                changed.append(status)
            elif (
                was.capacity != status.capacity
                or was.state != status.state
                or was.max_requests != status.max_requests
                or was.max_adapters != status.max_adapters
                or was.node != status.node
            ):
                changed.append(status)
                if (was.state in UP) is not (status.state in UP):
                    switched.add(status.id)
        return changed, switched

    def set_capacity(self, capacity: Tokens) -> None:
        """Set the capacity of a new replica, in tokens, and of every replica that reports none, as while it starts."""
        cluster = self.cluster
        if capacity != cluster.capacity:
            cluster.set_capacity(capacity)
            for status in self.statuses.values():
                if not status.capacity and status.id in cluster.replicas:
                    self._add_or_change(status)

    def _is_up(self, replica: ReplicaId) -> bool:
        status = self.statuses.get(replica)
        return status is not None and status.state in UP

    def _add_or_change(self, status: Status) -> None:
        cluster = self.cluster
        replica = cluster.replicas.get(status.id)
        capacity = status.capacity or cluster.capacity
        most = status.max_requests or cluster.max_requests
        state = ReplicaState.STARTING if status.state is ReplicaState.WAKING else status.state
        if replica is None:
            replica = cluster.add_replica(status.id, status.node, capacity, state, most, status.max_adapters)
            cluster.set_idle_since(replica, self._closed.get(status.id))
            cluster.supply.claim(status.id)
        else:
            cluster.update_replica(replica, state, capacity, most, status.max_adapters)
            cluster.set_node(replica, status.node)

    def expect(self, seen: PoolReport) -> None:
        """Add requested replicas that are not listed yet, and limit the supply to those that may still be opened."""
        cluster = self.cluster
        cluster.supply.allow(float("inf"))
        for _ in range(seen.opening):
            replica_id, node = cluster.supply.take()
            cluster.add_replica(replica_id, node, cluster.capacity, ReplicaState.STARTING)
            self._expected[replica_id] = None
        if seen.pool.max_replicas is not None:
            closed = (ReplicaState.STOPPED, ReplicaState.ASLEEP)
            existing = sum(status.state not in closed for status in self.statuses.values())
            cluster.supply.allow(max(0, seen.pool.max_replicas - existing - seen.opening))

    # --- locations ------------------------------------------------------------------------------------

    def relocate(self, removed: Mapping[ReplicaId, Replica]) -> Iterator[None]:
        """Derive the locations of all stale requests anew. No location is on a `removed` replica."""
        cluster = self.cluster
        for replica in removed.values():
            # Nothing is placed there during the pauses.
            limits = replica.capacity, replica.max_requests, replica.max_adapters
            cluster.update_replica(replica, ReplicaState.STOPPED, *limits)
        replicas = cluster.replicas
        up = {r: replica for r, replica in replicas.items() if r not in removed} if removed else replicas
        stale, self._stale = self._stale, {}
        for number, some in enumerate(in_slices(tuple(stale))):
            if number:
                yield
            for request_id in some:
                self._locate(request_id, self._location(request_id, up))

    def _location(self, request_id: RequestId, up: Mapping[ReplicaId, Replica]) -> _Location | None:
        """A request's location, given the replicas that are up; None if the request is not in the cluster."""
        placed, underway = self.placed.get(request_id), self.under_way.get(request_id)
        target = None if underway is None else up.get(underway.move.target)
        chosen = None if placed is None else placed.replica
        if placed is not None and chosen is None:
            return _NOWHERE
        if chosen is not None and (replica := up.get(chosen)) is not None:
            if target is None or target is replica:
                return _Location(replica, pinned=True)
            return _Location(target, replica, pinned=True)
        resident = self._residents.get(request_id)
        if resident is None:
            return None
        if resident.replica is None:
            return _NOWHERE
        home = up.get(resident.replica)
        stays = resident.load.immovable is not None or resident.load.phase is Phase.MOVING
        if target is not None and underway is not None:
            # A request that is preempted during its move has lost its blocks. One that waits for its prefill gets some.
            holds = resident.load.phase is not Phase.WAITING or underway.move.reason is Reason.DISAGGREGATE
            return _Location(target, home if holds and home is not target else None, pinned=True)
        if home is None:
            return None if stays else _Location(None, home=resident.replica, leaves=True)
        if resident.load.phase is Phase.WAITING and not stays:
            return _Location(None, home=resident.replica)
        return _Location(home, pinned=stays)

    def _locate(self, request_id: RequestId, location: _Location | None) -> None:
        cluster = self.cluster
        request = cluster.requests.get(request_id)
        absent = self._forget_location(request_id)
        if location is None:
            if request_id in self._residents:
                tokens = absent or self._residents[request_id].load.tokens
                self._absent[request_id] = tokens if request is None else request.tokens
            if request is not None:
                cluster.remove_request(request)
            return
        if request is None:
            newest = self._newest(request_id)
            tokens = Tokens(max(1, absent or newest.tokens))
            names = self.router.names(request_id)
            request = self.add_request(request_id, tokens, newest.precedence, location.replica, newest.adapter, names)
        cluster.locate(request, location.replica, location.source)
        if request.pinned is not location.pinned:
            cluster.pin(request, location.pinned)
        if location.home is not None:
            self.homes[request_id] = location.home
            if location.leaves:
                self.leaving[request_id] = None
        if location.replica is not None:
            resident = self._residents.get(request_id)
            if location.source is not None or resident is None or resident.load.phase not in SETTLED:
                self._unsettled[request_id] = None

    def _forget_location(self, request_id: RequestId) -> Tokens | None:
        """Forget a request's location. Returns the size of a request that was absent from the cluster."""
        self.homes.pop(request_id, None)
        self.leaving.pop(request_id, None)
        self._unsettled.pop(request_id, None)
        return self._absent.pop(request_id, None)

    def _newest(self, request_id: RequestId) -> RequestLoad | Placed:
        """The newest report of a request; before the first one, its placement."""
        resident = self._residents.get(request_id)
        return self.placed[request_id] if resident is None else resident.load

    def is_placed(self, request: Request) -> bool:
        """True if the request is still in the cluster and on a replica."""
        return request.replica is not None and self.cluster.requests.get(request.id) is request

    def admit_at_home(self) -> None:
        """Put queued requests on their homes if they fit there, since the engine runs them in its next step anyway."""
        cluster = self.cluster
        queued: dict[ReplicaId, list[int]] = {}
        for request in sorted((cluster.requests[q] for q in self.homes), key=lambda q: q.place_in_line):
            home = cluster.replicas.get(self.homes[request.id]) if request.id not in self.leaving else None
            if home is None:
                continue
            if home.free >= size_on(cluster, request, home):
                cluster.locate(request, home)
                del self.homes[request.id]
                self._stale[request.id] = self._unsettled[request.id] = None
            else:
                queued.setdefault(home.id, []).append(size_on(cluster, request, home))
        for replica in cluster.replicas.values():
            if replica.queued or replica.id in queued:
                sizes = queued.get(replica.id, ())
                cluster.enqueue(replica, len(sizes), sum(sizes))
        if self._has_level:
            self._count_backlogs()

    def _prefilled_on(self, request: Request) -> Replica | None:
        """The replica that has the prefill of an unsettled request before it; None for one that decodes and moves."""
        if request.source is None:
            return request.replica
        underway = self.under_way.get(request.id)
        disaggregates = underway is not None and underway.move.reason is Reason.DISAGGREGATE
        return request.source if disaggregates and self.phase(request.id) not in SETTLED else None

    def backlogs(self) -> dict[ReplicaId, int]:
        """The tokens that wait for their prefill, by replica: of requests in its queue, in prefill, or expected."""
        backlogs: dict[ReplicaId, int] = {}
        for request_id in self._unsettled:
            request = self.cluster.requests[request_id]
            replica = self._prefilled_on(request)
            if replica is not None:
                backlogs[replica.id] = backlogs.get(replica.id, 0) + request.tokens
        for request_id, home in self.homes.items():
            backlogs[home] = backlogs.get(home, 0) + self.cluster.requests[request_id].tokens
        return backlogs

    def _count_backlogs(self) -> None:
        """Set every replica's backlog."""
        backlogs = self.backlogs()
        for replica in self.cluster.replicas.values():
            self.cluster.set_backlog(replica, backlogs.get(replica.id, 0))

    def correct(self) -> None:
        """Set the difference between every engine's own count of used tokens and its requests' sizes.

        Blocks that requests share by prediction count once. Unsettled requests (in prefill, or on their way) have any
        part of their blocks, so they explain any difference up to their sizes.
        """
        cluster = self.cluster
        uncertain: dict[ReplicaId, int] = {}
        for request_id in self._unsettled:
            request = cluster.requests[request_id]
            for place in dict.fromkeys((request.replica, self._prefilled_on(request))):
                if place is not None:
                    uncertain[place.id] = uncertain.get(place.id, 0) + request.tokens
        replicas = cluster.replicas
        for status in self.statuses.values():
            if status.free_blocks is not None and status.state is ReplicaState.RUNNING:
                replica = replicas[status.id]
                used = max(0, status.capacity - status.free_blocks * status.block_size)
                saved = cluster.prompts.saved(replica.id)
                unexplained = used - (replica.load + replica.held - saved)
                if unsure := uncertain.get(status.id):
                    unexplained = max(unexplained, min(unexplained + unsure, 0))
                cluster.correct(replica, unexplained - saved)
