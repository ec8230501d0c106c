"""Getting a request onto a replica: it is placed and submitted, and placed again where that fails."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from app.ingress.conversation import Conversation
from app.ingress.errors import saturated
from app.ingress.placing import Placer
from app.ingress.telemetry.segments import SegmentOrigin
from app.ingress.telemetry.tracing import Tracer
from deployments.calls import Submission
from deployments.coalesce import Coalescer
from deployments.routing import Replicas, Unrouted
from migration.errors import PeerLost, Refused, Stopping
from policies.model import ReplicaId

log = logging.getLogger("ray.serve")

RECONNECT_S = 0.05
ROUTER_SKEW_S = 2.0
"""How long a replica that is listed as running may be unknown to this process's router, or out of reach."""
_CALL_S = 5.0
"""How long a replica may take to answer a call; its engine has no part in any of them."""
_RETRY_S = 0.1


class Submitter:
    """Submits requests. `running` are the replicas that are listed, `down` those of them that cannot be reached."""

    def __init__(self, replicas: Replicas, placer: Placer, patience_s: float, tracer: Tracer) -> None:
        self.running: tuple[ReplicaId, ...] = ()
        self.down: set[ReplicaId] = set()
        self._replicas = replicas
        self._placer = placer
        self._patience_s = patience_s
        self._tracer = tracer
        self._submitters: dict[ReplicaId, Coalescer[Submission, str]] = {}

    async def submit(self, conversation: Conversation, lost: set[ReplicaId]) -> None:
        """Place the request and submit it under the conversation's current hop.

        A replica that refuses is not asked again; one that is stopping or could not be reached is, once there is no
        other: it may have been called back, and meanwhile a new one may come.

        Raises:
            ApiError: every replica refused, or none was alive for as long as a request waits.
        """
        spec, cursor = conversation.spec, conversation.cursor
        deadline = time.monotonic() + self._patience_s
        refused: dict[ReplicaId, str] = {}
        why = ""
        while True:
            replica = await self._placer.place(spec, len(cursor.tokens), lost | refused.keys())
            if replica is None:
                if refused and refused.keys() >= set(self.running):
                    raise saturated(f"no replica takes the request: {next(iter(refused.values()))}")
                if time.monotonic() >= deadline:
                    raise saturated(f"no replica is available{why}")
                lost = set()
                await asyncio.sleep(_RETRY_S)
                continue
            conversation.host = replica
            conversation.touched.add(replica)
            tokens = tuple(cursor.tokens)
            first = not (tokens or conversation.resubmissions)
            self._tracer.hosted(conversation, SegmentOrigin.FIRST if first else SegmentOrigin.RESUBMISSION, len(tokens))
            try:
                submission = Submission(spec, cursor.hop, tokens, conversation.model if tokens else None)
                conversation.model = await self._submitter(replica)(submission)
            except Stopping as error:
                why = f": {error}"
                lost = lost | {replica}
                self._tracer.lost(conversation, str(error))
            except Refused as error:
                refused[replica] = str(error)
                self._tracer.lost(conversation, str(error))
            except PeerLost as error:
                log.info("placing %s: %s", spec.id, error)
                lost = lost | {replica}
                self._tracer.lost(conversation, str(error))
                # It may have got the request all the same: what it makes of it must not be taken for the next one's.
                conversation.new_hop(1)
            else:
                if replica not in self.down:
                    conversation.submitted = True
                    return
                # It died after it had answered.
                self._tracer.lost(conversation, "the replica died")
                lost = lost | {replica}
                conversation.new_hop(1)

    def _submitter(self, replica: ReplicaId) -> Coalescer[Submission, str]:
        """Submissions to one replica: those that come while one is under way travel together."""

        async def submit(requests: tuple[Submission, ...]) -> Sequence[Exception | str]:
            answers: list[Exception | str] = await self.call(replica, "submit", requests)
            return answers

        return self._submitters.setdefault(replica, Coalescer(submit))

    async def call(self, replica: ReplicaId, method: str, *args: object) -> Any:
        """Call a replica; one that is listed but not routable yet is tried again. Raises PeerLost."""
        deadline = time.monotonic() + ROUTER_SKEW_S
        while True:
            try:
                async with asyncio.timeout(_CALL_S):
                    return await self._replicas.call(replica, method, *args)
            except TimeoutError:
                raise PeerLost(f"replica {replica} did not answer within {_CALL_S:g} s") from None
            except Unrouted:
                if replica not in self.running or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(RECONNECT_S)

    def forget(self, replica: ReplicaId) -> None:
        """The replica is gone for good."""
        self.down.discard(replica)
        self._submitters.pop(replica, None)
