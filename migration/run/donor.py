"""Runs the donor's side of one copy: executes the session's commands, and feeds events to the session.

As in `source`, one activity runs at a time, and everything that happens arrives through one queue.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from migration.protocol.errors import MigrationError, PeerLost, Refused
from migration.protocol.messages import PathRequest
from migration.protocol.ports import Hosted, Peer, PrefixHolds
from migration.protocol.record import CopyOutcome, CopyRecord
from migration.protocol.request import RequestSpec
from migration.protocol.tables import donor
from migration.protocol.tables.donor import DONOR_ACTIVITIES, DONOR_FINAL, DonorCommand, DonorEvent, DonorState
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


@dataclass(frozen=True, slots=True)
class _CopyFailure:
    """The reason of an activity's end without success."""

    cause: Cause
    text: str


class DonorRun:
    """One copy, from the order to its record. The prefix is held for at most `lease_s` seconds."""

    def __init__(self, order: CopyOrder, peer: Peer, world: MigrationWorld, holds: PrefixHolds, lease_s: float) -> None:
        self._order = order
        self._peer = peer
        self._world = world
        self._holds = holds
        self._limit_s = lease_s if order.within_s is None else min(lease_s, order.within_s)
        self._session = donor.new_session()
        self._events: asyncio.Queue[tuple[int, DonorEvent, _CopyFailure | None]] = asyncio.Queue()
        self._activity: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        """Activities that have been cancelled, and may still use slots."""
        self._activity_no = 0
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
            **account.members,
        )

    def post(self, event: DonorEvent) -> None:
        """Something happened in the world (never the result of an activity)."""
        self._events.put_nowait((0, event, None))

    async def run(self) -> CopyRecord:
        """Copy. Returns the record, also of a failure. Never raises an exception of a peer or transport."""
        expiry = asyncio.get_running_loop().call_later(self._limit_s, self.post, DonorEvent.EXPIRED)
        try:
            await self._feed(DonorEvent.BEGIN)
            while self._session.state not in DONOR_FINAL:
                number, event, failure = await self._events.get()
                if number in (0, self._activity_no):
                    await self._feed(event, failure)
        finally:
            expiry.cancel()
            self._stop_activity()
            self._copy.close()
            self._holds.release_prefix(self._hold)
            if self._ending:
                await asyncio.wait(self._ending)
        return self.record

    async def _feed(self, event: DonorEvent, failure: _CopyFailure | None = None) -> None:
        commands = self._session.feed(event)
        self._stop_activity()
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
        self._activity = asyncio.create_task(self._supervise(self._activity_no, activity, limit, failed))

    def _stop_activity(self) -> None:
        self._activity_no += 1
        if self._activity is not None and not self._activity.done():
            self._activity.cancel()
            self._ending.add(self._activity)
            self._activity.add_done_callback(self._ending.discard)
        self._activity = None

    async def _supervise(
        self, number: int, activity: Callable[[], Awaitable[DonorEvent]], limit: float, failed: DonorEvent
    ) -> None:
        """Run an activity, and turn however it ends into an event."""
        failure: _CopyFailure | None = None
        try:
            async with asyncio.timeout(limit):
                event = await activity()
        except TimeoutError:
            event, failure = DonorEvent.TIMEOUT, _CopyFailure(Cause.NO_ANSWER, f"no answer within {limit:.3g} s")
        except PeerLost as error:
            event, failure = DonorEvent.TARGET_LOST, _CopyFailure(error.cause, str(error))
        except Refused as error:
            event = DonorEvent.TARGET_REFUSED if activity == self._prepare else failed
            failure = _CopyFailure(error.cause, str(error))
        except Exception as error:
            event = failed
            cause = error.cause if isinstance(error, MigrationError) else Cause.UNEXPECTED
            failure = _CopyFailure(cause, str(error) or repr(error))
        self._events.put_nowait((number, event, failure))

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
    DonorEvent.HOLD_FAILED: _CopyFailure(Cause.BLOCKS_GONE, "the replica has no block of this prefix"),
    DonorEvent.EXPIRED: _CopyFailure(Cause.TRANSFER_TIMEOUT, "the copy was not complete in time"),
    DonorEvent.TARGET_LOST: _CopyFailure(Cause.PEER_LOST, "the target died or is stopping"),
}
"""The reasons of events that are a copy's end by themselves."""
