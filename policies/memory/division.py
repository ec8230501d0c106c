"""The division of a device's KV memory between the replicas awake on it.

    1  every seat gets its floor
    2  weighted max-min up to what each wants: a seat that wants at least its share gets it, whatever others use
    3  the rest by weight, for prefix caches

Sizes change only for a reason: small changes wait, and a shrink that moves requests is rare.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies.model import Bytes, ReplicaId

LEAST_CHANGE = 0.05
"""Changes of all seats by this share or less wait, unless a seat lacks memory that it would get."""
BETWEEN_SHRINKS_S = 5.0
"""Minimum seconds between two shrinks of a seat that move requests."""
_NEARLY = 1e-6


@dataclass(frozen=True, slots=True)
class SeatNeed:
    """The KV memory that a replica needs, in bytes: `floor` <= `declared`, `used` by its running requests, and `want`
    for these, their growth, its queue and a reserve. `size` is its present KV memory.

    `shrunk_at` is the time of its latest shrink below `used`, in seconds; None without one.
    """

    replica: ReplicaId
    weight: float
    floor: Bytes
    used: Bytes
    want: Bytes
    declared: Bytes
    size: Bytes
    shrunk_at: float | None = None


def divide(budget: Bytes, seats: Sequence[SeatNeed], now: float) -> dict[ReplicaId, Bytes]:
    """The KV memory of each replica, in bytes; their sum is at most `budget`.

    Raises `ValueError` if the floors exceed the budget: fewer replicas have to be awake.
    """
    lacking = sum(seat.floor for seat in seats) - budget
    if lacking > 0:
        raise ValueError(f"the floors exceed the budget by {lacking} bytes")
    least = {seat.replica: _least(seat, now) for seat in seats}
    if sum(least.values()) > budget:
        least = {seat.replica: seat.floor for seat in seats}
    wanted = {seat.replica: max(least[seat.replica], min(seat.want, seat.declared)) for seat in seats}
    weights = {seat.replica: seat.weight for seat in seats}
    floors = {seat.replica: seat.floor for seat in seats}
    sizes = _fill(budget, weights, floors, least, wanted)
    sizes = _fill(budget, weights, sizes, sizes, {seat.replica: seat.declared for seat in seats})
    found = {replica: Bytes(int(size + _NEARLY)) for replica, size in sizes.items()}
    return {seat.replica: seat.size for seat in seats} if _is_quiet(budget, seats, found) else found


def moves_requests(seat: SeatNeed, size: Bytes) -> bool:
    """True if a new size is a shrink below the memory that running requests use."""
    return size < min(seat.used, seat.size)


def _least(seat: SeatNeed, now: float) -> Bytes:
    """The floor; soon after a shrink that moved requests, no less than what its requests use."""
    rests = seat.shrunk_at is not None and now - seat.shrunk_at < BETWEEN_SHRINKS_S
    return max(seat.floor, min(seat.used, seat.size, seat.declared)) if rests else seat.floor


def _fill(
    budget: float,
    weights: Mapping[ReplicaId, float],
    floors: Mapping[ReplicaId, float],
    least: Mapping[ReplicaId, float],
    limits: Mapping[ReplicaId, float],
) -> dict[ReplicaId, float]:
    """Weighted max-min of the budget: all rise above their floors in proportion to their weights, each up to its limit.

    A seat with more than its floor at `least` keeps that until the others have risen as far.
    """
    sizes, room, level = dict(least), budget - sum(least.values()), 0.0
    joins = {replica: (least[replica] - floors[replica]) / weights[replica] for replica in sizes}
    rising = [replica for replica in sizes if limits[replica] > sizes[replica]]
    while rising and room > _NEARLY:
        growing = [replica for replica in rising if joins[replica] - level <= _NEARLY]
        steps = [joins[replica] - level for replica in rising if joins[replica] - level > _NEARLY]
        if growing:
            total = sum(weights[replica] for replica in growing)
            steps += [room / total, min((limits[r] - sizes[r]) / weights[r] for r in growing)]
        step = min(steps)
        for replica in growing:
            sizes[replica] += step * weights[replica]
        room -= step * sum(weights[replica] for replica in growing)
        level += step
        rising = [replica for replica in rising if limits[replica] - sizes[replica] > _NEARLY]
    return sizes


def _is_quiet(budget: Bytes, seats: Sequence[SeatNeed], found: Mapping[ReplicaId, Bytes]) -> bool:
    """True if the present sizes are near enough, and nobody lacks memory that the division would give."""
    if sum(seat.size for seat in seats) > budget:
        return False
    return all(
        abs(found[seat.replica] - seat.size) <= LEAST_CHANGE * seat.size
        and seat.floor <= seat.size <= seat.declared
        and not (min(seat.want, seat.declared) > seat.size and found[seat.replica] > seat.size)
        for seat in seats
    )
