"""The open points of the paper as a protocol; the two policies differ only in its implementation."""

from collections.abc import Iterator
from typing import Protocol

from policies.cluster.changes import Crossing
from policies.cluster.classes import Kind
from policies.cluster.replica import Replica
from policies.rules.mell.board import Board
from policies.rules.mell.units import Hole, Unit


class Reading(Protocol):
    """A reading of Fig. 10. Its methods only decide; of them, `activate` alone may change the cluster."""

    def keeps_place(self, crossing: Crossing, category: Kind) -> bool:
        """True if a request that has changed its class stays on its replica, which was of that category."""
        ...

    def leaves_alone(self, board: Board, replica: Replica, category: Kind) -> bool:
        """True if a departure from a replica, which was of that category, causes no move."""
        ...

    def surplus(self, board: Board, replica: Replica) -> Iterator[list[Unit]]:
        """Non-empty sets of units that could leave an overloaded replica, the preferred set first."""
        ...

    def others(self, board: Board, unit: Unit) -> Iterator[Replica]:
        """Replicas that Fig. 10 does not name for the unit, to try before activating another one."""
        ...

    def activate(self, board: Board, unit: Unit) -> Replica | None:
        """An empty running replica, perhaps a new one; None if there is none."""
        ...

    def filling(self, board: Board, hole: Hole) -> Unit | None:
        """A unit for a hole for which Fig. 10 names no fitting one. Called repeatedly until it returns None."""
        ...
