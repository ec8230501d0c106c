"""Where a request is sent: the scheduler's word, or the ingress's own choice while the scheduler is away."""

import contextlib
import logging
from collections import Counter
from collections.abc import Sequence

from deployments.api.calls import PlaceCall
from deployments.api.protocols import PlacingApi, SchedulerClient
from deployments.serve.coalesce import Coalescer
from deployments.serve.membership import Membership
from migration.protocol.request import RequestSpec
from policies.cluster.changes import Arrival
from policies.decision.placement import Decision, Place, Queue, least_loaded
from policies.model import ReplicaId, RequestId, Tokens

log = logging.getLogger("ray.serve")


class Placer:
    """Asks the scheduler; keeps its last view of the cluster to do without it."""

    def __init__(
        self,
        scheduler: SchedulerClient[PlacingApi],
        membership: Membership,
        place_timeout_s: float,
    ) -> None:
        self._scheduler = scheduler
        self._membership = membership
        self._place_timeout_s = place_timeout_s
        self._view: dict[ReplicaId, Tokens] = {}
        self._sent: dict[RequestId, ReplicaId] = {}
        self._decide: Coalescer[PlaceCall, Decision] = Coalescer(self._decide_all)

    async def place(self, spec: RequestSpec, outputs: int, exclude: set[ReplicaId]) -> ReplicaId | None:
        """A replica for the request that is not in `exclude`; None when there is none just now."""
        replica = await self._ask(spec, outputs, exclude) or self._choose(exclude)
        if replica is not None:
            self._sent[spec.id] = replica
        return replica

    def ended(self, request: RequestId) -> None:
        """The request no longer counts."""
        self._sent.pop(request, None)

    async def refresh(self) -> None:
        """Fetch the scheduler's view of free tokens; without an answer the old one stays."""
        with contextlib.suppress(Exception):
            self._view = await self._scheduler.within(self._place_timeout_s).view()

    async def _ask(self, spec: RequestSpec, outputs: int, exclude: set[ReplicaId]) -> ReplicaId | None:
        arrival = Arrival(spec.id, Tokens(len(spec.prompt) + outputs))
        try:
            decision = await self._decide(PlaceCall(arrival, spec.label, tuple(sorted(exclude))))
        except Exception as error:
            log.warning("the scheduler did not place %s (%r): choosing without it", spec.id, error)
            return None
        match decision:
            case Place(replica) | Queue(replica):
                return replica
            case _:
                return None

    async def _decide_all(self, calls: tuple[PlaceCall, ...]) -> Sequence[Decision]:
        return await self._scheduler.within(self._place_timeout_s).place(calls)

    def _choose(self, exclude: set[ReplicaId]) -> ReplicaId | None:
        return least_loaded(self._view, self._others(exclude), Counter(self._sent.values()))

    def _others(self, exclude: set[ReplicaId]) -> list[ReplicaId]:
        return [r for r in self._membership.running if r not in exclude]
