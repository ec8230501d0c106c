"""Units of placement and migration: a single request, or a multi-item of grains (section VI-C).

A multi-item is bookkeeping inside one replica: every query groups the grains anew, oldest first. So no group has to be
kept up to date with arrivals, growth and departures. A unit that leaves a replica leaves a hole, which another unit may
fill.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import NamedTuple, TypeVar

from policies.cluster.classes import Classes, Kind
from policies.cluster.replica import Replica, Request
from policies.model import Tokens

Item = TypeVar("Item")


class Unit(NamedTuple):
    """Requests that are placed and moved together. `home` is the replica that they are on, None for an arrival.

    `kind` is one of the paper's four classes: a multi-item is TINY, however small.
    """

    kind: Kind
    requests: tuple[Request, ...]
    tokens: int
    home: Replica | None


def single(request: Request) -> Unit:
    """A request by itself; a grain counts as TINY."""
    return Unit(request.kind or _TINY, (request,), request.tokens, request.replica)


def tiny_units(
    replica: Replica, classes: Classes, accept: Callable[[Request], bool] = lambda request: True
) -> list[Unit]:
    """The TINY requests and the multi-items of a replica, of the requests for which `accept` is true.

    A group is complete as soon as it is above C/8. A grain is at most C/8, so no group is above C/4; only the last
    group may stay at C/8 or less.
    """
    units = []
    grains = []
    for request in replica.requests.values():
        if request.kind <= _TINY and accept(request):
            if request.kind is _TINY:
                units.append(single(request))
            else:
                grains.append(request)
    grains.sort(key=attrgetter("order"))
    return units + _grouped(grains, replica, classes.ceiling(Kind.GRAIN))


def units(replica: Replica, classes: Classes, accept: Callable[[Request], bool] = lambda request: True) -> list[Unit]:
    """The units of all requests on a replica for which `accept` is true."""
    larger = [single(q) for q in replica.requests.values() if q.kind > Kind.TINY and accept(q)]
    return larger + tiny_units(replica, classes, accept)


def largest_first(unit: Unit) -> tuple[int, int]:
    """A sort key: the largest unit has the greatest key, of equals the oldest."""
    return unit.tokens, -unit.requests[0].order


def fewest(sizes: Iterable[tuple[int, Item]], gap: int) -> list[Item] | None:
    """A few items whose sizes add up to `gap` or more: the smallest sufficient one, else the largest and then more.

    None if all items together are not enough.
    """
    left = sorted(sizes, key=itemgetter(0))
    chosen = []
    while gap > 0:
        if not left:
            return None
        enough = (index for index, (size, _) in enumerate(left) if size >= gap)
        size, item = left.pop(next(enough, -1))
        chosen.append(item)
        gap -= size
    return chosen


def _grouped(grains: list[Request], replica: Replica, floor: float) -> list[Unit]:
    groups = []
    group: list[Request] = []
    tokens = 0
    for request in grains:
        group.append(request)
        tokens += request.tokens
        if tokens > floor:
            groups.append(Unit(_TINY, tuple(group), Tokens(tokens), replica))
            group, tokens = [], 0
    if group:
        groups.append(Unit(_TINY, tuple(group), Tokens(tokens), replica))
    return groups


_TINY = Kind.TINY


@dataclass(frozen=True, slots=True)
class Hole:
    """The room of a request of class `kind` that has left a replica of that category; both are TINY or larger.

    A replica that a LARGE request has just activated has a hole of the class LARGE: the room beside that request.
    """

    replica: Replica
    kind: Kind
    category: Kind
