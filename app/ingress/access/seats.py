"""Seats for the requests that an ingress answers at a time: lower ranks are refused before higher ones.

With several ranks, a rank may use all seats but a tenth for each higher rank, and at least half of them. So while lower
ranks are refused, higher ones still find seats. A hundredth of the seats, at least one, belongs to each rank alone: no
rank is refused while it has fewer requests, however many of other ranks there are.

Pure calculations: a request takes a seat, is assigned to its rank once its body is read, and leaves.
"""

from collections import Counter
from collections.abc import Iterable


class Seats:
    """`most` seats (None: any number) for requests of these `ranks`."""

    def __init__(self, most: int | None, ranks: Iterable[int]) -> None:
        self._most = most
        self._ranks = sorted(set(ranks))
        self._unassigned = 0
        self._taken: Counter[int] = Counter()

    @property
    def taken(self) -> int:
        """The number of requests that have a seat."""
        return self._unassigned + self._taken.total()

    def take(self) -> bool:
        """Take a seat for a request of unknown rank. Returns False if none is free."""
        if self._most is not None and self.taken >= self._most:
            return False
        self._unassigned += 1
        return True

    def assign(self, rank: int) -> bool:
        """Assign a request, which has a seat, to its rank. Returns False, and changes nothing, if that is refused."""
        if not self._has_room(rank):
            return False
        self._unassigned -= 1
        self._taken[rank] += 1
        return True

    def leave(self, rank: int | None) -> None:
        """Free the seat of a request of that rank; None: it was assigned to no rank."""
        if rank is None:
            self._unassigned -= 1
        else:
            self._taken[rank] -= 1

    def _has_room(self, rank: int) -> bool:
        """True if the rank may have one more request.

        Own seats that are not taken, and all taken ones, never add up to more than `most`: the second condition keeps
        it so, and the first one changes no sum. So an own seat is always free.
        """
        if self._most is None:
            return True
        own = max(1, self._most // 100)
        if self._taken[rank] < own:
            return True
        kept = sum(max(0, own - self._taken[other]) for other in self._ranks if other != rank)
        return self._taken.total() + kept < self._limit(rank, self._most)

    def _limit(self, rank: int, most: int) -> int:
        higher = sum(other > rank for other in self._ranks)
        return max(most - higher * max(1, most // 10), -(-most // 2))
