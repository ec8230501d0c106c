"""Allocate (Fig. 10): the replica for an arrival, or for a request that another operation has lifted."""

from collections.abc import Iterator
from itertools import chain

from policies.cluster.classes import Kind
from policies.cluster.replica import Replica
from policies.plan import Reason
from policies.rules.mell.board import CATEGORIES, Board
from policies.rules.mell.units import Hole, Unit
from policies.rules.mell.work import Work


def allocate(work: Work, unit: Unit) -> bool:
    """Put a unit on a replica. Returns True if that was possible.

    For a unit without room a replica is started. Until then an arrival waits, and a lifted unit goes home.
    """
    placed = allocated(work, unit)
    if not placed:
        work.reserve(unit)
        placed = unit.home is not None and work.go_home(unit)
    if placed:
        work.fill_hole(unit)
    return placed


def allocated(work: Work, unit: Unit) -> bool:
    """Put a unit on a running replica. Returns True if there was one for it."""
    board = work.board
    for replica in chain(named(board, unit), work.reading.others(board, unit)):
        if settle_in(work, unit, replica):
            return True
    possible = board.need(unit) <= work.cluster.capacity
    target = (possible and work.reading.activate(board, unit)) or anywhere(board, unit)
    if target is None:
        return False
    work.put(unit, target)
    if unit.kind is Kind.LARGE:
        work.leave_hole(Hole(target, Kind.LARGE, Kind.LARGE))
    return True


def settle_in(work: Work, unit: Unit, replica: Replica) -> bool:
    """Put a unit on a replica, if necessary after allocating the TINY units in its way elsewhere.

    Returns False, and changes nothing, if that is impossible.
    """
    in_the_way = work.in_the_way(unit, replica)
    if in_the_way is None:
        return False
    mark = work.mark()
    for tiny in in_the_way:
        work.lift(tiny, Reason.MAKE_ROOM)
    work.put(unit, replica)
    if all([allocated(work, tiny) for tiny in in_the_way]):
        return True
    work.undo(mark)
    return False


def named(board: Board, unit: Unit) -> Iterator[Replica]:
    """The replicas that Fig. 10 names for a unit, the preferred one first.

    A hole from an earlier operation of this epoch is as good as the most recently activated replica, and filling it
    saves the move that would refill it.
    """
    if unit.kind is Kind.LARGE:
        return
    if unit.kind is Kind.TINY:
        yield from filter(None, (board.best(category, unit) for category in (Kind.LARGE, Kind.MEDIUM)))
    else:
        yield from filter(None, [board.best_cleared(Kind.LARGE, unit)])
    yield from filter(None, [board.best_hole(unit)])
    latest = board.latest(unit.kind)
    if latest and board.fits(unit, latest):
        yield latest


def anywhere(board: Board, unit: Unit) -> Replica | None:
    """The replica of the highest priority, of any category, with room for the unit."""
    found = [replica for replica in (board.best(category, unit) for category in CATEGORIES) if replica]
    return max(found, key=lambda replica: (board.weights.workload(replica), -replica.order), default=None)
