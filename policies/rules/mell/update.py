"""Update (Fig. 10): the reaction to growth into another class, or within one."""

from policies.cluster.changes import Crossing
from policies.cluster.classes import Kind
from policies.cluster.replica import Replica
from policies.plan import Reason
from policies.rules.mell.allocate import allocated
from policies.rules.mell.depart import Earlier
from policies.rules.mell.units import Hole, Unit, largest_first, single
from policies.rules.mell.work import Work


def update(work: Work, crossing: Crossing, earlier: Earlier) -> None:
    """Handle a change of class: the request departs with its old class from the old category, to be allocated anew."""
    request, replica = crossing.request, crossing.request.replica
    if replica is None:
        return
    category = earlier.category(replica)
    unit = single(request)
    if work.reading.keeps_place(crossing, category) or not work.can_lift([unit]):
        return
    work.lift_later(unit, Reason.RECLASS)
    work.leave_hole(Hole(replica, max(crossing.was, Kind.TINY), category))


def relieve(work: Work, replica: Replica) -> None:
    """Handle an overload by growth: units depart from the replica, to be allocated anew.

    They depart from the replica's current category, which is LARGE if a request has grown to LARGE.
    """
    category = max(Kind.TINY, *(request.kind for request in replica.requests.values()))
    for units in work.reading.surplus(work.board, replica):
        if work.can_lift(units):
            for unit in units:
                work.lift_later(unit, Reason.OVERLOAD)
                work.leave_hole(Hole(replica, unit.kind, category))
            return


def relieve_at_once(work: Work, replica: Replica) -> None:
    """Cure an overload if all displaced units find room now; otherwise leave it to the engine to preempt requests."""
    if replica.overload <= 0:
        return
    units: list[Unit] = []
    for units in filter(work.can_lift, work.reading.surplus(work.board, replica)):
        mark = work.mark()
        for unit in units:
            work.lift(unit, Reason.OVERLOAD)
        if all([allocated(work, unit) for unit in sorted(units, key=largest_first, reverse=True)]):
            return
        work.undo(mark)
    for unit in units:
        work.reserve(unit)
