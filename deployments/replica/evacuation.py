"""Copies of the contexts that a replica remembers to other replicas, before it stops: the scheduler orders them."""

import asyncio
import logging
import uuid
from array import array
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from operator import attrgetter

from deployments.engine.port import Engine
from deployments.replica.contexts import PastContexts, reload_adapter
from deployments.replica.copies import AT_ONCE
from migration.protocol.errors import MigrationError
from migration.protocol.ports import Clock
from migration.protocol.record import CopyRecord
from migration.run.donor import CopyOrder
from policies.causes import PAIR_FAILURES
from policies.model import ReplicaId
from policies.prefix.copies import CopyReason
from policies.prefix.evacuation import CachedContext, ContextCopy

log = logging.getLogger("ray.serve")

Copy = Callable[[CopyOrder, ReplicaId], Awaitable[CopyRecord]]
"""Copies a prefix to another replica. Raises MigrationError, as `MemPool.transfer_with_insert`."""


class Evacuator:
    """Lists the contexts in the engine's cache, and copies them."""

    def __init__(self, engine: Engine, contexts: PastContexts, copy: Copy, clock: Clock) -> None:
        self._engine = engine
        self._contexts = contexts
        self._copy = copy
        self._clock = clock

    async def cached(self) -> tuple[CachedContext, ...]:
        """The remembered contexts that the cache has a block of, the hottest first. Requests run on between two."""
        found = []
        for context in self._contexts.newest_first():
            names = self._engine.names(context.spec, tuple(context.outputs))
            if held := self._engine.mirror.held(names).hbm:
                found.append(CachedContext(context.number, array("Q", names[:held]), self._clock() - context.at))
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
                id, outputs = uuid.uuid4().hex[:16], tuple(context.outputs)
                try:
                    await reload_adapter(self._engine, context)
                    record = await self._copy(CopyOrder(id, context.spec, CopyReason.EVACUATE, outputs, left_s), target)
                except MigrationError as error:
                    log.info("a cached context is not copied to %s: %s", target, error)
                    continue
            if record.cause in PAIR_FAILURES:
                return done
            done += record.cause is None
        return done
