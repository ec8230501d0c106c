"""Streams that outlive replicas: places requests, reads every replica's events, follows moves, survives deaths.

Life of a request here:
  1. `open` asks the scheduler for a replica (or chooses without it) and submits the request there, under hop 0.
  2. One reader per replica receives batches of events and hands each to its request's cursor.
  3. `Moved` -> the cursor follows; the target is told that it is being read (`attach`).
  4. The replica dies, or says `Lost` -> if a move had been announced, the target is asked whether it has the
     request; otherwise prompt and received tokens are submitted elsewhere, under a new hop.
  5. The answer ends, or the client leaves -> every replica that may hold the request is told.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine

from app.ingress.conversation import Conversation
from app.ingress.errors import ApiError
from app.ingress.placing import Placer
from app.ingress.recovering import Recovery
from app.ingress.submitting import RECONNECT_S, ROUTER_SKEW_S, Submitter
from app.ingress.telemetry.segments import SegmentOrigin
from app.ingress.telemetry.tracing import NO_TRACER, Tracer
from deployments.membership import Membership
from deployments.routing import Replicas, Unrouted
from deployments.scheduler_client import SchedulerClient
from migration.cursor import GapError
from migration.errors import MigrationError, PeerLost
from migration.request import Delta, IngressId, Lost, Moved, Moving, RequestSpec, StreamEvent
from policies.model import ReplicaId, RequestId

log = logging.getLogger("ray.serve")

SILENCE_S = 10.0
"""A replica that says nothing for so long has stopped or is cut off; a living one says at least that it lives."""


class Streams:
    """All conversations of one ingress. `lost` is called for each that was under way and could not be continued."""

    def __init__(
        self,
        ingress: IngressId,
        replicas: Replicas,
        placer: Placer,
        scheduler: SchedulerClient,
        patience_s: float,
        lost: Callable[[], None] = lambda: None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._ingress = ingress
        self._replicas = replicas
        self._placer = placer
        self._tracer = tracer
        self._submitter = Submitter(replicas, placer, patience_s, tracer)
        self._recovery = Recovery(self._submitter, scheduler, lost, tracer)
        self._live: dict[RequestId, Conversation] = {}
        self._readers: dict[ReplicaId, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def count(self) -> int:
        """Conversations under way."""
        return len(self._live)

    def watch(self, membership: Membership) -> None:
        """Read every replica that is running. A replica that is stopping is read until it ends its stream."""
        self._submitter.running = membership.running
        for replica in membership.running:
            if replica not in self._readers or self._readers[replica].done():
                self._readers[replica] = asyncio.create_task(self._read(replica))

    @contextlib.asynccontextmanager
    async def open(self, spec: RequestSpec) -> AsyncIterator[Conversation]:
        """Have a request served; on leaving, it is ended wherever it is.

        Raises:
            ApiError: no replica took it.
        """
        conversation = Conversation(spec, ReplicaId(""))
        self._live[spec.id] = conversation
        self._tracer.opened(conversation)
        try:
            await self._submitter.submit(conversation, lost=set())
            yield conversation
        finally:
            self._close(conversation)

    def _close(self, conversation: Conversation) -> None:
        del self._live[conversation.id]
        conversation.closed = True
        self._tracer.closed(conversation)
        self._placer.ended(conversation.id)
        if conversation.recovering is not None:
            conversation.recovering.cancel()
        if conversation.cursor.finish is None:
            for replica in sorted(conversation.touched):
                self._background(self._abandon(conversation.id, replica))

    # --- reading --------------------------------------------------------------------------------------

    async def _read(self, replica: ReplicaId) -> None:
        """Read one replica's events for as long as it is listed, over as many streams as that takes.

        When it dies, or cannot be reached for longer than a router lags behind, its requests continue elsewhere.
        """
        broken_since: float | None = None
        while True:
            reason = "the replica ended its stream"
            try:
                connected = False
                async for batch in self._replicas.stream(replica, "events", self._ingress, silence_s=SILENCE_S):
                    broken_since = None
                    self._submitter.down.discard(replica)
                    if not connected:
                        connected = True
                        self._reconnected(replica)
                    for event in batch:
                        self._take(event, replica)
            except Unrouted as error:
                reason = str(error)
            except PeerLost as error:
                reason = str(error)
                self._give_up(replica, reason)
            except Exception as error:
                log.exception("reading replica %s failed", replica)
                reason = repr(error)
            broken_since = broken_since or time.monotonic()
            listed = replica in self._submitter.running
            if not listed or time.monotonic() - broken_since > ROUTER_SKEW_S:
                self._give_up(replica, reason)
            if not listed:
                break
            await asyncio.sleep(RECONNECT_S)
        self._replicas.forget(replica)
        self._submitter.forget(replica)

    def _give_up(self, replica: ReplicaId, reason: str) -> None:
        """A replica cannot be reached: continue what it hosted elsewhere."""
        self._submitter.down.add(replica)
        for conversation in list(self._live.values()):
            if conversation.host == replica and conversation.submitted:
                self._recovery.recover(conversation, replica, reason)

    def _reconnected(self, replica: ReplicaId) -> None:
        """Events may have been lost between two streams: ask for whatever is missing."""
        for conversation in list(self._live.values()):
            if conversation.host == replica and conversation.submitted:
                self._background(self._ask_again(conversation, replica))

    async def _ask_again(self, conversation: Conversation, replica: ReplicaId) -> None:
        """Tell a replica that its request is read from here on; continue elsewhere if it does not have it."""
        cursor = conversation.cursor
        hop = cursor.hop
        try:
            known = await self._submitter.call(replica, "attach", conversation.id, hop, cursor.next_index)
            reason = "the replica does not have the request"
        except Exception as error:
            known, reason = False, str(error)
        if not known and cursor.hop == hop and conversation.host == replica:
            self._recovery.recover(conversation, replica, reason)

    def _take(self, event: StreamEvent, replica: ReplicaId) -> None:
        conversation = self._live.get(event.request)
        if conversation is None:
            if isinstance(event, Delta) and event.finish is None:
                # Its reader left while it was on its way there.
                self._background(self._abandon(event.request, replica))
            return
        conversation.top_hop = max(conversation.top_hop, event.hop)
        stale = isinstance(event, Delta) and event.hop < conversation.cursor.hop
        if stale and replica != conversation.host and replica in conversation.touched:
            # It was given up for lost, and is not.
            conversation.touched.discard(replica)
            self._background(self._abandon(event.request, replica))
            return
        try:
            self._apply(event, conversation, replica)
            self._tracer.took(conversation)
        except GapError as error:
            self._background(self._ask_again(conversation, replica))
            log.warning("request %s: %s; asking again", conversation.id, error)

    def _apply(self, event: StreamEvent, conversation: Conversation, replica: ReplicaId) -> None:
        cursor = conversation.cursor
        match event:
            case Delta():
                conversation.take(cursor.feed(event))
            case Moving():
                conversation.moving = event
                conversation.top_hop = max(conversation.top_hop, event.next_hop)
                conversation.touched.add(ReplicaId(event.target))
            case Moved():
                before, index = cursor.hop, cursor.next_index
                conversation.take(cursor.moved(event))
                if cursor.hop != before and cursor.target is not None:
                    self._follow(conversation, ReplicaId(cursor.target), index)
            case Lost() if event.hop == cursor.hop:
                if event.invalid:
                    conversation.fail(ApiError(400, event.reason, code="invalid_value"))
                else:
                    self._recovery.recover(conversation, replica, event.reason)

    def _follow(self, conversation: Conversation, target: ReplicaId, index: int) -> None:
        """The request changed hands at output token `index`: read on from the target, and tell it so."""
        conversation.moves += 1
        conversation.touched.discard(conversation.host)
        conversation.touched.add(target)
        conversation.host = target
        conversation.moving = None
        self._tracer.hosted(conversation, SegmentOrigin.MIGRATION, index)
        self._background(self._ask_again(conversation, target))

    # --- ending ---------------------------------------------------------------------------------------

    async def _abandon(self, request: RequestId, replica: ReplicaId) -> None:
        with contextlib.suppress(MigrationError):
            await self._replicas.call(replica, "abandon", request)

    def _background(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
