"""What the paper leaves open, as one port: the two policies share everything but an answer to these questions."""

from collections.abc import Iterator
from typing import Protocol

from policies.cluster.changes import Crossing
from policies.cluster.classes import Kind
from policies.cluster.replica import Replica
from policies.rules.mell.board import Board
from policies.rules.mell.units import Hole, Unit


class Reading(Protocol):
    """How Fig. 10 is read. Its methods decide; they change nothing, `activate` apart."""

    def keeps_place(self, crossing: Crossing, category: Kind) -> bool:
        """Whether a request that changed its class stays on its replica, which was of that category."""
        ...

    def leaves_alone(self, board: Board, replica: Replica, category: Kind) -> bool:
        """Whether a departure from a replica that was of that category causes no move."""
        ...

    def surplus(self, board: Board, replica: Replica) -> Iterator[list[Unit]]:
        """Sets of units, none of them empty, that could leave an overloaded replica; the preferred one first."""
        ...

    def others(self, board: Board, unit: Unit) -> Iterator[Replica]:
        """Replicas that Fig. 10 does not name for the unit, to be tried before another one is activated."""
        ...

    def activate(self, board: Board, unit: Unit) -> Replica | None:
        """A running replica with nothing on it, None if there is none. It may be new."""
        ...

    def filling(self, board: Board, hole: Hole) -> Unit | None:
        """What may move into a hole for which Fig. 10 names nothing that fits; asked again until it is None."""
        ...
