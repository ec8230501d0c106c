"""Leads the copy session of a held prefix: executes the commands of the donor's table, and feeds events to it.

As in `source`, one activity runs at a time, and everything that happens arrives through one queue.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Self

from migration.protocol.errors import PeerLost, Refused
from migration.protocol.messages import PathRequest
from migration.protocol.ports import Hosted, Peer, PrefixHolds
from migration.protocol.record import CopyOutcome, CopyRecord
from migration.protocol.request import RequestSpec
from migration.protocol.tables import donor
from migration.protocol.tables.donor import DONOR_ACTIVITIES, DONOR_FINAL, DonorCommand, DonorEvent, DonorState
from migration.run.activities import Activities, ActivityFailure
from migration.run.copying import CopySession
from migration.run.world import MigrationWorld
from policies.causes import Cause
from policies.model import Blocks, ReplicaId, RequestId, Tokens
from policies.prefix.copies import CopyReason


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """A prefix to copy: the full blocks of the context of `spec` and `outputs`, as far as the donor has them.

    After `within_s` seconds nobody needs the blocks any more; None: the donor's lease alone ends the copy.
    """

    id: str
    spec: RequestSpec
    reason: CopyReason
    outputs: tuple[int, ...] = ()
    within_s: float | None = None

    @classmethod
    def of(cls, spec: RequestSpec, outputs: Sequence[int], reason: CopyReason, within_s: float) -> Self:
        """A new order, with an id of its own."""
        return cls(uuid.uuid4().hex[:16], spec, reason, tuple(outputs), within_s)


class DonorRun:
    """One copy, from the order to its record. The prefix is held for at most `lease_s` seconds."""

    def __init__(self, order: CopyOrder, peer: Peer, world: MigrationWorld, holds: PrefixHolds, lease_s: float) -> None:
        self._order = order
        self._peer = peer
        self._world = world
        self._holds = holds
        self._limit_s = lease_s if order.within_s is None else min(lease_s, order.within_s)
        self._session = donor.new_session()
        self._activities: Activities[DonorEvent] = Activities()
        self._hold = f"hold-{order.id}"
        self._copy = CopySession(order.id, self._hold, peer, world)
        self._held = Blocks(0)
        self._began, self._started_at = world.clock(), world.wall_clock()
        self._took_s: float | None = None
        self._error: str | None = None
        self._cause: Cause | None = None

    @property
    def target(self) -> ReplicaId:
        """The replica that gets the blocks."""
        return self._peer.id

    @property
    def record(self) -> CopyRecord:
        """The copy as of now."""
        state, account = self._session.state, self._copy.account
        return CopyRecord(
            id=self._order.id,
            source=self._world.replica,
            target=self._peer.id,
            reason=self._order.reason,
            state=state.value,
            outcome=_OUTCOMES.get(state),
            error=self._error,
            cause=self._cause,
            held=self._held,
            tokens=Tokens((self._held - account.present) * self._world.blocks.fingerprint.block_size),
            duration_s=self._world.clock() - self._began if self._took_s is None else self._took_s,
            started_at=self._started_at,
            pool=self._world.pool,
            **asdict(account),
        )

    def post(self, event: DonorEvent) -> None:
        """Something happened in the world (never the result of an activity)."""
        self._activities.post(event)

    def target_lost(self) -> None:
        """The target is gone."""
        self.post(DonorEvent.TARGET_LOST)

    async def run(self) -> CopyRecord:
        """Copy. Returns the record, also of a failure. Never raises an exception of a peer or transport."""
        expiry = asyncio.get_running_loop().call_later(self._limit_s, self.post, DonorEvent.EXPIRED)
        try:
            await self._feed(DonorEvent.BEGIN)
            while self._session.state not in DONOR_FINAL:
                await self._feed(*await self._activities.next_event())
        finally:
            expiry.cancel()
            self._activities.stop()
            self._copy.close()
            self._holds.release_prefix(self._hold)
            await self._activities.stopped()
        return self.record

    async def _feed(self, event: DonorEvent, failure: ActivityFailure | None = None) -> None:
        commands = self._session.feed(event)
        self._activities.stop()
        if failure is None and self._session.state is DonorState.ABORTED:
            failure = _FAILURES.get(event)
        if failure is not None:
            self._cause, self._error = failure.cause, failure.text
        if self._session.state in DONOR_FINAL:
            self._took_s = self._world.clock() - self._began
        for command in commands:
            if command in DONOR_ACTIVITIES:
                self._start(command)
            elif command is DonorCommand.RELEASE:
                self._holds.release_prefix(self._hold)
            else:
                await self._copy.free_target()

    # --- activities -----------------------------------------------------------------------------------

    def _start(self, command: DonorCommand) -> None:
        limits, size = self._world.limits, self._copy.lacking(self._held)
        activity, limit, failed = {
            DonorCommand.HOLD: (self._take_hold, limits.prepare_s, DonorEvent.HOLD_FAILED),
            DonorCommand.PREPARE: (self._prepare, limits.prepare_s, DonorEvent.TARGET_LOST),
            DonorCommand.COPY_BLOCKS: (self._copy_blocks, limits.round_s(size, None), DonorEvent.COPY_FAILED),
        }[command]
        self._activities.start(partial(self._supervise, activity, limit, failed))

    async def _supervise(
        self, activity: Callable[[], Awaitable[DonorEvent]], limit: float, failed: DonorEvent
    ) -> tuple[DonorEvent, ActivityFailure | None]:
        """Run an activity, and turn however it ends into an event."""
        try:
            async with asyncio.timeout(limit):
                return await activity(), None
        except TimeoutError:
            return DonorEvent.TIMEOUT, ActivityFailure(Cause.NO_ANSWER, f"no answer within {limit:.3g} s")
        except PeerLost as error:
            return DonorEvent.TARGET_LOST, ActivityFailure.of(error)
        except Refused as error:
            return DonorEvent.TARGET_REFUSED if activity == self._prepare else failed, ActivityFailure.of(error)
        except Exception as error:
            return failed, ActivityFailure.of(error)

    async def _take_hold(self) -> DonorEvent:
        order = self._order
        self._held = await self._holds.hold_prefix(self._hold, order.spec, order.outputs)
        return DonorEvent.HELD if self._held else DonorEvent.HOLD_FAILED

    async def _prepare(self) -> DonorEvent:
        order = self._order
        # The request itself may be at the target already.
        context = Hosted(replace(order.spec, id=RequestId(order.id)), 0, self._hold, order.outputs, decodes=False)
        await self._copy.open(context, context.hop, PathRequest.KV, self._held, at_once=True)
        return DonorEvent.ACCEPTED if self._copy.announced else DonorEvent.ALL_PRESENT

    async def _copy_blocks(self) -> DonorEvent:
        await self._copy.copy(self._held, self._order.outputs)
        await self._copy.finish()
        return DonorEvent.COPIED


_OUTCOMES = {DonorState.DONE: CopyOutcome.DONE, DonorState.ABORTED: CopyOutcome.ABORTED}
_FAILURES = {
    DonorEvent.HOLD_FAILED: ActivityFailure(Cause.BLOCKS_GONE, "the replica has no block of this prefix"),
    DonorEvent.EXPIRED: ActivityFailure(Cause.TRANSFER_TIMEOUT, "the copy was not complete in time"),
    DonorEvent.TARGET_LOST: ActivityFailure(Cause.PEER_LOST, "the target died or is stopping"),
}
"""The reasons of events that are a copy's end by themselves."""
