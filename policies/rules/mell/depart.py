"""Depart (Fig. 10): refilling replicas that a request has left, by its end or by growing into another class.

A departure only notes the hole. Refills come after all allocations and use the room that is then left: a hole that an
allocation has filled needs no move (section VI-C, removing unnecessary movement).
"""

from operator import attrgetter

from policies.cluster.capacity import is_starting
from policies.cluster.changes import Changes, Departure
from policies.cluster.classes import Kind
from policies.cluster.replica import Replica
from policies.model import ReplicaId, RequestId
from policies.plan import Reason
from policies.rules.mell.allocate import settle_in
from policies.rules.mell.units import Hole, Unit, largest_first, single, units
from policies.rules.mell.work import Work


class Earlier:
    """The categories of replicas before the epoch's departures and growth.

    In the paper a request departs with its old class from a replica of its old category. (An independent simulation
    with the new class and category used 3 to 8 % more replicas.)
    """

    def __init__(self, changes: Changes) -> None:
        self._categories: dict[ReplicaId, Kind] = {}
        self._gone: dict[ReplicaId, list[Kind]] = {}
        self._was: dict[ReplicaId, dict[RequestId, Kind]] = {}
        for departure in changes.departed:
            self._gone.setdefault(departure.replica.id, []).append(departure.kind)
        for crossing in changes.crossed:
            if crossing.request.replica is not None:
                self._was.setdefault(crossing.request.replica.id, {})[crossing.request.id] = crossing.was

    def category(self, replica: Replica) -> Kind:
        """The earlier category of a replica. The first call, before the replica's requests change, fixes it."""
        category = self._categories.get(replica.id)
        if category is None:
            kinds = [request.kind for request in replica.requests.values()]
            was = self._was.get(replica.id)
            if was:
                kinds = [was.get(request.id, request.kind) for request in replica.requests.values()]
            category = self._categories[replica.id] = max(Kind.TINY, *kinds, *self._gone.get(replica.id, ()))
        return category


MOST_FILLINGS = 2
"""The most units that fill a hole for which Fig. 10 names no fitting one. In simulations a third one gained nothing."""


def depart(work: Work, departure: Departure, earlier: Earlier) -> None:
    """Note the hole that a request leaves. Rule 4: the units beside a LARGE request are allocated anew."""
    replica = departure.replica
    category = earlier.category(replica)
    if departure.kind is Kind.LARGE:
        if work.reading.leaves_alone(work.board, replica, category):
            return
        others = units(replica, work.cluster.classes, work.cluster.decisions.may_move)
        if not is_starting(work.cluster) and work.can_lift(others):
            for unit in others:
                work.lift_later(unit, Reason.DRAIN)
    else:
        work.leave_hole(Hole(replica, max(departure.kind, Kind.TINY), category))


def refill(work: Work, hole: Hole) -> None:
    """Move a unit into a hole, by the rule for its class and for the category of its replica.

    The hole of a replica that is empty by now stays, since the caller closes that replica.
    """
    category = work.board.category(hole.replica)
    if category is None:
        return
    if hole.kind is not Kind.LARGE and work.reading.leaves_alone(work.board, hole.replica, hole.category):
        return
    if hole.kind is Kind.TINY:
        refilled = _refill_tiny(work, hole)
    elif hole.category is Kind.LARGE:
        refilled = _refill_large(work, hole)
    else:
        refilled = category is not Kind.LARGE and _refill_middle(work, hole)
    if not refilled:
        _fill(work, hole)


def _fill(work: Work, hole: Hole) -> None:
    for _ in range(MOST_FILLINGS):
        unit = work.reading.filling(work.board, hole)
        if unit is None or not _moved(work, unit, hole.replica):
            return


def _refill_tiny(work: Work, hole: Hole) -> bool:
    """Rule 2: refill a TINY replica from the latest TINY or MEDIUM one, any other from the latest TINY one.

    Rule 1, no refill for the latest of its category, follows: a TINY replica takes units only from later ones.
    """
    board, replica = work.board, hole.replica
    if hole.category is not Kind.TINY:
        donor = board.latest(Kind.TINY, other_than=replica)
    else:
        latest = [board.latest_with_tiny(kind, after=replica) for kind in (Kind.TINY, Kind.MEDIUM)]
        donor = max(filter(None, latest), key=attrgetter("order"), default=None)
    unit = board.largest_tiny(donor, replica) if donor else None
    if donor is None or unit is None or not _moved(work, unit, replica):
        return False
    if board.category(donor) is Kind.MEDIUM:
        work.leave_hole(Hole(donor, Kind.TINY, Kind.MEDIUM))
    return True


def _refill_middle(work: Work, hole: Hole) -> bool:
    """Rule 3 for a SMALL or MEDIUM replica: take the largest fitting request of the latest replica of the same class.

    By rule 1 the latest replica itself gets no refill. TINY units in the way are allocated anew.
    """
    board, replica = work.board, hole.replica
    donor = board.latest(hole.kind, other_than=replica)
    if donor is None or (hole.category is hole.kind and donor.order < replica.order):
        return False
    middles = [single(q) for q in donor.requests.values() if q.kind is hole.kind]
    fitting = [unit for unit in middles if board.could_fit(unit, replica)]
    return bool(fitting) and _moved(work, max(fitting, key=largest_first), replica)


def _refill_large(work: Work, hole: Hole) -> bool:
    """Rule 3 for a LARGE replica, and rule 3 of Allocate for a new one, whose hole is of the class LARGE.

    The moved request leaves a hole on its own replica in turn.
    """
    board, replica = work.board, hole.replica
    if not board.single(replica):
        return False
    request = board.largest_middle(replica) if hole.kind is Kind.LARGE else board.preferred_middle(replica)
    donor = request.replica if request else None
    category = board.category(donor) if donor else None
    if request is None or donor is None or category is None or not _moved(work, single(request), replica):
        return False
    work.leave_hole(Hole(donor, request.kind, category))
    return True


def _moved(work: Work, unit: Unit, replica: Replica) -> bool:
    """Move a unit to the replica. Returns False, and changes nothing, if that is impossible."""
    if not work.can_lift([unit]):
        return False
    mark = work.mark()
    work.lift(unit, Reason.FILL)
    if settle_in(work, unit, replica):
        return True
    work.undo(mark)
    return False
