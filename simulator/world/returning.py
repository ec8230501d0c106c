"""Copies of the contexts of ended requests back to the GPUs of their prefills, as live replicas make them."""

from collections.abc import Callable, Mapping

from policies.model import ReplicaId, Tokens
from policies.prefix.returning import CHECK_S, ReturnQueue
from simulator.world.engine import SimulatedEngine
from simulator.world.live import Live
from simulator.world.loop import Loop, Turn
from simulator.world.moving import Mover


class ReturningCopies:
    """Makes the copies over the links of moves: each GPU one at a time, and only while nothing else is on their links.

    `engines` are all that have not closed.
    """

    def __init__(self, loop: Loop, mover: Mover, engines: Mapping[ReplicaId, SimulatedEngine], block: Tokens) -> None:
        self._loop = loop
        self._mover = mover
        self._engines = engines
        self._block = block
        self._queues: dict[SimulatedEngine, ReturnQueue[Live]] = {}
        """Those of GPUs that have contexts to copy, or are copying the last one."""

    def add(self, live: Live) -> None:
        """Take the context of a request that has ended. One that was prefilled there has nowhere to return to."""
        donor = None if live.at is None else self._engines.get(live.at)
        if donor is None or live.returns_to in (None, live.at):
            return
        is_idle = donor not in self._queues
        self._queues.setdefault(donor, ReturnQueue()).end(live, self._loop.now)
        if is_idle:
            self._go_on(donor)

    def _go_on(self, donor: SimulatedEngine) -> None:
        """Make the next copy of a GPU, or wait for it."""
        queue, now = self._queues[donor], self._loop.now
        while self._engines.get(donor.replica) is donor and (live := queue.next(now)) is not None:
            target = self._engines.get(live.returns_to) if live.returns_to is not None else None
            if target is not None and self._mover.links.busy(self._mover.route(donor, target)):
                self._loop.at(now + CHECK_S, Turn.LINK, lambda: self._go_on(donor))
                return
            queue.take()
            if target is not None and self._copy(donor, target, live, lambda: self._go_on(donor)):
                return
        del self._queues[donor]

    def _copy(self, donor: SimulatedEngine, target: SimulatedEngine, live: Live, done: Callable[[], None]) -> bool:
        """Copy the blocks of a context that the target lacks; `done` is called at the end. False if there are none."""
        if donor.cache is None or target.cache is None:
            return False
        names = live.job.context[: donor.cache.leading(live.job.context)]
        missing = len(names) - target.cache.leading(names)
        if missing <= 0:
            return False

        def arrived() -> None:
            if self._engines.get(target.replica) is target:
                target.take_in(names, self._loop.now)
            done()

        self._mover.copy(donor, target, Tokens(missing * self._block), arrived)
        return True
