"""Fig. 10 as printed, with the least additions where it is incomplete."""

from collections.abc import Iterator
from dataclasses import dataclass

from policies.cluster.changes import Crossing
from policies.cluster.classes import Kind
from policies.cluster.replica import Replica
from policies.model import ReplicaState
from policies.rules.mell.board import Board
from policies.rules.mell.units import Hole, Unit, fewest, units


@dataclass(frozen=True, slots=True)
class Literal:
    """The reading of the policy `mell`."""

    def keeps_place(self, crossing: Crossing, category: Kind) -> bool:
        """Update, rules 1 and 2: a request stays that grows to LARGE on a MEDIUM replica, or out of a multi-item.

        A request that shrinks, because a report corrects its size, stays as well.
        """
        kind = crossing.request.kind
        if kind is Kind.LARGE:
            return crossing.was is Kind.MEDIUM and category is not Kind.LARGE
        return kind <= max(crossing.was, Kind.TINY)

    def leaves_alone(self, board: Board, replica: Replica, category: Kind) -> bool:
        """Depart, rule 1, for each category: the latest replica gets no refill."""
        latest = board.latest(category)
        return latest is None or latest.order <= replica.order

    def surplus(self, board: Board, replica: Replica) -> Iterator[list[Unit]]:
        """Update, rules 2 and 3: all but the LARGE request. On other replicas (not in the paper) TINY units first."""
        classes, movable = board.cluster.classes, board.cluster.decisions.may_move
        largest = max(replica.requests.values(), key=lambda request: (request.tokens, -request.order))
        everything = units(replica, classes, movable)
        others = [unit for unit in everything if unit.requests[0] is not largest]
        if others and largest.kind is Kind.LARGE:
            yield others
        for candidates in (board.tiny_units(replica), everything):
            few = fewest(((unit.tokens, unit) for unit in candidates), replica.overload)
            if few is not None:
                yield few

    def others(self, board: Board, unit: Unit) -> Iterator[Replica]:
        """None for SMALL, MEDIUM and LARGE; SMALL and TINY replicas for TINY (rule 1 names none of them)."""
        if unit.kind is Kind.TINY:
            for category in (Kind.SMALL, Kind.TINY):
                replica = board.best(category, unit)
                if replica:
                    yield replica

    def activate(self, board: Board, unit: Unit) -> Replica | None:
        """A new replica: one emptied in this epoch is old, and would be in the way of "most recently activated".

        If new replicas take time to start, an empty one comes first.
        """
        if board.cluster.starts_as is ReplicaState.RUNNING:
            return board.cluster.decisions.open() or board.idle(unit)
        return board.idle(unit)

    def filling(self, board: Board, hole: Hole) -> Unit | None:
        """None: the paper fills no other holes."""
        return None
