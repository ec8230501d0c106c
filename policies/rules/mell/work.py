"""The state of one call of `rebalance`: the board, and the work that the operations of Fig. 10 have deferred.

Operation batching (section VI-C): departures and updates only note `Hole`s to refill and lifted units to allocate;
allocations come before refills.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.cluster.classes import Kind
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica
from policies.model import ReplicaId, ReplicaState
from policies.plan import Reason
from policies.rules.mell.board import Board
from policies.rules.mell.reading import Reading
from policies.rules.mell.units import Hole, Unit, fewest


@dataclass(slots=True, eq=False)
class Work:
    """The state of one call. All changes to the cluster go through its methods, so that the board stays up to date.

    `_was` has a replica's load in tokens and its number of requests before the first unit was lifted from it.
    """

    board: Board
    reading: Reading
    holes: list[Hole] = field(default_factory=list)
    lifted: list[Unit] = field(default_factory=list)
    _was: dict[ReplicaId, tuple[int, int]] = field(default_factory=dict)
    _filled: Counter[tuple[ReplicaId, Kind]] = field(default_factory=Counter)
    _starting: list[Replica] | None = None
    _reserved: dict[ReplicaId, int] = field(default_factory=dict)

    @property
    def cluster(self) -> Cluster:
        """The cluster under decision."""
        return self.board.cluster

    def can_lift(self, units: Sequence[Unit]) -> bool:
        """True if all these units may leave their replicas within the epoch's remaining moves."""
        requests = [request for unit in units for request in unit.requests]
        decisions = self.cluster.decisions
        return len(requests) <= decisions.moves_left and all(map(decisions.may_move, requests))

    def lift(self, unit: Unit, reason: Reason) -> None:
        """Take a unit off its replica. It must be put on a replica before the call ends."""
        home = unit.home
        assert home is not None, "an arrival has no replica to be lifted from"
        self._was.setdefault(home.id, (home.load, len(home.requests)))
        number = self.cluster.decisions.unit()
        for request in unit.requests:
            self.cluster.decisions.lift(request, reason, number)
        self.board.touch(home)

    def lift_later(self, unit: Unit, reason: Reason) -> None:
        """Take a unit off its replica, to be allocated after all departures and updates."""
        self.lift(unit, reason)
        self.lifted.append(unit)

    def put(self, unit: Unit, replica: Replica) -> None:
        """Put a unit on a replica."""
        for request in unit.requests:
            self.cluster.decisions.place(request, replica)
        self.board.touch(replica)

    def in_the_way(self, unit: Unit, replica: Replica) -> list[Unit] | None:
        """The TINY units that must leave the replica to make room for the unit; None if they cannot."""
        if self.board.fits(unit, replica):
            return []
        if not self.board.could_fit(unit, replica):
            return None
        gap = self.board.need(unit) - replica.room
        tiny = self.board.tiny_units(replica)
        chosen = fewest(((t.tokens + replica.headroom * len(t.requests), t) for t in tiny), gap)
        return chosen if chosen is not None and self.can_lift(chosen) else None

    def leave_hole(self, hole: Hole) -> None:
        """Note a hole, to be refilled after all allocations."""
        self.holes.append(hole)
        if hole.kind is hole.category and hole.kind is not Kind.LARGE:
            self.board.mark_hole(hole.replica, hole.kind)

    def fill_hole(self, unit: Unit) -> None:
        """Count an allocated unit as the filling of a hole of its class on its replica.

        A LARGE unit fills no hole; it leaves one, beside itself.
        """
        replica = unit.requests[0].replica
        if replica is not None and unit.kind is not Kind.LARGE:
            self._filled[replica.id, unit.kind] += 1

    def is_filled(self, hole: Hole) -> bool:
        """True if an allocated unit fills this hole. Each unit fills one hole: the call uses it up."""
        place = hole.replica.id, hole.kind
        filled = self._filled[place] > 0
        self._filled[place] -= filled
        return filled

    def mark(self) -> tuple[int, int]:
        """A point to which `undo` can return."""
        return self.cluster.decisions.mark(), len(self.board.log)

    def undo(self, mark: tuple[int, int]) -> None:
        """Undo all lifts and placements since the mark. Newly activated replicas stay open."""
        self.cluster.decisions.undo(mark[0])
        for replica in self.board.log[mark[1] :]:
            self.board.touch(replica)

    def start_over(self, mark: tuple[int, int]) -> None:
        """Undo everything since the mark, deferred work included."""
        self.undo(mark)
        self.holes.clear()
        self.lifted.clear()
        self._reserved.clear()
        self._filled.clear()

    # --- units without room on any running replica ----------------------------------------------------

    def go_home(self, unit: Unit) -> bool:
        """Put a unit back on its home, unless that overloads the replica more than before."""
        home = unit.home
        if home is None:
            return False
        load, count = self._was[home.id]
        if home.load + unit.tokens > max(home.capacity - home.shared, load):
            return False
        if len(home.requests) + len(unit.requests) > max(home.max_requests, count):
            return False
        self.put(unit, home)
        return True

    def reserve(self, unit: Unit) -> None:
        """Reserve room for a unit on a replica that is starting; without such room, have another replica started.

        The reservation lasts for this epoch. A unit that has no room in the next epoch reserves again.
        """
        replica = self._starting_for(unit)
        if replica is not None:
            self._reserved[replica.id] = self._reserved.get(replica.id, 0) + self.board.need(unit)

    def _starting_for(self, unit: Unit) -> Replica | None:
        if self.board.need(unit) > self.cluster.capacity:
            return None
        if self._starting is None:
            replicas = self.cluster.replicas.values()
            self._starting = [replica for replica in replicas if replica.state is ReplicaState.STARTING]
        for replica in self._starting:
            if replica.room - self._reserved.get(replica.id, 0) >= self.board.need(unit):
                return replica
        new = self.cluster.decisions.open() if self.cluster.starts_as is ReplicaState.STARTING else None
        if new is not None:
            self._starting.append(new)
        return new
