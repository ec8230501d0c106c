"""Fig. 10 with its waste taken out: nothing moves unless it must, and nothing is activated unless it must be."""

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
        """A request that changes its class stays: if its replica cannot hold it any more, that is an overload."""
        return True

    def surplus(self, board: Board, replica: Replica) -> Iterator[list[Unit]]:
        """The smallest request that cures the overload, or the few largest that do together."""
        movable = ((q.tokens, q) for q in replica.requests.values() if board.cluster.may_move(q))
        few = fewest(movable, replica.overload)
        if few is not None:
            yield [single(request) for request in few]

    def leaves_alone(self, board: Board, replica: Replica, category: Kind) -> bool:
        """Never: what a departure leaves in the latest replica is as good to fill as any."""
        return False

    def others(self, board: Board, unit: Unit) -> Iterator[Replica]:
        """Every replica where the unit fits, then those where it does once TINY units have left."""
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
        """One that is empty, or a new one."""
        idle = board.idle(unit)
        if idle or board.cluster.starts_as is not ReplicaState.RUNNING:
            return idle
        return board.cluster.open()

    def filling(self, board: Board, hole: Hole) -> Unit | None:
        """A TINY unit of the latest TINY replica, which is the one to be emptied next, or else one of its requests."""
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
"""In which categories room is sought that Fig. 10 does not name: beside requests of the same class first."""
