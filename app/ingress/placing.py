"""Where a request is sent: the scheduler's word, or the ingress's own choice while the scheduler is away."""

import asyncio
import contextlib
import logging
import time
from collections import Counter

from app.ingress.errors import saturated
from deployments.membership import Membership
from deployments.scheduler_client import SchedulerClient
from migration.request import RequestSpec
from policies.model import ClusterState, ReplicaId, RequestId, Tokens
from policies.placement import Decision, Place, Queue, least_loaded

log = logging.getLogger("ray.serve")

_RETRY_S = 0.1


class Placer:
    """Asks the scheduler; keeps its last view of the cluster to do without it."""

    def __init__(
        self,
        scheduler: SchedulerClient,
        membership: Membership,
        place_timeout_s: float,
        no_replica_timeout_s: float,
    ) -> None:
        self._scheduler = scheduler
        self._membership = membership
        self._place_timeout_s = place_timeout_s
        self._no_replica_timeout_s = no_replica_timeout_s
        self._view = ClusterState(())
        self._sent: dict[RequestId, ReplicaId] = {}

    async def place(self, spec: RequestSpec, outputs: int, exclude: set[ReplicaId]) -> ReplicaId:
        """A replica for the request. Replicas in `exclude` are tried again only when there is no other.

        Raises:
            ApiError: 503, no replica was alive for as long as a request waits.
        """
        deadline = time.monotonic() + self._no_replica_timeout_s
        while True:
            replica = await self._ask(spec, outputs, exclude) or self._choose(exclude)
            if replica is not None:
                self._sent[spec.id] = replica
                return replica
            if time.monotonic() >= deadline:
                raise saturated("no replica is available")
            await asyncio.sleep(_RETRY_S)
            # A replica that was down a moment ago may be back; its replacement has another id.
            exclude = exclude - set(self._membership.running) if not self._others(exclude) else exclude

    def ended(self, request: RequestId) -> None:
        """The request no longer counts."""
        self._sent.pop(request, None)

    async def refresh(self) -> None:
        """Fetch the scheduler's view of the cluster; without an answer the old one stays."""
        with contextlib.suppress(Exception):
            self._view = await self._scheduler.call("view", timeout_s=self._place_timeout_s)

    async def _ask(self, spec: RequestSpec, outputs: int, exclude: set[ReplicaId]) -> ReplicaId | None:
        tokens = Tokens(len(spec.prompt) + outputs)
        try:
            decision: Decision = await self._scheduler.call(
                "place", spec.id, spec.label, tokens, tuple(sorted(exclude)), timeout_s=self._place_timeout_s
            )
        except Exception as error:
            log.warning("the scheduler did not place %s (%r): choosing without it", spec.id, error)
            return None
        match decision:
            case Place(replica) | Queue(replica):
                return replica
            case _:
                return None

    def _choose(self, exclude: set[ReplicaId]) -> ReplicaId | None:
        return least_loaded(self._view, self._others(exclude), Counter(self._sent.values()))

    def _others(self, exclude: set[ReplicaId]) -> list[ReplicaId]:
        return [r for r in self._membership.running if r not in exclude]
