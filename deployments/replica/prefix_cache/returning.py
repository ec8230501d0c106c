"""Copies the contexts of ended requests back to the replicas that have prefilled them, when nothing else is copied.

The next turn of a conversation is prefilled there, and finds its beginning. A return is never needed: it waits for
moves and other copies, and is dropped if it waits too long.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deployments.replica.prefix_cache.copies import CopyTo
from migration.protocol.ports import Clock
from migration.protocol.request import RequestSpec
from migration.run.donor import CopyOrder
from policies.model import ReplicaId
from policies.prefix.copies import CopyReason
from policies.prefix.returning import CHECK_S, ReturnQueue

log = logging.getLogger("ray.serve")

WITHIN_S = 5.0
"""The longest copy, in seconds."""


@dataclass(frozen=True, slots=True)
class _Due:
    """A context that waits for its copy to `to`."""

    spec: RequestSpec
    outputs: tuple[int, ...]
    to: ReplicaId


class Returns:
    """Makes the copies, one at a time and the oldest first. They wait while `waits` returns True."""

    def __init__(self, replica: ReplicaId, copy: CopyTo, waits: Callable[[], bool], clock: Clock) -> None:
        self._replica = replica
        self._copy = copy
        self._waits = waits
        self._clock = clock
        self._due: ReturnQueue[_Due] = ReturnQueue()
        self._task: asyncio.Task[None] | None = None

    def add(self, spec: RequestSpec, outputs: Sequence[int]) -> None:
        """Take the context of a request that has ended here. One that was prefilled here has nowhere to return to."""
        to = spec.returns_to
        if to is None or to == self._replica:
            return
        self._due.end(_Due(spec, tuple(outputs), to), self._clock())
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())

    def close(self) -> None:
        """Make no more copies."""
        self._due.clear()
        if self._task is not None:
            self._task.cancel()

    async def _work(self) -> None:
        while (due := self._due.next(self._clock())) is not None:
            if self._waits():
                await asyncio.sleep(CHECK_S)
            else:
                self._due.take()
                await self._return(due)

    async def _return(self, due: _Due) -> None:
        try:
            await self._copy(CopyOrder.of(due.spec, due.outputs, CopyReason.RETURN, WITHIN_S), due.to)
        except Exception as error:  # Also a defect: the copies behind this one are still due.
            log.info("the context of request %s does not return to %s: %r", due.spec.id, due.to, error)
