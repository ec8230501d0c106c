"""Indexes of the cluster for the paper's operations: by category, by priority, by time of activation.

The first query builds the indexes; later ones update only the replicas that `touch` has marked. So the cost of an
operation depends on the replicas that it changes, not on the size of the cluster.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from policies.cluster.classes import Kind
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.cluster.search import fits
from policies.model import ReplicaId, ReplicaState
from policies.rules.mell.ranking import Ranking, Weights
from policies.rules.mell.units import Unit, largest_first, tiny_units
from policies.rules.policy import NONE, Barred

CATEGORIES = (Kind.TINY, Kind.SMALL, Kind.MEDIUM, Kind.LARGE)
"""A replica's category is the class of its largest request; multi-items are TINY."""


@dataclass(slots=True, eq=False)
class _Face:
    """One replica's entries in the indexes. `category` is None for an empty replica.

    `middles` are the SMALL and MEDIUM requests of a SMALL or MEDIUM replica. `single` marks a LARGE replica without
    such requests, `cleared` a replica that is ranked by its room without TINY units, too. `hole` is the class of a
    request that has left the replica.
    """

    category: Kind | None
    score: float
    single: bool = False
    cleared: bool = False
    hole: Kind | None = None
    middles: tuple[tuple[int, int, Request], ...] = ()


