"""The end of a replica's cache: before it stops, it copies the contexts that it remembers to other replicas.

The replica asks the scheduler once it has no request any more (`LastCopies`), whoever stops it: the scheduler, Serve
itself, or a drain of its node. The scheduler plans the copies, and the replica makes them (`Evacuator`).
"""

import asyncio
import logging
from array import array
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from operator import attrgetter

from deployments.engine.port import Engine
from deployments.replica.prefix_cache.contexts import PastContexts
from deployments.replica.prefix_cache.copies import AT_ONCE, CopyTo
from migration.protocol.errors import MigrationError
from migration.protocol.ports import Clock
from migration.run.donor import CopyOrder
from policies.causes import PAIR_FAILURES
from policies.model import ReplicaId
from policies.prefix.copies import CopyReason
from policies.prefix.evacuation import CachedContext, ContextCopy

log = logging.getLogger("ray.serve")

_ENDING_S = 2.0
"""The last part of the grace period, in seconds, in which nothing is copied: the engine ends."""
_RETRY_S = 0.5
"""The time between two attempts to reach the scheduler, in seconds."""


class LastCopies:
    """Has the scheduler save the cache of this replica, which is about to stop, as far as the grace period allows.

    `evacuate` gets the seconds that are left, and raises if the scheduler does not answer. Without `others`, which
    might take something, there are no copies.
    """

    def __init__(
        self, evacuate: Callable[[float], Awaitable[None]], others: Callable[[], bool], grace_s: float, clock: Clock
    ) -> None:
        self._evacuate = evacuate
        self._others = others
        self._grace_s = grace_s
        self._clock = clock
        self._ends_at: float | None = None
        self._copying: asyncio.Task[None] | None = None

    def over(self, empty: bool) -> bool:
        """True once nothing keeps the replica any more. The first call is at the begin of the grace period.

        The copies begin with the first call for an `empty` replica: requests come first.
        """
        if self._ends_at is None:
            self._ends_at = self._clock() + self._grace_s - _ENDING_S
        if self._copying is None and empty:
            self._copying = asyncio.create_task(self._copy(self._ends_at))
        return empty and self._copying is not None and self._copying.done()

    def close(self) -> None:
        """End the copies: the replica ends now."""
        if self._copying is not None:
            self._copying.cancel()

    async def _copy(self, ends_at: float) -> None:
        while (left_s := ends_at - self._clock()) > 0 and self._others():
            try:
                async with asyncio.timeout(left_s):
                    return await self._evacuate(left_s)
            except Exception as error:  # Another scheduler may be starting.
                log.info("the scheduler does not save this replica's cache: %r", error)
                await asyncio.sleep(min(_RETRY_S, max(0.0, ends_at - self._clock())))


class Evacuator:
    """Lists the contexts in the engine's cache, and copies them."""

    def __init__(self, engine: Engine, contexts: PastContexts, copy: CopyTo, clock: Clock) -> None:
        self._engine = engine
        self._contexts = contexts
        self._copy = copy
        self._clock = clock

    async def cached(self) -> tuple[CachedContext, ...]:
        """The remembered contexts that the cache has a block of, the hottest first. Requests run on between two."""
        found = []
        for context in self._contexts.newest_first():
            names = self._engine.names(context.spec, tuple(context.outputs))
            if (held := self._engine.mirror.held(names)).blocks:
                kept, idle_s = array("Q", names[: held.blocks]), self._clock() - context.at
                found.append(CachedContext(context.number, kept, idle_s, held.hbm))
            await asyncio.sleep(0)
        return tuple(found)

    async def send(self, copies: Sequence[ContextCopy], within_s: float) -> int:
        """Make copies in their order, to several targets at a time; the number of those done in time.

        A target that cannot be reached gets no more.
        """
        ends_at, gate = self._clock() + within_s, asyncio.Semaphore(AT_ONCE)
        each = groupby(sorted(copies, key=attrgetter("target")), key=attrgetter("target"))
        queues = [(target, [copy.number for copy in queue]) for target, queue in each]
        return sum(await asyncio.gather(*(self._send(target, numbers, ends_at, gate) for target, numbers in queues)))

    async def _send(self, target: ReplicaId, numbers: Sequence[int], ends_at: float, gate: asyncio.Semaphore) -> int:
        done = 0
        for number in numbers:
            async with gate:
                left_s, context = ends_at - self._clock(), self._contexts.get(number)
                if left_s <= 0:
                    return done
                if context is None:
                    continue
                try:
                    order = CopyOrder.of(context.spec, context.outputs, CopyReason.EVACUATE, left_s)
                    record = await self._copy(order, target)
                except MigrationError as error:
                    log.info("a cached context is not copied to %s: %s", target, error)
                    continue
            if record.cause in PAIR_FAILURES:
                return done
            done += record.cause is None
        return done
