"""Has the beginnings of prompts copied to this replica before their requests run: the other end of `copies`."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from deployments.replica.host import RequestHost
from deployments.replica.moves import Moves
from migration.concurrency import Tasks
from migration.protocol.record import CopyRecord
from migration.protocol.request import RequestSpec
from migration.run.donor import CopyOrder
from policies.model import ReplicaId
from policies.plan import Move
from policies.prefix.copies import CopyReason, Fetch

log = logging.getLogger("ray.serve")

LEAST_S = 0.1
"""The least deadline of a copy, in seconds: shorter ones are in the noise of a busy machine."""

CopyHere = Callable[[ReplicaId, CopyOrder], Awaitable[CopyRecord]]
"""Has a donor copy a prefix to this replica. Raises MigrationError, as `CopyApi.copy_prefix`."""


class Fetches:
    """Submits requests whose prompt's beginning is copied first.

    A request waits for its copy no longer than until its turn, and then as long as the computation would take that the
    copy saves. It runs then, also without the copied blocks.
    """

    def __init__(self, host: RequestHost, moves: Moves, copy_here: CopyHere) -> None:
        self._host = host
        self._moves = moves
        self._copy_here = copy_here
        self._tasks = Tasks()

    def submit(
        self, spec: RequestSpec, hop: int, outputs: tuple[int, ...], fetch: Fetch, then: Move | None = None
    ) -> None:
        """Take a request; it runs in the engine behind the copy, and `then` moves on. Raises Refused."""
        self._moves.submit(spec, hop, outputs, then, fetching=True)
        self._tasks.start(self._fetch(spec, hop, outputs, fetch))

    async def _fetch(self, spec: RequestSpec, hop: int, outputs: tuple[int, ...], fetch: Fetch) -> None:
        within_s = max(LEAST_S, fetch.within_s)
        order = CopyOrder.of(spec, outputs, CopyReason.FETCH, within_s)
        try:
            async with asyncio.timeout(within_s):
                await self._copy_here(fetch.donor, order)
        except Exception as error:
            log.info("request %s computes its whole prompt: the copy from %s failed: %r", spec.id, fetch.donor, error)
        finally:
            try:
                # Before the request begins: blocks on their way would take room from it.
                self._moves.cancel(order.id)
            finally:
                self._host.begin(spec.id, hop)
