"""Has replicas that are about to stop copy their caches to others; `policies.prefix.evacuation` plans it."""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence

from deployments.api.protocols import ControlApi, RemoteReplicas
from deployments.scheduler.listing import Listing
from migration.protocol.errors import MigrationError
from migration.protocol.ports import Clock
from policies.decision.reports import Roster
from policies.model import Blocks, ReplicaId, ReplicaState
from policies.prefix.evacuation import EVACUATION_S, SURVIVORS, CachedContext, ContextCopy, Evacuation, Survivor
from policies.prefix.tree import PromptTree

log = logging.getLogger("ray.serve")

_ASKING_S = 5.0
"""The longest wait for the replicas' lists of what they have, in seconds."""


class Evacuations:
    """Copies the caches of replicas that Serve stops. Whatever fails, the replica stops without that copy."""

    def __init__(
        self,
        replicas: RemoteReplicas[ControlApi],
        roster: Roster,
        listing: Listing,
        tree: Callable[[], PromptTree],
        barred: Callable[[], Collection[ReplicaId]],
        fence: int,
        clock: Clock,
    ) -> None:
        """`tree` is the blocks that replicas have, as of their newest reports. `barred` ones get no arrivals."""
        self._replicas = replicas
        self._roster = roster
        self._listing = listing
        self._tree = tree
        self._barred = barred
        self._fence = fence
        self._clock = clock

    async def evacuate(self, donor: ReplicaId, model: str, within_s: float) -> None:
        """Have a replica of that model copy its cache to those that stay.

        The copies take at most `EVACUATION_S` seconds, and all of it `within_s`.
        """
        began = self._clock()
        try:
            async with asyncio.timeout(within_s):
                async with asyncio.timeout(_ASKING_S):
                    # Serve may be stopping others at the same time.
                    await self._listing.refresh()
                    contexts, survivors = await asyncio.gather(self._contexts(donor), self._survivors(donor, model))
                copies = await self._plan(contexts, survivors)
                if not copies:
                    return
                left_s = began + within_s - self._clock()
                done = await self._replicas.at(donor).evacuate(copies, min(EVACUATION_S, left_s), self._fence)
        except Exception as error:  # The replica has to stop, whatever is wrong here.
            log.warning("the cache of replica %s is lost with it: %r", donor, error)
            return
        log.info(
            "replica %s has copied %d of its %d cached contexts to %d replicas in %.1f s; %d were needed nowhere",
            donor,
            done,
            len(contexts),
            len({copy.target for copy in copies}),
            self._clock() - began,
            len(contexts) - len(copies),
        )

    async def _contexts(self, replica: ReplicaId) -> tuple[CachedContext, ...]:
        return await self._replicas.at(replica).cached_contexts(self._fence)

    async def _survivors(self, donor: ReplicaId, model: str) -> Sequence[Survivor]:
        """The other replicas of the model that stay and get arrivals, those with the most free blocks."""
        excluded = {donor, *self._listing.leaving(), *self._barred()}
        staying = [
            (status.free_blocks, status.id)
            for status in self._roster.statuses.values()
            if status.state is ReplicaState.RUNNING
            and status.id not in excluded
            and status.model == model
            and status.free_blocks is not None
            and status.free_blocks > 0
        ]
        chosen = sorted(staying, reverse=True)[:SURVIVORS]
        return [s for s in await asyncio.gather(*(self._survivor(id, free) for free, id in chosen)) if s is not None]

    async def _survivor(self, replica: ReplicaId, free: Blocks) -> Survivor | None:
        try:
            return Survivor(replica, free, await self._contexts(replica))
        except MigrationError as error:
            log.info("replica %s gets no part of a cache: %s", replica, error)
            return None

    async def _plan(self, contexts: Sequence[CachedContext], survivors: Sequence[Survivor]) -> tuple[ContextCopy, ...]:
        """The copies of these contexts. Arrivals are placed between two of them."""
        plan, tree, copies = Evacuation(survivors), self._tree(), []
        for context in contexts if survivors else ():
            if (target := plan.target(context, tree.match(context.names))) is not None:
                copies.append(ContextCopy(context.number, target))
            await asyncio.sleep(0)
        return tuple(copies)
