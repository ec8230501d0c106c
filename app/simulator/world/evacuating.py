"""Replicas that stay for a while because their prefixes are copied to others, as live ones do before they stop."""

from collections.abc import Iterator, Mapping, Sequence

from app.simulator.world.engine import SimulatedEngine
from app.simulator.world.loop import Loop, Turn
from app.simulator.world.moving import Mover
from policies.model import ReplicaId, Tokens
from policies.prefix.copies import EVACUATION_S, PrefixCopy


class Evacuations:
    """Makes the copies of closed replicas, one after the other for each, over the links of moves.

    `engines` are the replicas that stay.
    """

    def __init__(self, loop: Loop, mover: Mover, engines: Mapping[ReplicaId, SimulatedEngine]) -> None:
        self._loop = loop
        self._mover = mover
        self._engines = engines
        self._ends: dict[SimulatedEngine, float] = {}

    @property
    def count(self) -> int:
        """The number of replicas that stay because of their copies."""
        return len(self._ends)

    def begin(self, donor: SimulatedEngine, copies: Sequence[PrefixCopy]) -> None:
        """Make the copies of a replica that is closed; it stops after the last one, or after `EVACUATION_S` seconds."""
        if copies:
            self._ends[donor] = self._loop.now + EVACUATION_S
            self._next(donor, iter(copies))

    def _next(self, donor: SimulatedEngine, copies: Iterator[PrefixCopy]) -> None:
        for copy in copies:
            if self._copy(donor, copy, copies):
                return
        del self._ends[donor]

    def _copy(self, donor: SimulatedEngine, copy: PrefixCopy, others: Iterator[PrefixCopy]) -> bool:
        """Begin one copy; False if there is nothing to copy any more. The `others` follow."""
        target = self._engines.get(copy.target)
        if target is None or target.cache is None or donor.cache is None:
            return False
        names = donor.cache.extended(copy.names)
        missing = len(names) - target.cache.leading(names)
        if missing <= 0:
            return False

        def arrived() -> None:
            deadline.cancel()
            target.take_in(names, self._loop.now)
            self._next(donor, others)

        def late() -> None:
            give_up()
            del self._ends[donor]

        give_up = self._mover.copy(donor, target, Tokens(missing * donor.cache.block_tokens), arrived)
        deadline = self._loop.at(self._ends[donor], Turn.LINK, late)
        return True
