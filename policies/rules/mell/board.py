"""The cluster as the paper's operations ask about it: by category, by priority, by time of activation.

Built when first asked and then kept right, replica by replica, by whoever changes one and says so with `touch`. So an
operation costs what it touches, not a look at every replica.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from policies.cluster.classes import Kind
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.model import ReplicaId, ReplicaState
from policies.rules.mell.ranking import Ranking, Weights
from policies.rules.mell.units import Unit, largest_first, tiny_units
from policies.rules.policy import NONE, Barred

CATEGORIES = (Kind.TINY, Kind.SMALL, Kind.MEDIUM, Kind.LARGE)
"""A replica is of the category of its largest request; multi-items are TINY."""


@dataclass(slots=True, eq=False)
class _Face:
    """What the indexes say of a replica. `category` is None when nothing is on it.

    `middles` are its SMALL and MEDIUM requests, for one of the category SMALL or MEDIUM; `single` says that it is a
    LARGE one without any. `cleared` says that it is ranked by the room without
    TINY units. `hole` is the class of a request that has left it.
    """

    category: Kind | None
    score: float
    single: bool = False
    cleared: bool = False
    hole: Kind | None = None
    middles: tuple[tuple[int, int, Request], ...] = ()


@dataclass(slots=True, eq=False)
class Board:
    """RUNNING replicas but the barred ones, indexed. With `clears` room may be made by moving TINY units away."""

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
        self._touched = {r.id: r for r in self.cluster.running() if r.id not in self.barred}

    def touch(self, replica: Replica) -> None:
        """Something on that replica has changed."""
        if replica.state is _RUNNING:
            self._touched[replica.id] = replica
            self._units.pop(replica.id, None)
            self.log.append(replica)

    def mark_hole(self, replica: Replica, kind: Kind) -> None:
        """A request of that class has left a replica of that category, and nothing has been moved there for it."""
        self._holed[replica.id] = kind
        self.touch(replica)

    # --- questions about one replica ------------------------------------------------------------------

    def category(self, replica: Replica) -> Kind | None:
        """The category of a replica, None if it is empty or not running."""
        self._refresh()
        face = self._faces.get(replica.id)
        return face.category if face else None

    def need(self, unit: Unit) -> int:
        """The room that a unit asks for; beyond its size no more than an empty replica has."""
        tokens, cluster = unit.tokens, self.cluster
        return max(tokens, min(tokens + cluster.headroom * len(unit.requests), cluster.capacity))

    def fits(self, unit: Unit, replica: Replica) -> bool:
        """Whether the unit may go there as things are.

        Blocks that are still held for what has left count as used, but not for what returns to them.
        """
        count = len(replica.requests)
        if replica.state is not _RUNNING or count + len(unit.requests) > replica.max_requests:
            return False
        if replica is unit.home and self.cluster.holds:
            return self.need(unit) <= -replica.overload - replica.headroom * count
        return self.need(unit) <= replica.room

    def tiny_units(self, replica: Replica) -> list[Unit]:
        """The TINY units of a replica, formed of those requests that may move, the largest first."""
        units = self._units.get(replica.id)
        if units is None:
            units = tiny_units(replica, self.cluster.classes, self.cluster.may_move)
            units.sort(key=largest_first, reverse=True)
            self._units[replica.id] = units
        return units

    def largest_tiny(self, donor: Replica, replica: Replica) -> Unit | None:
        """The largest TINY unit of one replica that fits on another."""
        room = replica.room
        fitting = (unit for unit in self.tiny_units(donor) if unit.tokens <= room and self.fits(unit, replica))
        return next(fitting, None)

    def largest_request(self, donor: Replica, replica: Replica) -> Request | None:
        """The largest request of one replica that may move and fits on another."""
        room, cluster = replica.room, self.cluster
        fitting = (q for q in donor.requests.values() if q.tokens <= room and cluster.may_move(q))
        fitting = (q for q in fitting if cluster.fits(q, replica))
        return max(fitting, key=lambda request: (request.tokens, -request.order), default=None)

    def could_fit(self, unit: Unit, replica: Replica) -> bool:
        """Whether the unit may go there once TINY units that are in the way have left."""
        seats = len(replica.requests) + len(unit.requests) <= replica.max_requests
        return seats and replica.state is _RUNNING and self.need(unit) <= self._firm_room(replica)

    # --- questions about all of them ------------------------------------------------------------------

    def best(self, category: Kind, unit: Unit) -> Replica | None:
        """The replica of the highest priority in a category where the unit fits.

        Where moves take time its home comes first: what stays needs no move and frees what is held for it.
        """
        home = unit.home
        if home and self.cluster.holds and self.category(home) is category and self.fits(unit, home):
            return home
        return self._best(self._ranked[category], unit)

    def best_hole(self, unit: Unit) -> Replica | None:
        """The replica of the highest priority that a request of the unit's class has left, and where it fits."""
        return self._best(self._holes[unit.kind], unit)

    def best_cleared(self, category: Kind, unit: Unit) -> Replica | None:
        """The replica of the highest priority in a category where the unit fits once TINY units have left.

        Of the LARGE ones only those without a SMALL or MEDIUM request: there is no room for another.
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
        """Whether it has a LARGE request but no SMALL or MEDIUM one."""
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
        """The most recently activated replica of a category that has TINY units, if it is a later one than `after`."""
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
        """A replica on which there is nothing and that takes the unit: its home, or else the oldest."""
        self._refresh()
        home = unit.home
        if home and not home.requests and self.fits(unit, home):
            return home
        return next((replica for _, replica in self._idle if self.fits(unit, replica)), None)

    def largest_middle(self, replica: Replica) -> Request | None:
        """The largest SMALL or MEDIUM request on a SMALL or MEDIUM replica that could move to this one."""
        for request in self._middles_below(self._firm_room(replica)):
            return request
        return None

    def preferred_middle(self, replica: Replica) -> Request | None:
        """Such a request from the replica that has the highest priority for this one; the largest there."""
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
        """The room of a replica without those of its TINY units that may move."""
        if not self.clears:
            return replica.room
        tiny = (q for q in replica.requests.values() if q.kind <= _TINY and self.cluster.may_move(q))
        return replica.room + sum(q.tokens + replica.headroom for q in tiny)

    def _middles_below(self, room: int) -> Iterator[Request]:
        """SMALL and MEDIUM requests for which that room is enough and that may move, the largest first."""
        self._refresh()
        end = bisect_right(self._middles, (room - self.cluster.headroom, _LAST))
        for index in range(end - 1, -1, -1):
            request = self._middles[index][2]
            if self.cluster.may_move(request):
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
"""Above every `-order` that an entry has."""
