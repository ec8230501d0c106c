"""Continuing a request whose replica is gone: where it was moving to, or anywhere else from the tokens received."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable

from app.ingress.conversation import Conversation
from app.ingress.errors import ApiError, saturated
from app.ingress.submitting import Submitter
from app.ingress.telemetry.segments import SegmentOrigin
from app.ingress.telemetry.tracing import Tracer
from deployments.scheduler_client import SchedulerClient
from migration.errors import PeerLost
from migration.record import MigrationRecord, Outcome
from policies.causes import Cause
from policies.model import ReplicaId
from policies.plan import Path, Reason

log = logging.getLogger("ray.serve")

_MAX_RESUBMISSIONS = 8
_RESUBMISSION_STRIDE = 1 << 16


class Recovery:
    """Continues requests elsewhere. `lost` is called for each that could not be continued."""

    def __init__(
        self, submitter: Submitter, scheduler: SchedulerClient, lost: Callable[[], None], tracer: Tracer
    ) -> None:
        self._submitter = submitter
        self._scheduler = scheduler
        self._lost = lost
        self._tracer = tracer

    def recover(self, conversation: Conversation, lost: ReplicaId, reason: str) -> None:
        """The host is gone: continue the request elsewhere, once."""
        busy = conversation.recovering is not None and not conversation.recovering.done()
        if conversation.cursor.finish is not None or busy or conversation.closed:
            return
        self._tracer.lost(conversation, reason)
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
            known = await self._submitter.call(target, "attach", conversation.id, moving.next_hop, cursor.next_index)
        except PeerLost:
            return False
        if known:
            conversation.moves += 1
            index = cursor.next_index
            conversation.take(cursor.advance(moving.next_hop))
            conversation.host, conversation.moving = target, None
            self._tracer.hosted(conversation, SegmentOrigin.MIGRATION, index)
            conversation.submitted = True
        return bool(known)

    async def _resubmit(self, conversation: Conversation, lost: ReplicaId) -> None:
        conversation.resubmissions += 1
        if conversation.resubmissions > _MAX_RESUBMISSIONS:
            raise saturated("the request was lost by too many replicas")
        # Far above any hop that the lost replica may have given out without being heard.
        conversation.new_hop(_RESUBMISSION_STRIDE)
        conversation.moving = None
        await self._submitter.submit(conversation, lost={lost})

    def _tell(self, conversation: Conversation, lost: ReplicaId, reason: str, took: float) -> None:
        """A resubmission is a migration by tokens, and is told as one."""
        record = MigrationRecord(
            id=uuid.uuid4().hex[:16],
            request_id=conversation.id,
            label=conversation.spec.label,
            source=lost,
            target=conversation.host,
            path=Path.TOKENS,
            reason=f"{Reason.LOST}: {reason}",
            state="resubmitted",
            trigger=Reason.LOST,
            outcome=Outcome.COMMITTED,
            cause=Cause.PEER_LOST,
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
