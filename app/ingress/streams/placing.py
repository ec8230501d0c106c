"""The choice of a replica for a request: by the scheduler, or by the ingress itself without the scheduler."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from deployments.api.calls import PlaceCall
from deployments.api.protocols import PlacingApi, SchedulerClient
from deployments.serve.coalesce import Coalescer
from deployments.serve.membership import Membership
from migration.protocol.ports import Prospects
from migration.protocol.request import RequestSpec
from policies.cluster.changes import Arrival
from policies.decision.placement import Decision, NoReplica, Place, PlacingAlone, PlacingView, Queue
from policies.model import PoolId, ReplicaId, RequestId, Tokens
from policies.prefix.names import Naming

log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class PromptContent:
    """The names of a prompt's full blocks, and the client's session; see `Arrival`."""

    names: tuple[int, ...] = ()
    session: str = ""


NO_CONTENT = PromptContent()

_ANNOUNCE_S = 0.02
"""The time in which announced requests are gathered, in seconds."""


class Placer:
    """Asks the scheduler for replicas of a pool, and keeps its newest view of them to choose from during an outage.

    With one replica to choose from there is nothing to ask: the scheduler gets these requests afterwards, many at once.
    """

    def __init__(
        self,
        scheduler: SchedulerClient[PlacingApi],
        pool: PoolId,
        membership: Membership,
        place_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self.pool = pool
        self._membership = membership
        self._place_timeout_s = place_timeout_s
        self._clock = clock
        view = PlacingView()
        self._alone = PlacingAlone(view, clock())
        self._naming = view.naming
        self._asleep = view.asleep
        self._wake_s: float | None = None
        """The predicted time of a wake by the scheduler's newest answer, if that was no replica."""
        self.ttft_s = view.ttft_s
        """The longest times to a first token that the service level allows, by class, in the newest view."""
        self._contents: dict[RequestId, PromptContent] = {}
        self._placed: dict[RequestId, Place] = {}
        """The scheduler's placements until they are submitted."""
        self._scheduler_down = False
        self._decide: Coalescer[PlaceCall, Decision] = Coalescer(self._decide_all)
        self._announced: list[PlaceCall] = []
        """Requests that went to the only replica, and that the scheduler does not know yet."""
        self._announcing: asyncio.Task[None] | None = None

    @property
    def naming(self) -> Naming | str:
        """The engines' naming of blocks in the scheduler's newest view, or the reason why they have none in common."""
        return self._naming

    @property
    def prospects(self) -> Prospects:
        """The prospects of requests for which there was no replica."""
        running = self._membership.running
        if self._scheduler_down and running and not self.awake(running):
            return Prospects(self._wake_s, "the model sleeps, and the scheduler, which wakes it, does not answer")
        return Prospects(self._wake_s)

    def describe(self, request: RequestId, content: PromptContent) -> None:
        """Set the content of a request that will be placed, until it has `ended`."""
        self._contents[request] = content

    async def place(self, spec: RequestSpec, outputs: int, exclude: AbstractSet[ReplicaId]) -> ReplicaId | None:
        """A replica for the request that is not in `exclude`; None if there is none at the moment."""
        tokens = Tokens(spec.prompt_tokens + outputs)
        content = self._contents.get(spec.id, NO_CONTENT)
        arrival = Arrival(spec.id, tokens, content.names, content.session, spec.precedence, spec.adapter_id)
        call = PlaceCall(self.pool, arrival, spec.label, tuple(sorted(exclude)))
        others = self._others(exclude)
        if len(others) == 1:
            self._announce(replace(call, submitted=True))
            replica = None if self._scheduler_down else others[0]
        else:
            # It was refused there.
            self._announced = [each for each in self._announced if each.arrival.id != spec.id]
            replica = await self._ask(call)
        return replica or self._alone.place(spec.id, tokens, self._others(exclude), self._clock())

    def take(self, request: RequestId, replica: ReplicaId) -> Place:
        """The placement of a request on this replica, with what the scheduler has decided beside it, once."""
        placed = self._placed.pop(request, None)
        return placed if placed is not None and placed.replica == replica else Place(replica)

    def soonest_s(self) -> float:
        """Seconds to the first token of the shortest prompt on a replica awake; see `PlacingAlone.soonest_s`."""
        return self._alone.soonest_s(self.awake(self._membership.running), self._clock())

    def ended(self, request: RequestId) -> None:
        """The request no longer counts."""
        self._alone.ended(request)
        self._placed.pop(request, None)
        self._contents.pop(request, None)

    def found_asleep(self, replica: ReplicaId) -> None:
        """A request was refused since this replica sleeps: it counts as asleep until the next view."""
        self._asleep |= {replica}

    def awake(self, replicas: Iterable[ReplicaId]) -> list[ReplicaId]:
        """Those of the replicas that do not sleep, by the newest view and by refusals since."""
        return [replica for replica in replicas if replica not in self._asleep]

    async def refresh(self) -> None:
        """Fetch the scheduler's view of the replicas; without an answer the old one stays."""
        with contextlib.suppress(Exception):
            view = await self._scheduler.within(self._place_timeout_s).view(self.pool)
            self._alone = PlacingAlone(view, self._clock())
            self._naming, self.ttft_s, self._asleep = view.naming, view.ttft_s, view.asleep

    async def _ask(self, call: PlaceCall) -> ReplicaId | None:
        try:
            decision = await self._decide(call)
        except Exception:
            return None
        self._wake_s = decision.wake_s if isinstance(decision, NoReplica) else None
        match decision:
            case Place(replica):
                self._placed[call.arrival.id] = decision
                return replica
            case Queue(replica):
                return replica
            case _:
                return None

    async def _decide_all(self, calls: tuple[PlaceCall, ...]) -> Sequence[Decision]:
        try:
            decisions = await self._scheduler.within(self._place_timeout_s).place(calls)
        except Exception as error:
            if not self._scheduler_down:  # one line per outage, not one per request
                log.warning("the scheduler does not place requests (%r): this ingress chooses replicas itself", error)
            self._scheduler_down = True
            raise
        if self._scheduler_down:
            log.info("the scheduler places requests again")
        self._scheduler_down = False
        return decisions

    def _announce(self, call: PlaceCall) -> None:
        """Have the scheduler know of a request that needs no decision, soon."""
        self._announced.append(call)
        if self._announcing is None or self._announcing.done():
            self._announcing = asyncio.create_task(self._announce_all())

    async def _announce_all(self) -> None:
        while self._announced:
            await asyncio.sleep(_ANNOUNCE_S)
            calls, self._announced = tuple(self._announced), []
            with contextlib.suppress(Exception):  # It learns of them from the replica's next report.
                await self._decide_all(calls)

    def _others(self, exclude: AbstractSet[ReplicaId]) -> list[ReplicaId]:
        return [r for r in self.awake(self._membership.running) if r not in exclude]