@dataclass(slots=True, eq=False)
class Board:
    """The indexed RUNNING replicas, without the barred ones. With `clears`, moving TINY units away may make room."""

    cluster: Cluster
    weights: Weights
    clears: bool
    barred: Barred = NONE
    log: list[Replica] = field(default_factory=list)
    _units: dict[ReplicaId, list[Unit]] = field(default_factory=dict)
    _faces: dict[ReplicaId, _Face] = field(default_factory=dict)
    _touched: dict[ReplicaId, Replica] = field(default_factory=dict)
    _ranked: dict[Kind, Ranking] = field(default_factory=lambda: {kind: Ranking() for kind in CATEGORIES})
    _recent: dict[Kind, list[tuple[int, Replica]]] = field(default_factory=lambda: {kind: [] for kind in CATEGORIES})
    _cleared: dict[Kind, Ranking] = field(default_factory=dict)
    _holed: dict[ReplicaId, Kind] = field(default_factory=dict)
    _holes: dict[Kind, Ranking] = field(default_factory=lambda: {kind: Ranking() for kind in CATEGORIES})
    _idle: list[tuple[int, Replica]] = field(default_factory=list)
    _middles: list[tuple[int, int, Request]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._touched = {r.id: r for r in self.cluster.hosts() if r.id not in self.barred}

    def touch(self, replica: Replica) -> None:
        """Mark a changed replica."""
        if replica.state is _RUNNING:
            self._touched[replica.id] = replica
            self._units.pop(replica.id, None)
            self.log.append(replica)

    def mark_hole(self, replica: Replica, kind: Kind) -> None:
        """Note that a request of class `kind` has left the replica, and no move has refilled its place."""
        self._holed[replica.id] = kind
        self.touch(replica)

    # --- questions about one replica ------------------------------------------------------------------

    def category(self, replica: Replica) -> Kind | None:
        """The category of a replica; None if it is empty or not running."""
        self._refresh()
        face = self._faces.get(replica.id)
        return face.category if face else None

    def need(self, unit: Unit) -> int:
        """The room that a unit needs: its size and headroom, but no more than an empty replica has."""
        tokens, cluster = unit.tokens, self.cluster
        return max(tokens, min(tokens + cluster.conditions.headroom * len(unit.requests), cluster.capacity))

    def fits(self, unit: Unit, replica: Replica) -> bool:
        """True if the replica has room for the unit now.

        Blocks held for requests that have left count as used, except for a unit that returns to its home.
        """
        count = len(replica.requests)
        if replica.state is not _RUNNING or count + len(unit.requests) > replica.max_requests:
            return False
        if replica is unit.home and self.cluster.holds:
            return self.need(unit) <= -replica.overload - replica.headroom * count
        return self.need(unit) <= replica.room

    def tiny_units(self, replica: Replica) -> list[Unit]:
        """The TINY units among a replica's movable requests, the largest first."""
        units = self._units.get(replica.id)
        if units is None:
            units = tiny_units(replica, self.cluster.classes, self.cluster.decisions.may_move)
            units.sort(key=largest_first, reverse=True)
            self._units[replica.id] = units
        return units

    def largest_tiny(self, donor: Replica, replica: Replica) -> Unit | None:
        """The largest TINY unit of one replica that fits on another."""
        room = replica.room
        fitting = (unit for unit in self.tiny_units(donor) if unit.tokens <= room and self.fits(unit, replica))
        return next(fitting, None)

    def largest_request(self, donor: Replica, replica: Replica) -> Request | None:
        """The largest movable request of one replica that fits on another."""
        room, cluster = replica.room, self.cluster
        fitting = (q for q in donor.requests.values() if q.tokens <= room and cluster.decisions.may_move(q))
        fitting = (q for q in fitting if fits(cluster, q, replica))
        return max(fitting, key=lambda request: (request.tokens, -request.order), default=None)

    def could_fit(self, unit: Unit, replica: Replica) -> bool:
        """True if the replica has room for the unit once TINY units in its way have left."""
        seats = len(replica.requests) + len(unit.requests) <= replica.max_requests
        return seats and replica.state is _RUNNING and self.need(unit) <= self._firm_room(replica)

    # --- questions about all of them ------------------------------------------------------------------

    def best(self, category: Kind, unit: Unit) -> Replica | None:
        """The replica of the highest priority in a category with room for the unit.

        If moves take time, the unit's home comes first: staying needs no move, and frees the blocks held for the move.
        """
        home = unit.home
        if home and self.cluster.holds and self.category(home) is category and self.fits(unit, home):
            return home
        return self._best(self._ranked[category], unit)

    def best_hole(self, unit: Unit) -> Replica | None:
        """The replica of the highest priority with a hole of the unit's class and room for the unit."""
        return self._best(self._holes[unit.kind], unit)

    def best_cleared(self, category: Kind, unit: Unit) -> Replica | None:
        """The replica of the highest priority in a category with room for the unit once TINY units have left.

        A LARGE replica with a SMALL or MEDIUM request is no candidate: it has no room for another one.
        """
        home = unit.home
        if home and self.cluster.holds and self.category(home) is category and self.fits(unit, home):
            return home
        self._refresh()
        if category not in self._cleared:
            self._cleared[category] = Ranking()
            for _, replica in self._recent[category]:
                self._rank_cleared(replica, self._faces[replica.id])
        return self._cleared[category].best(self.need(unit), lambda replica: self.could_fit(unit, replica))

    def single(self, replica: Replica) -> bool:
        """True if the replica has a LARGE request but no SMALL or MEDIUM one."""
        self._refresh()
        face = self._faces.get(replica.id)
        return face is not None and face.single

    def latest(self, category: Kind, other_than: Replica | None = None) -> Replica | None:
        """The most recently activated replica of a category."""
        self._refresh()
        for _, replica in reversed(self._recent[category]):
            if replica is not other_than:
                return replica
        return None

    def latest_with_tiny(self, category: Kind, after: Replica) -> Replica | None:
        """The most recently activated replica of a category with TINY units, if it is more recent than `after`."""
        for replica in self.by_recency(category):
            if replica.order <= after.order:
                return None
            if any(request.kind <= _TINY for request in replica.requests.values()):
                return replica
        return None

    def by_recency(self, category: Kind) -> Iterator[Replica]:
        """The replicas of a category, the most recently activated first."""
        self._refresh()
        return (replica for _, replica in reversed(self._recent[category]))

    def idle(self, unit: Unit) -> Replica | None:
        """An empty replica with room for the unit: its home, or else the oldest."""
        self._refresh()
        home = unit.home
        if home and not home.requests and self.fits(unit, home):
            return home
        return next((replica for _, replica in self._idle if self.fits(unit, replica)), None)

    def largest_middle(self, replica: Replica) -> Request | None:
        """The largest SMALL or MEDIUM request on a SMALL or MEDIUM replica that could move to `replica`."""
        for request in self._middles_below(self._firm_room(replica)):
            return request
        return None

    def preferred_middle(self, replica: Replica) -> Request | None:
        """As `largest_middle`, but from the donor that has the highest priority for `replica`; the largest there."""
        best: tuple[float, int, int] | None = None
        found = None
        for request in self._middles_below(self._firm_room(replica)):
            assert request.replica is not None
            key = (self.weights.toward(replica, request.replica), -request.replica.order, request.tokens)
            if best is None or key > best:
                best, found = key, request
        return found

    # --- inside ---------------------------------------------------------------------------------------

    def _best(self, ranking: Ranking, unit: Unit) -> Replica | None:
        self._refresh()
        return ranking.best(self.need(unit), None if len(unit.requests) == 1 else lambda r: self.fits(unit, r))

    def _firm_room(self, replica: Replica) -> int:
        """The room of a replica without its movable TINY units."""
        if not self.clears:
            return replica.room
        tiny = (q for q in replica.requests.values() if q.kind <= _TINY and self.cluster.decisions.may_move(q))
        return replica.room + sum(q.tokens + replica.headroom for q in tiny)

    def _middles_below(self, room: int) -> Iterator[Request]:
        """Movable SMALL and MEDIUM requests that fit into `room`, the largest first."""
        self._refresh()
        end = bisect_right(self._middles, (room - self.cluster.conditions.headroom, _LAST))
        for index in range(end - 1, -1, -1):
            request = self._middles[index][2]
            if self.cluster.decisions.may_move(request):
                yield request

    def _refresh(self) -> None:
        if self._touched:
            for replica in self._touched.values():
                self._remove(replica)
                self._add(replica)
            self._touched.clear()

    def _add(self, replica: Replica) -> None:
        kinds = [q.kind for q in replica.requests.values()]
        score = self.weights.workload(replica)
        if not kinds:
            self._faces[replica.id] = _Face(None, score)
            insort(self._idle, (replica.order, replica))
            return
        category = max(kinds) or _TINY
        room = replica.room if len(kinds) < replica.max_requests else -1
        face = self._faces[replica.id] = _Face(category, score, hole=self._holed.get(replica.id))
        self._ranked[category].add(replica, score, room)
        insort(self._recent[category], (replica.order, replica))
        if face.hole is not None:
            self._holes[face.hole].add(replica, score, room)
        if category is _LARGE:
            face.single = _SMALL not in kinds and _MEDIUM not in kinds
        if category in self._cleared:
            self._rank_cleared(replica, face)
        if category in (_SMALL, _MEDIUM):
            middles = (q for q in replica.requests.values() if q.kind > _TINY)
            face.middles = tuple((q.tokens, -q.order, q) for q in middles)
            for entry in face.middles:
                insort(self._middles, entry)

    def _rank_cleared(self, replica: Replica, face: _Face) -> None:
        assert face.category is not None
        if face.single or face.category is not _LARGE:
            face.cleared = True
            self._cleared[face.category].add(replica, face.score, self._firm_room(replica))

    def _remove(self, replica: Replica) -> None:
        face = self._faces.pop(replica.id, None)
        if face is None:
            return
        if face.category is None:
            del self._idle[bisect_left(self._idle, (replica.order,))]
            return
        self._ranked[face.category].remove(replica, face.score)
        recent = self._recent[face.category]
        del recent[bisect_left(recent, (replica.order,))]
        if face.hole is not None:
            self._holes[face.hole].remove(replica, face.score)
        if face.cleared:
            self._cleared[face.category].remove(replica, face.score)
        for entry in face.middles:
            del self._middles[bisect_left(self._middles, entry[:2])]


_RUNNING = ReplicaState.RUNNING
_TINY, _SMALL, _MEDIUM, _LARGE = CATEGORIES
_LAST = 1
"""Greater than the `-order` of every entry."""
