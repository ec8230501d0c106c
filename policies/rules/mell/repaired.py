"""Fig. 10 without waste: no unnecessary moves, and no unnecessary activations."""

from collections.abc import Iterator
from dataclasses import dataclass

from policies.cluster.changes import Crossing
from policies.cluster.classes import Kind
from policies.cluster.replica import Replica
from policies.model import ReplicaState
from policies.rules.mell.board import Board
from policies.rules.mell.units import Hole, Unit, fewest, single


@dataclass(frozen=True, slots=True)
class Repaired:
    """The reading of the policy `mell_repaired`."""

    def keeps_place(self, crossing: Crossing, category: Kind) -> bool:
        """Always: a request that has outgrown its replica is handled as an overload."""
        return True

    def surplus(self, board: Board, replica: Replica) -> Iterator[list[Unit]]:
        """The smallest request that cures the overload, or a few of the largest that cure it together."""
        movable = ((q.tokens, q) for q in replica.requests.values() if board.cluster.decisions.may_move(q))
        few = fewest(movable, replica.overload)
        if few is not None:
            yield [single(request) for request in few]

    def leaves_alone(self, board: Board, replica: Replica, category: Kind) -> bool:
        """Never: a hole on the latest replica is as good to fill as any."""
        return False

    def others(self, board: Board, unit: Unit) -> Iterator[Replica]:
        """Replicas with room for the unit, then those with room once TINY units have left."""
        categories = _OTHERS[unit.kind]
        for category in categories:
            replica = board.best(category, unit)
            if replica:
                yield replica
        if unit.kind in (Kind.SMALL, Kind.MEDIUM):
            for category in categories:
                replica = board.best_cleared(category, unit)
                if replica:
                    yield replica

    def activate(self, board: Board, unit: Unit) -> Replica | None:
        """An empty replica, or a new one."""
        idle = board.idle(unit)
        if idle or board.cluster.starts_as is not ReplicaState.RUNNING:
            return idle
        return board.cluster.decisions.open()

    def filling(self, board: Board, hole: Hole) -> Unit | None:
        """A TINY unit, or else a request, of the latest TINY replica, which is the next one to empty."""
        replica = hole.replica
        donor = board.latest(Kind.TINY, other_than=replica)
        if donor is None or (hole.category is Kind.TINY and donor.order < replica.order):
            return None
        unit = board.largest_tiny(donor, replica)
        request = None if unit else board.largest_request(donor, replica)
        return single(request) if request else unit


_OTHERS = {
    Kind.TINY: (Kind.SMALL, Kind.TINY),
    Kind.SMALL: (Kind.SMALL, Kind.MEDIUM, Kind.TINY),
    Kind.MEDIUM: (Kind.MEDIUM, Kind.SMALL, Kind.TINY),
    Kind.LARGE: (Kind.MEDIUM, Kind.SMALL, Kind.TINY),
}
"""The categories, beyond those that Fig. 10 names, in which a class looks for room; its own category comes first."""
