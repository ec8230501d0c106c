"""Copies of the caches of GPUs that close to those that stay, planned as the live scheduler plans them."""

from collections.abc import Collection, Mapping, Sequence

from policies.model import Blocks, ReplicaId, Tokens
from policies.prefix.evacuation import EVACUATION_S, SURVIVORS, CachedContext, Evacuation, Survivor
from policies.prefix.tree import PromptTree
from simulator.world.engine import SimulatedEngine
from simulator.world.loop import Loop, Turn
from simulator.world.moving import Mover


class ClosingCopies:
    """Makes the copies over the links of moves: one after the other to each target, and to several targets at a time.

    `engines` are all that have not closed.
    """

    def __init__(self, loop: Loop, mover: Mover, engines: Mapping[ReplicaId, SimulatedEngine]) -> None:
        self._loop = loop
        self._mover = mover
        self._engines = engines
        self._under_way: dict[SimulatedEngine, int] = {}

    @property
    def donors(self) -> Collection[SimulatedEngine]:
        """The closed GPUs that stay because of their copies."""
        return self._under_way.keys()

    def begin(self, donor: SimulatedEngine, running: Sequence[SimulatedEngine], tree: PromptTree) -> None:
        """Copy the contexts of a GPU that closes to `running` ones, for at most `EVACUATION_S` seconds."""
        now = self._loop.now
        assert donor.cache is not None, "without a cache there are no copies"
        roomiest = sorted(running, key=lambda engine: (-(engine.free_blocks(now) or 0), engine.replica))[:SURVIVORS]
        survivors = [_survivor(engine, now) for engine in roomiest]
        plan, found = Evacuation(survivors), list[tuple[ReplicaId, CachedContext]]()
        for context in donor.cache.contexts(now) if survivors else ():
            if (target := plan.target(context, tree.match(context.names))) is not None:
                found.append((target, context))
        queues: dict[ReplicaId, list[CachedContext]] = {}
        for target, context in reversed(found):
            queues.setdefault(target, []).append(context)
        if queues:
            self._under_way[donor] = len(queues)
        for target, queue in queues.items():
            self._next(donor, target, queue, now + EVACUATION_S)

    def _next(self, donor: SimulatedEngine, to: ReplicaId, queue: list[CachedContext], ends_s: float) -> None:
        """Make the last copy of the queue, and then those before it."""
        target = self._engines.get(to)
        while queue and target is not None and target.cache is not None and self._loop.now < ends_s:
            names = queue.pop().names
            missing = len(names) - target.cache.leading(names)
            if missing:
                self._copy(donor, target, names, missing, queue, ends_s)
                return
        self._under_way[donor] -= 1
        if not self._under_way[donor]:
            del self._under_way[donor]

    def _copy(
        self,
        donor: SimulatedEngine,
        target: SimulatedEngine,
        names: Sequence[int],
        missing: int,
        queue: list[CachedContext],
        ends_s: float,
    ) -> None:
        assert donor.cache is not None
        assert target.cache is not None

        def arrived() -> None:
            deadline.cancel()
            assert target.cache is not None
            target.take_in(names, self._loop.now)
            target.cache.remember(names, self._loop.now)
            self._next(donor, target.replica, queue, ends_s)

        def late() -> None:
            give_up()
            self._next(donor, target.replica, [], ends_s)

        give_up = self._mover.copy(donor, target, Tokens(missing * donor.cache.block_tokens), arrived)
        deadline = self._loop.at(ends_s, Turn.LINK, late)


def _survivor(engine: SimulatedEngine, now: float) -> Survivor:
    contexts = () if engine.cache is None else engine.cache.contexts(now)
    return Survivor(engine.replica, max(Blocks(0), engine.free_blocks(now) or Blocks(0)), contexts)
