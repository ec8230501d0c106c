"""Runs the source's side of one migration: executes the session's commands, and feeds events to the session.

The shell decides nothing that the table or `rounds` decides. One activity runs at a time; everything that
happens arrives through one queue, so there is one order of events.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Self

from migration.protocol.continuing import apart
from migration.protocol.errors import BlocksGone, PeerLost, Refused, RequestGone, TransferFailed
from migration.protocol.messages import ONLY, Adopt, PathRequest
from migration.protocol.ports import Hosted, Peer
from migration.protocol.record import MigrationRecord, Outcome
from migration.protocol.request import Doubt, Moved, Moving, RequestSpec
from migration.protocol.rounds import final_range, full_blocks, tail_blocks, worth_another_round
from migration.protocol.tables import source
from migration.protocol.tables.source import ACTIVITIES, FINAL, SourceCommand, SourceEvent, SourceState
from migration.run.activities import Activities, ActivityFailure
from migration.run.copying import CopySession
from migration.run.times import Times
from migration.run.world import MigrationWorld
from policies.causes import Cause
from policies.model import Blocks, Bytes, ReplicaId, RequestId, Tokens
from policies.plan import Move, Path, Reason

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Order:
    """One request, its path, and the reason of its migration.

    The predictions are seconds from now to the first new token at the target, by either path; None without one.
    """

    id: str
    request: RequestId
    path: PathRequest
    reason: Reason
    predicted_kv_s: float | None = None
    predicted_tokens_s: float | None = None

    @classmethod
    def of(cls, move: Move) -> Self:
        """A new order of a move, with an id of its own."""
        path = ONLY[move.path] if move.path is not None else PathRequest.AUTO
        return cls(uuid.uuid4().hex[:16], move.request, path, move.reason, move.kv_s, move.tokens_s)


class SourceRun:
    """One migration, from the order to its record."""

    def __init__(self, order: Order, peer: Peer, world: MigrationWorld) -> None:
        self._order = order
        self._peer = peer
        self._world = world
        self._session = source.new_session()
        self._activities: Activities[SourceEvent] = Activities()
        self._path = order.path.first
        self._detours: list[str] = []
        self._error: str | None = None
        self._cause: Cause | None = None
        self._times = Times(world.clock, world.wall_clock)
        self._tokens: Tokens | None = None
        snapshot = world.host.snapshot(order.request)
        self._spec = snapshot.spec
        self.hop = snapshot.hop
        self._copy = CopySession(order.id, snapshot.key, peer, world)
        self._bytes_per_s = self._expected_rate()
        self.next_hop = world.host.next_hop(order.request)

    @property
    def request(self) -> RequestId:
        """The request that is moved."""
        return self._order.request

    @property
    def target(self) -> ReplicaId:
        """The replica it moves to."""
        return self._peer.id

    @property
    def record(self) -> MigrationRecord:
        """The migration as of now."""
        state = self._session.state
        return MigrationRecord(
            id=self._order.id,
            request_id=self._order.request,
            label=self._spec.label,
            source=self._world.replica,
            target=self._peer.id,
            path=self._path,
            reason="; ".join([self._order.reason, *self._detours]),
            state=state.value,
            trigger=self._order.reason,
            outcome=_OUTCOMES.get(state),
            error=self._error,
            cause=self._cause,
            rounds=self._copy.progress.rounds,
            pause_s=self._times.pause_s,
            duration_s=self._times.duration_s,
            started_at=self._times.started_at,
            tokens=self._tokens,
            waited_s=self._times.waited_s,
            resume_s=self._times.resume_s,
            predicted_kv_s=self._order.predicted_kv_s,
            predicted_tokens_s=self._order.predicted_tokens_s,
            pool=self._world.pool,
            **asdict(self._copy.account),
        )

    @property
    def exchanging(self) -> bool:
        """True if blocks may be on their way, or the request is being handed over."""
        return self._session.state in _EXCHANGING

    def post(self, event: SourceEvent) -> None:
        """Something happened in the world (never the result of an activity)."""
        self._activities.post(event)

    def target_lost(self) -> None:
        """The target is gone."""
        self.post(SourceEvent.TARGET_LOST)

    async def run(self) -> MigrationRecord:
        """Migrate. Returns the record, also of a failure. Never raises an exception of a peer or transport."""
        try:
            await self._feed(SourceEvent.BEGIN)
            while self._session.state not in FINAL:
                event, failure = await self._activities.next_event()
                if failure is not None:
                    self._explain(failure)
                await self._feed(event)
        finally:
            self._activities.stop()
            self._copy.close()
        return self.record

    async def resumed(self) -> MigrationRecord:
        """The record of a migration that was committed, once the target has reported its first token.

        The request is the target's by now: only the record waits for this. Without the target's report the record
        stays as it is.
        """
        try:
            async with asyncio.timeout(self._world.limits.resume_s):
                since_adopted = await self._peer.resumed(self._order.id)
        except Exception as error:
            log.info("migration %s: the target did not report its first token: %r", self._order.id, error)
            return self.record
        if since_adopted is not None:
            self._times.resumed(since_adopted)
        return self.record

    async def _feed(self, event: SourceEvent) -> None:
        before = self._session.state
        commands = self._session.feed(event)
        if self._session.state is not before:
            self._activities.stop()
        if self._session.state in FINAL:
            self._times.end()
        if event is SourceEvent.FOLLOWED:
            # The target had not answered, but its reader has.
            self._cause = self._error = None
        if event in _CAUSES and self._session.state in _EXPLAINED and not self._error:
            self._cause, self._error = _CAUSES[event]
        for command in commands:
            try:
                await self._execute(command)
            except RequestGone:
                # It ended between two events: the same as if that event had come first.
                if self._session.state not in FINAL:
                    await self._feed(SourceEvent.FINISHED)
                return

    async def _execute(self, command: SourceCommand) -> None:
        if command in ACTIVITIES:
            self._start(command)
            return
        host, order = self._world.host, self._order
        match command:
            case SourceCommand.ANNOUNCE_MOVING:
                host.announce(Moving(order.request, self.hop, self.next_hop, self._peer.id))
            case SourceCommand.MUTE:
                self._tokens = Tokens(host.mute(order.request, self.hop).context)
                self._times.freeze()
            case SourceCommand.HALT:
                host.halt(order.request, self.hop)
            case SourceCommand.UNMUTE:
                host.unmute(order.request, self.hop)
                self._times.release()
            case SourceCommand.ANNOUNCE_MOVED:
                index = len(host.snapshot(order.request, self.hop).outputs)
                host.announce(Moved(order.request, self.hop, self.next_hop, index, self._peer.id))
            case SourceCommand.DROP_REQUEST:
                self._times.release()
                host.drop(order.request, self.hop)
            case SourceCommand.CANCEL_TARGET:
                await self._copy.free_target()
            case SourceCommand.REFUSE_SECOND:
                log.info("request %s is already moving to %s", order.request, self._peer.id)

    # --- activities -----------------------------------------------------------------------------------

    def _start(self, command: SourceCommand) -> None:
        limits = self._world.limits
        size = self._uncopied() if command in _COPIES else Bytes(0)
        waiting_s = limits.prefilling_s(self._uncomputed()) if command in _WAITS else 0.0
        activity, limit = {
            SourceCommand.PREPARE: (self._prepare, limits.preparing_s(self._spec.traits)),
            SourceCommand.AWAIT_BLOCKS: (self._await_blocks, waiting_s),
            SourceCommand.COPY_FILLED: (self._copy_filled, limits.round_s(size, self._bytes_per_s)),
            SourceCommand.AWAIT_TOKEN: (self._await_token, waiting_s),
            SourceCommand.COPY_ROUND: (self._copy_round, limits.round_s(size, self._bytes_per_s)),
            SourceCommand.COPY_FINAL: (self._copy_final, limits.last_s(size, self._bytes_per_s)),
            SourceCommand.ADOPT_KV: (self._adopt_kv, limits.adopt_s),
            SourceCommand.ADOPT_TOKENS: (self._adopt_tokens, limits.adopt_s),
            SourceCommand.ASK_READER: (self._ask_reader, limits.doubt_s),
        }[command]
        self._activities.start(partial(self._supervise, activity, limit))

    def _expected_rate(self) -> float | None:
        """Bytes per second of this move, as the scheduler predicts it, all other moves on its link included."""
        predicted_s = self._order.predicted_kv_s
        return self._uncopied() / predicted_s if predicted_s else None

    def _uncopied(self) -> Bytes:
        """Bytes of the full blocks that are not copied yet. Raises RequestGone."""
        return self._copy.lacking(self._full(self._hosted()))

    def _uncomputed(self) -> int:
        """The known tokens that the prefill had not computed when the source last waited. Raises RequestGone."""
        return self._copy.unprefilled(self._hosted().context)

    async def _supervise(
        self, activity: Callable[[], Awaitable[SourceEvent]], limit: float
    ) -> tuple[SourceEvent, ActivityFailure | None]:
        """Run an activity, and turn however it ends into an event."""
        waiting = activity in (self._await_blocks, self._await_token)
        copying = activity in (self._await_blocks, self._copy_filled, self._copy_round, self._copy_final)
        try:
            return await self._limited(activity, limit), None
        except TimeoutError:
            cause = Cause.TRANSFER_TIMEOUT if copying else Cause.NO_ANSWER
            return SourceEvent.TIMEOUT, ActivityFailure(cause, f"no answer within {limit:.3g} s", copying)
        except _Unmoved as error:
            text = f"the prefill did not go on within {limit:.3g} s"
            event = SourceEvent.TIMEOUT if error.begun else SourceEvent.UNBEGUN
            return event, ActivityFailure(Cause.PREFILL_TIMEOUT, text, copying and error.begun)
        except RequestGone:
            return SourceEvent.FINISHED, None
        except BlocksGone as error:
            # Of this source's blocks, if it was copying; else a peer's own affair.
            event = SourceEvent.PREEMPTED if copying else SourceEvent.TARGET_LOST
            # A prefill that begins anew changes nothing: its blocks will be copied.
            return event, None if activity == self._copy_filled else ActivityFailure.of(error, copying)
        except PeerLost as error:
            return SourceEvent.TARGET_LOST, ActivityFailure.of(error)
        except Refused as error:
            return self._refusal(activity), ActivityFailure.of(error, copying and not waiting)
        except Exception as error:
            return SourceEvent.COPY_FAILED if copying else SourceEvent.TARGET_LOST, ActivityFailure.of(error, copying)

    async def _limited(self, activity: Callable[[], Awaitable[SourceEvent]], limit: float) -> SourceEvent:
        try:
            async with asyncio.timeout(limit):
                return await activity()
        except TimeoutError:
            if activity not in (self._await_blocks, self._await_token):
                raise
            raise _Unmoved(begun=activity == self._await_token or await self._has_begun()) from None

    def _refusal(self, activity: Callable[[], Awaitable[SourceEvent]]) -> SourceEvent:
        """The event of an activity that the target itself refused."""
        if activity == self._prepare:
            return SourceEvent.TARGET_REFUSED
        if activity in (self._await_blocks, self._await_token):
            return SourceEvent.TARGET_LOST
        adopting = activity in (self._adopt_kv, self._adopt_tokens)
        return SourceEvent.ADOPT_REFUSED if adopting else SourceEvent.COPY_FAILED

    def _explain(self, failure: ActivityFailure) -> None:
        """A failed copy is the reason of another path; anything else is the migration's error."""
        self._cause = failure.cause
        if failure.copying:
            self._detours.append(f"kv failed: {failure.text}")
        else:
            self._error = failure.text

    async def _prepare(self) -> SourceEvent:
        snapshot, path = self._hosted(), self._order.path
        at_once = path is not PathRequest.TOKENS and snapshot.decodes and self._worth_another_round(snapshot)
        there = replace(snapshot, spec=self._spec_there(snapshot.spec))
        prepared = await self._copy.open(there, self.next_hop, path, self._full(snapshot), at_once)
        if prepared.path is Path.TOKENS:
            if path is PathRequest.AUTO:
                self._cause = Cause.FINGERPRINT
                self._detours.append(f"target cannot take KV blocks: {prepared.reason}")
            self._path = Path.TOKENS
            return SourceEvent.ACCEPTED_TOKENS
        return SourceEvent.ACCEPTED_KV if snapshot.decodes else await self._begin_following()

    def _spec_there(self, spec: RequestSpec) -> RequestSpec:
        """The request as the target gets it: with blocks of its own, if it is to leave none for others there."""
        hides = self._world.hides_handed_over and self._order.reason is Reason.DISAGGREGATE
        return apart(spec, self._order.id) if hides else spec

    async def _begin_following(self) -> SourceEvent:
        """The beginning of a move by KV of a request that had no token when the target was asked.

        A request without blocks goes by tokens at once: its prefill has not begun here, and may as well begin there,
        unless that is what the move is to avoid.
        """
        computed: Tokens | None = None
        with contextlib.suppress(TransferFailed):
            computed = await self._world.blocks.computed(self._hosted().key)
        if self._hosted().decodes:
            return SourceEvent.ACCEPTED_KV
        if computed is None and self._order.reason is not Reason.DISAGGREGATE:
            self._explain(ActivityFailure(Cause.BLOCKS_GONE, "the request holds no blocks yet", copying=True))
            return SourceEvent.ACCEPTED_TOKENS
        return SourceEvent.ACCEPTED_EARLY

    async def _await_blocks(self) -> SourceEvent:
        return await self._first(self._first_token(), self._filled())

    async def _has_begun(self) -> bool:
        """True if the prefill has computed anything here."""
        with contextlib.suppress(TransferFailed, RequestGone):
            return bool(await self._world.blocks.computed(self._hosted().key))
        return False

    async def _await_token(self) -> SourceEvent:
        await self._copy.renew()
        return await self._first(self._first_token())

    async def _first(self, *works: Coroutine[None, None, SourceEvent]) -> SourceEvent:
        """The event of whichever of `works` ends first. The target keeps what it holds meanwhile."""
        tasks = [asyncio.create_task(work) for work in (*works, self._copy.keep_target())]
        try:
            with self._times.waiting():
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(task for task in tasks if task in done).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _first_token(self) -> SourceEvent:
        while not self._hosted().decodes:
            await self._world.host.next_output(self._order.request, self.hop)
        return SourceEvent.FIRST_TOKEN

    async def _filled(self) -> SourceEvent:
        await self._copy.wait_filled(self._hosted().context)
        return SourceEvent.FILLED

    async def _copy_filled(self) -> SourceEvent:
        hosted = self._hosted()
        await self._copy.copy_filled(hosted.context, hosted.outputs)
        return SourceEvent.COPIED_MORE

    async def _copy_round(self) -> SourceEvent:
        hosted = self._hosted()
        if self._copy.announced or self._worth_another_round(hosted):
            await self._copy.copy(self._full(hosted), hosted.outputs)
        if self._worth_another_round(self._hosted()):
            return SourceEvent.COPIED_MORE
        await self._finish_copying()
        return SourceEvent.COPIED_ENOUGH

    async def _finish_copying(self) -> None:
        """Send what the rounds have left, unless it has to be copied inside the pause; then wait for a token.

        So the reader has that token at the beginning of the pause and not in the middle. If nothing remains to be
        copied then, the engine stops behind the token by itself: it would compute the next one for nobody, beside the
        target's first step.
        """
        world, marks, context = self._world, self._world.blocks.fingerprint, self._hosted().context
        copied, most = self._copy.progress, self._copy.chunk
        if not tail_blocks(copied, context, marks.block_size, world.limits.copy, most):
            await self._copy.finish()
            await self._token(world.host.next_output)
            return
        halting: list[asyncio.Task[None]] = []
        try:
            await self._copy.finish(
                Tokens(context - 1),
                lambda: halting.append(asyncio.create_task(self._token(world.host.halt_behind_token))),
            )
            await asyncio.gather(*halting)
        finally:
            for task in halting:
                task.cancel()

    async def _token(self, behind: Callable[[RequestId, int], Awaitable[None]]) -> None:
        """Wait for a token, at most for as long as a token should take."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._world.limits.token_s):
                await behind(self._order.request, self.hop)

    def _worth_another_round(self, hosted: Hosted) -> bool:
        """True if another round of pre-copying pays."""
        return worth_another_round(self._copy.progress, self._full(hosted), self._world.limits.copy)

    async def _copy_final(self) -> SourceEvent:
        hosted = self._hosted()
        blocks = final_range(self._copy.progress, self._full(hosted), self._world.limits.copy)
        if blocks is not None:
            await self._copy.copy(blocks[1], hosted.outputs)
        if self._copy.held is None:
            # Copying from a prefill has not waited for the target's confirmation of the last round.
            await self._copy.finish()
        return SourceEvent.FINAL_COPIED

    def _hosted(self) -> Hosted:
        return self._world.host.snapshot(self._order.request, self.hop)

    def _full(self, hosted: Hosted) -> Blocks:
        return full_blocks(hosted.context, self._world.blocks.fingerprint.block_size)

    async def _adopt_kv(self) -> SourceEvent:
        self._path = Path.KV
        return await self._adopt()

    async def _adopt_tokens(self) -> SourceEvent:
        self._path = Path.TOKENS
        return await self._adopt()

    async def _adopt(self) -> SourceEvent:
        outputs = self._hosted().outputs
        confirmed = self._copy.confirmed
        self._times.hand_over()
        tail = self._copy.held if self._path is Path.KV else None
        await self._peer.adopt(Adopt(self._order.id, confirmed, outputs[confirmed:], tail))
        return SourceEvent.ADOPTED

    async def _ask_reader(self) -> SourceEvent:
        """Ask, and wait for the answer, which is an event of the world. A lost question is asked again."""
        self._world.host.announce(Doubt(self._order.request, self.hop, self.next_hop))
        await asyncio.Event().wait()
        raise AssertionError("the wait ends only by being cancelled")


class _Unmoved(Exception):
    """A prefill did not go on in time; it has `begun`, or waits for its turn."""

    def __init__(self, begun: bool) -> None:
        super().__init__()
        self.begun = begun


_COPIES = frozenset({SourceCommand.COPY_FILLED, SourceCommand.COPY_ROUND, SourceCommand.COPY_FINAL})
_WAITS = frozenset({SourceCommand.AWAIT_BLOCKS, SourceCommand.AWAIT_TOKEN})
_OUTCOMES = {
    SourceState.COMMITTED: Outcome.COMMITTED,
    SourceState.ABORTED: Outcome.ABORTED,
    SourceState.REFUSED: Outcome.REFUSED,
}
_EXCHANGING = (SourceState.COPY, SourceState.FREEZE, SourceState.HANDOVER)
_EXPLAINED = (SourceState.ABORTED, SourceState.DOUBT)
_CAUSES = {
    SourceEvent.FINISHED: (Cause.REQUEST_ENDED, "the request ended by itself"),
    SourceEvent.CLIENT_GONE: (Cause.CLIENT_GONE, "the client left"),
    SourceEvent.TARGET_LOST: (Cause.PEER_LOST, "the target died or is stopping"),
    SourceEvent.TIMEOUT: (Cause.NO_ANSWER, "the target did not answer in time"),
}
