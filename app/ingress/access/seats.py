"""Seats for the requests that an ingress answers at a time: lower ranks are refused before higher ones.

With several ranks, a rank may use all seats but a tenth for each higher rank, and at least half of them. So while lower
ranks are refused, higher ones still find seats. A hundredth of the seats, at least one, belongs to each rank alone: no
rank is refused while it has fewer requests, however many of other ranks there are.

With several models, a tenth of the seats belongs to each of them alone (of more than five: an equal part of half of
them): however many models are flooded, or have no replicas, each other one finds its seats.

Pure calculations: a request takes a seat, is assigned to its rank and model once its body is read, and leaves.
"""

from collections import Counter
from collections.abc import Iterable


class Seats:
    """`most` seats (None: any number) for requests of these `ranks`, and of a number of `models`."""

    def __init__(self, most: int | None, ranks: Iterable[int], models: int = 1) -> None:
        self._most = most
        self._models = models
        self._ranks = sorted(set(ranks))
        self._unassigned = 0
        self._taken: Counter[int] = Counter()
        self._of_models: Counter[str] = Counter()

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

    def assign(self, rank: int, model: str = "") -> bool:
        """Assign a request, which has a seat, to its rank and model.

        Returns False, and changes nothing, if that is refused.
        """
        if not self._has_room(rank) or not self._has_model_room(model):
            return False
        self._unassigned -= 1
        self._taken[rank] += 1
        self._of_models[model] += 1
        return True

    def leave(self, rank: int | None, model: str = "") -> None:
        """Free the seat of a request of that rank and model; None: it was assigned to no rank."""
        if rank is None:
            self._unassigned -= 1
        else:
            self._taken[rank] -= 1
            self._of_models[model] -= 1

    def _has_model_room(self, model: str) -> bool:
        """True if the model may have one more request: own seats of the others stay free, as in `_has_room`."""
        if self._most is None or self._models == 1:
            return True
        own = max(1, self._most // max(10, 2 * self._models))
        if self._of_models[model] < own:
            return True
        used = sum(min(own, taken) for other, taken in self._of_models.items() if other != model)
        return self._of_models.total() + (self._models - 1) * own - used < self._most

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
