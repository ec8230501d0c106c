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
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from app.ingress.conversation import Conversation, unrepeatable
from app.ingress.errors import ApiError, saturated
from app.ingress.placing import Placer
from deployments.calls import Submission
from deployments.coalesce import Coalescer
from deployments.membership import Membership
from deployments.routing import Replicas, Unrouted
from deployments.scheduler_client import SchedulerClient
from migration.cursor import GapError
from migration.errors import MigrationError, PeerLost, Refused
from migration.messages import Path
from migration.record import MigrationRecord, Outcome
from migration.request import Delta, IngressId, Lost, Moved, Moving, RequestSpec, StreamEvent
from policies.model import ReplicaId, RequestId

log = logging.getLogger("ray.serve")

_RECONNECT_S = 0.05
_ROUTER_SKEW_S = 2.0
"""How long a replica that is listed as running may be unknown to this process's router, or out of reach."""
_CALL_S = 5.0
"""How long a replica may take to answer a call; its engine has no part in any of them."""
_MAX_RESUBMISSIONS = 8
_RETRY_S = 0.1
SILENCE_S = 10.0
"""A replica that says nothing for so long has stopped or is cut off; a living one says at least that it lives."""
_RESUBMISSION_STRIDE = 1 << 16


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
    ) -> None:
        self._ingress = ingress
        self._replicas = replicas
        self._placer = placer
        self._scheduler = scheduler
        self._live: dict[RequestId, Conversation] = {}
        self._readers: dict[ReplicaId, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._submitters: dict[ReplicaId, Coalescer[Submission, str]] = {}
        self._down: set[ReplicaId] = set()
        self._patience_s = patience_s
        self._lost = lost
        self._membership: Membership | None = None

    @property
    def count(self) -> int:
        """Conversations under way."""
        return len(self._live)

    def watch(self, membership: Membership) -> None:
        """Read every replica that is running. A replica that is stopping is read until it ends its stream."""
        self._membership = membership
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
        try:
            await self._submit(conversation, lost=set())
            yield conversation
        finally:
            self._close(conversation)

    def _close(self, conversation: Conversation) -> None:
        del self._live[conversation.id]
        self._placer.ended(conversation.id)
        if conversation.recovering is not None:
            conversation.recovering.cancel()
        if conversation.cursor.finish is None:
            for replica in sorted(conversation.touched):
                self._background(self._abandon(conversation.id, replica))

    # --- placing --------------------------------------------------------------------------------------

    async def _submit(self, conversation: Conversation, lost: set[ReplicaId]) -> None:
        """Place the request and submit it under the conversation's current hop.

        A replica that refuses is not asked again; one that could not be reached is, once there is no other.

        Raises:
            ApiError: every replica refused, or none was alive for as long as a request waits.
        """
        spec, cursor = conversation.spec, conversation.cursor
        deadline = time.monotonic() + self._patience_s
        refused: dict[ReplicaId, str] = {}
        while True:
            replica = await self._placer.place(spec, len(cursor.tokens), lost | refused.keys())
            if replica is None:
                if refused and refused.keys() >= set(self._running()):
                    raise saturated(f"no replica takes the request: {next(iter(refused.values()))}")
                if time.monotonic() >= deadline:
                    raise saturated("no replica is available")
                lost = set()
                await asyncio.sleep(_RETRY_S)
                continue
            conversation.host = replica
            conversation.touched.add(replica)
            try:
                tokens = tuple(cursor.tokens)
                submission = Submission(spec, cursor.hop, tokens, conversation.model if tokens else None)
                conversation.model = await self._submitter(replica)(submission)
            except Refused as error:
                refused[replica] = str(error)
            except PeerLost as error:
                log.info("placing %s: %s", spec.id, error)
                lost = lost | {replica}
                # It may have got the request all the same: what it makes of it must not be taken for the next one's.
                self._new_hop(conversation, 1)
            else:
                if replica not in self._down:
                    conversation.submitted = True
                    return
                # It died after it had answered.
                lost = lost | {replica}
                self._new_hop(conversation, 1)

    def _new_hop(self, conversation: Conversation, stride: int) -> None:
        """What earlier hosts still say of the request is not listened to any more."""
        conversation.top_hop += stride
        conversation.take(conversation.cursor.advance(conversation.top_hop))

    def _submitter(self, replica: ReplicaId) -> Coalescer[Submission, str]:
        """Submissions to one replica: those that come while one is under way travel together."""

        async def submit(requests: tuple[Submission, ...]) -> Sequence[Exception | str]:
            answers: list[Exception | str] = await self._call(replica, "submit", requests)
            return answers

        return self._submitters.setdefault(replica, Coalescer(submit))

    async def _call(self, replica: ReplicaId, method: str, *args: object) -> Any:
        """Call a replica; one that is listed but not routable yet is tried again. Raises PeerLost."""
        deadline = time.monotonic() + _ROUTER_SKEW_S
        while True:
            try:
                async with asyncio.timeout(_CALL_S):
                    return await self._replicas.call(replica, method, *args)
            except TimeoutError:
                raise PeerLost(f"replica {replica} did not answer within {_CALL_S:g} s") from None
            except Unrouted:
                if replica not in self._running() or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_RECONNECT_S)

    def _running(self) -> tuple[ReplicaId, ...]:
        return self._membership.running if self._membership is not None else ()

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
                    self._down.discard(replica)
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
            listed = replica in self._running()
            if not listed or time.monotonic() - broken_since > _ROUTER_SKEW_S:
                self._give_up(replica, reason)
            if not listed:
                break
            await asyncio.sleep(_RECONNECT_S)
        self._down.discard(replica)
        self._replicas.forget(replica)
        self._submitters.pop(replica, None)

    def _give_up(self, replica: ReplicaId, reason: str) -> None:
        """A replica cannot be reached: continue what it hosted elsewhere."""
        self._down.add(replica)
        for conversation in list(self._live.values()):
            if conversation.host == replica and conversation.submitted:
                self._recover(conversation, replica, reason)

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
            known = await self._call(replica, "attach", conversation.id, hop, cursor.next_index)
            reason = "the replica does not have the request"
        except Exception as error:
            known, reason = False, str(error)
        if not known and cursor.hop == hop and conversation.host == replica:
            self._recover(conversation, replica, reason)

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
                before = cursor.hop
                conversation.take(cursor.moved(event))
                if cursor.hop != before and cursor.target is not None:
                    self._follow(conversation, ReplicaId(cursor.target))
            case Lost():
                if event.hop == cursor.hop:
                    self._recover(conversation, replica, event.reason)

    def _follow(self, conversation: Conversation, target: ReplicaId) -> None:
        """The request changed hands: read on from the target, and tell it so."""
        conversation.touched.discard(conversation.host)
        conversation.touched.add(target)
        conversation.host = target
        conversation.moving = None
        self._background(self._ask_again(conversation, target))

    # --- recovering -----------------------------------------------------------------------------------

    def _recover(self, conversation: Conversation, lost: ReplicaId, reason: str) -> None:
        """The host is gone: continue the request elsewhere, once."""
        busy = conversation.recovering is not None and not conversation.recovering.done()
        if conversation.cursor.finish is not None or busy or conversation.id not in self._live:
            return
        conversation.submitted = False
        conversation.recovering = asyncio.create_task(self._continue(conversation, lost, reason))

    async def _continue(self, conversation: Conversation, lost: ReplicaId, reason: str) -> None:
        started = time.monotonic()
        try:
            if not await self._found_at_target(conversation):
                await self._resubmit(conversation, lost)
        except ApiError as error:
            self._lost()
            conversation.fail(error)
            return
        except Exception as error:
            log.exception("continuing request %s failed", conversation.id)
            self._lost()
            conversation.fail(ApiError(500, f"the request could not be continued: {type(error).__name__}"))
            return
        self._tell(conversation, lost, reason, time.monotonic() - started)

    async def _found_at_target(self, conversation: Conversation) -> bool:
        """Whether an announced move had come far enough: the target then goes on with the request."""
        moving, cursor = conversation.moving, conversation.cursor
        if moving is None or moving.hop != cursor.hop:
            return False
        target = ReplicaId(moving.target)
        try:
            known = await self._call(target, "attach", conversation.id, moving.next_hop, cursor.next_index)
        except PeerLost:
            return False
        if known:
            conversation.take(cursor.advance(moving.next_hop))
            conversation.host, conversation.moving = target, None
            conversation.submitted = True
        return bool(known)

    async def _resubmit(self, conversation: Conversation, lost: ReplicaId) -> None:
        conversation.resubmissions += 1
        if conversation.resubmissions > _MAX_RESUBMISSIONS:
            raise saturated("the request was lost by too many replicas")
        if reason := unrepeatable(conversation.spec, conversation.cursor):
            raise saturated(reason)
        # Far above any hop that the lost replica may have given out without being heard.
        self._new_hop(conversation, _RESUBMISSION_STRIDE)
        conversation.moving = None
        await self._submit(conversation, lost={lost})

    def _tell(self, conversation: Conversation, lost: ReplicaId, reason: str, took: float) -> None:
        """A resubmission is a migration by tokens, and is told as one."""
        record = MigrationRecord(
            id=uuid.uuid4().hex[:16],
            request_id=conversation.id,
            label=conversation.spec.label,
            source=lost,
            target=conversation.host,
            path=Path.TOKENS,
            reason=f"replica lost: {reason}",
            state="resubmitted",
            outcome=Outcome.COMMITTED,
            pause_s=took,
            duration_s=took,
            started_at=time.time() - took,
        )
        log.warning(
            "request %s continues on %s: %s",
            conversation.id,
            conversation.host,
            record.reason,
            extra={"migration": record.to_json()},
        )
        self._scheduler.tell("record", record)

    # --- ending ---------------------------------------------------------------------------------------

    async def _abandon(self, request: RequestId, replica: ReplicaId) -> None:
        with contextlib.suppress(MigrationError):
            await self._replicas.call(replica, "abandon", request)

    def _background(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
