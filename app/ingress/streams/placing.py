"""The choice of a replica for a request: by the scheduler, or by the ingress itself without the scheduler."""

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
    """Asks the scheduler, and keeps the scheduler's newest view of the cluster to choose from during an outage."""

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
        self._scheduler_down = False
        self._decide: Coalescer[PlaceCall, Decision] = Coalescer(self._decide_all)

    async def place(self, spec: RequestSpec, outputs: int, exclude: set[ReplicaId]) -> ReplicaId | None:
        """A replica for the request that is not in `exclude`; None if there is none at the moment."""
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
        arrival = Arrival(spec.id, Tokens(spec.prompt_tokens + outputs), precedence=spec.precedence)
        try:
            decision = await self._decide(PlaceCall(arrival, spec.label, tuple(sorted(exclude))))
        except Exception as error:
            if not self._scheduler_down:  # one line per outage, not one per request
                log.warning("the scheduler does not place requests (%r): this ingress chooses replicas itself", error)
            self._scheduler_down = True
            return None
        if self._scheduler_down:
            log.info("the scheduler places requests again")
        self._scheduler_down = False
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
