"""Copies of a replica's cache to those that stay, before it stops: the contexts that are worth it, and their targets.

A replica remembers the contexts of its ended requests, and the times since they ended (`CachedContext`). The hottest
comes first: the one that was used last. So all replicas together keep what one cache of their size would keep by the
rule of each, the least recently used block goes first:

    - a context goes to the replica that has it soonest: the blocks that it lacks, behind those that are on their way
      to it, are fewest
    - it goes nowhere if a replica that stays has all of it, or will have it
    - its blocks take the place of blank ones, and of those that the target itself has not used since; never that of
      hotter ones. If no target has that much room, the context is left behind

Time ends the copies, not this plan: they are made in its order, and the coldest come last.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from policies.model import Blocks, ReplicaId
from policies.prefix.tree import NO_PREFIX, HeldPrefix

EVACUATION_S = 10.0
"""The longest time for which a replica stays because of its cache, in seconds."""
SURVIVORS = 8
"""The most replicas that a cache is distributed to: those with the most free blocks."""


class CachedContext(NamedTuple):
    """A context whose first blocks, with these `names`, a replica has, and that nobody has used for `idle_s`.

    The first `hbm` of them are in its HBM, and the others only in its DRAM. `number` is the replica's own name of it.
    """

    number: int
    names: Sequence[int]
    idle_s: float
    hbm: int


class ContextCopy(NamedTuple):
    """A copy of the context `number` of the replica that stops."""

    number: int
    target: ReplicaId


class Survivor:
    """A replica that stays, with `free` blocks, those of its own idle `contexts` included."""

    def __init__(self, replica: ReplicaId, free: Blocks, contexts: Iterable[CachedContext]) -> None:
        self.replica = replica
        self.assigned = 0
        """The number of blocks that are to come."""
        self._free = free
        self._names: set[int] = set()
        """The names of the blocks that are to come, and of those before them."""
        self._idle_s: list[float] = []
        self._hotter: list[int] = [0]
        """The number of different blocks in HBM of the first contexts, the hottest first, as in `_idle_s`."""
        seen: set[int] = set()
        for context in sorted(contexts, key=_idle_s):
            seen.update(context.names[: context.hbm])
            self._idle_s.append(context.idle_s)
            self._hotter.append(len(seen))

    def room(self, idle_s: float) -> int:
        """The number of blocks that may still come, of contexts that have been idle for `idle_s` seconds."""
        return self._free - self.assigned - self._hotter[bisect_left(self._idle_s, idle_s)]

    def expected(self, names: Sequence[int]) -> int:
        """The number of a context's first blocks that are here by the copies so far."""
        return next((count for count, name in enumerate(names) if name not in self._names), len(names))

    def assign(self, names: Sequence[int], missing: int) -> None:
        """Expect a context, of which `missing` blocks come."""
        self._names.update(names)
        self.assigned += missing


class Evacuation:
    """The plan for one replica. Contexts are to come in the order of their heat, the hottest first."""

    def __init__(self, survivors: Sequence[Survivor]) -> None:
        self._survivors = survivors

    def target(self, context: CachedContext, held: Mapping[ReplicaId, HeldPrefix]) -> ReplicaId | None:
        """The replica that a context goes to; None: nowhere. `held` are the blocks that replicas have of it."""
        names, best, least = context.names, None, (0, 0)
        for survivor in self._survivors:
            present = max(held.get(survivor.replica, NO_PREFIX).blocks, survivor.expected(names))
            missing = len(names) - present
            if not missing:
                return None
            cost = survivor.assigned + missing, missing
            if survivor.room(context.idle_s) >= missing and (best is None or cost < least):
                best, least = survivor, cost
        if best is None:
            return None
        best.assign(names, least[1])
        return best.replica


def _idle_s(context: CachedContext) -> float:
    return context.idle_s
