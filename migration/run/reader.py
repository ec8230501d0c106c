"""Carries out the reader's side of one request: the actions of its table, and their results.

    ReaderRun.start     place and submit the request
    ReaderRun.take      a replica's event                       -> Listener.deliver, Listener.lost
    ReaderRun.leave     the output is no longer needed

The purpose of the output is behind `Listener`, the replicas and calls to them are behind `Hosts`.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial

from migration.concurrency import Tasks
from migration.protocol.errors import MigrationError, PeerLost, Refused, Stopping
from migration.protocol.ports import Clock, Hosts, Journal, Listener, Loss, LossKind
from migration.protocol.reading import (
    Action,
    AttachHost,
    FindRequest,
    Followed,
    GiveUp,
    HostGone,
    KeepRequest,
    Output,
    PlaceRequest,
    Reader,
    ReleaseRequest,
    SegmentOrigin,
)
from migration.protocol.request import RequestSpec, StreamEvent
from migration.protocol.tables.reader import ReaderState
from migration.run.times import QUIET_S
from policies.causes import Cause
from policies.model import RETRY_S, ReplicaId

log = logging.getLogger("ray.serve")

_WAKE_LOOK_S = 0.2
"""The longest pause while a replica wakes, in seconds: that may take less than the usual pauses."""
_PAUSE_S = 0.1
"""The first time between two tries to find a replica, unless the list of replicas changes meanwhile."""

_VERDICTS = {
    Cause.TOO_LONG: LossKind.INVALID,
    Cause.ADAPTER: LossKind.UNAVAILABLE,
    Cause.IMMOVABLE: LossKind.UNAVAILABLE,
}
"""Causes of refusals that lie in the request; all others lie in the replica."""

Report = Callable[[], Iterable[Action]]
"""Feeds the result of an activity to the reader."""


@dataclass(frozen=True, slots=True)
class ReaderWorld:
    """The parts of its process that a reader uses.

    A request waits at most `patience_s` seconds for a replica that takes it. It ends once `max_engine_losses` engines
    have died with it on board. `on_lost` is called for each request that a replica had taken and that could not be
    continued.
    """

    hosts: Hosts
    journal: Journal
    clock: Clock
    patience_s: float
    max_engine_losses: int
    on_lost: Callable[[], None] = lambda: None
    tasks: Tasks = field(default_factory=Tasks)
    """Calls without a caller that waits; they may outlive their request."""


class NotServed(Exception):
    """The request cannot be served, or not any more."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss.text)
        self.loss = loss


class ReaderRun:
    """One request. All methods but `start` return at once."""

    def __init__(
        self, spec: RequestSpec, reader: Reader, listener: Listener, world: ReaderWorld, model: str | None = None
    ) -> None:
        """`model`: the fingerprint of the only model that may serve the request; None: the first one that does."""
        self.spec = spec
        self.reader = reader
        self._listener = listener
        self._world = world
        self._activity: asyncio.Task[None] | None = None
        self._releasing: set[ReleaseRequest] = set()
        self._taken = asyncio.Event()
        self._model = self._required = model
        self._avoided: set[ReplicaId] = set()
        """The replicas that have refused, or were lost, since the last pause."""
        self._verdicts: dict[ReplicaId, Loss] = {}
        """The replicas that refused for a reason that lies in the request."""
        self._why = ""
        """The last refusal."""
        self._patience = _Patience(world.clock, world.patience_s)
        self._gone: tuple[HostGone, float] | None = None
        """The host that was given up, and when, until there is another one."""
        self._loss: Loss | None = None
        self._followed = False
        """The request has just been handed over, and its tokens come without an attach."""

    # --- for the listener's side ----------------------------------------------------------------------

    async def start(self) -> None:
        """Place and submit the request.

        Raises:
            NotServed: no replica took it.
        """
        self._carry_out(self.reader.begin())
        await self._taken.wait()
        if self._loss is not None:
            raise NotServed(self._loss)

    def leave(self) -> None:
        """Nobody wants the output any more: the request ends wherever it is."""
        self._carry_out(self.reader.leave())

    # --- for the task that reads the replicas' streams ------------------------------------------------

    def take(self, word: StreamEvent, replica: ReplicaId) -> None:
        """An event of a replica."""
        if actions := self.reader.take(word, replica):
            self._carry_out(actions)
        self._world.journal.took(self.spec, self.reader)

    def host_lost(self, replica: ReplicaId, reason: str, died: bool = False) -> None:
        """A replica died (`died`) or cannot be reached. Nothing happens unless it has the request."""
        if replica == self.reader.host and self.reader.state is not ReaderState.PLACING:
            self._carry_out(self.reader.host_lost(reason, died))

    def reconnected(self, replica: ReplicaId) -> None:
        """Events of a replica may have been lost between two streams."""
        if replica == self.reader.host:
            self._carry_out(self.reader.out_of_step())

    # --- actions --------------------------------------------------------------------------------------

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if type(action) is Output:
                self._listener.deliver(action)
            else:
                self._act(action)
        state = self.reader.state
        if state is ReaderState.PLACING or state is ReaderState.FINDING:
            return
        self._taken.set()
        self._stop_activity()
        if self._gone is not None and state is not ReaderState.FAILED and state is not ReaderState.LEFT:
            (gone, since), self._gone = self._gone, None
            took_s = self._world.clock() - since
            self._world.journal.continued(self.spec, self.reader, gone.host, gone.reason, took_s)

    def _act(self, action: Action) -> None:
        spec, world = self.spec, self._world
        match action:
            case PlaceRequest():
                self._start(self._place(action), self.reader.not_placed)
            case FindRequest():
                self._start(self._find(action), self.reader.not_found)
            case AttachHost():
                world.tasks.start(self._attach(action, QUIET_S if self._followed else 0.0))
                self._followed = False
            case KeepRequest():
                world.tasks.start(self._keep(action))
            case ReleaseRequest():
                world.tasks.start(self._release(action))
            case Followed(_, index):
                world.journal.hosted(spec, self.reader, SegmentOrigin.MIGRATION, index)
                self._followed = True
            case HostGone(_, reason):
                self._gone = self._gone or (action, world.clock())
                world.journal.lost(spec, self.reader, reason, had=True)
            case GiveUp(invalid):
                self._give_up(invalid)

    def _give_up(self, invalid: str | None) -> None:
        if invalid is not None:
            self._loss = Loss(LossKind.INVALID, invalid)
        assert self._loss is not None
        if self._taken.is_set():
            if invalid is None:
                self._world.on_lost()
            self._listener.lost(self._loss)

    # --- activities -----------------------------------------------------------------------------------

    def _start(self, activity: Coroutine[object, object, Report], failed: Report) -> None:
        self._stop_activity()
        self._activity = self._world.tasks.start(self._supervise(activity, failed))

    def _stop_activity(self) -> None:
        activity, self._activity = self._activity, None
        if activity is not None and activity is not asyncio.current_task():
            activity.cancel()

    async def _supervise(self, activity: Coroutine[object, object, Report], failed: Report) -> None:
        """Run an activity, and feed its result unless the state that began it has been left meanwhile."""
        loss: Loss | None = None
        try:
            report = await activity
        except NotServed as error:
            report, loss = failed, error.loss
        except Exception as error:
            log.exception("request %s could not be continued", self.spec.id)
            text = f"the request could not be continued: {type(error).__name__}"
            report, loss = failed, Loss(LossKind.INTERNAL, text)
        if self._activity is asyncio.current_task():
            self._loss = loss
            self._carry_out(report())

    async def _place(self, request: PlaceRequest) -> Report:
        """Submit the request to one replica after the other until one takes it, or does not answer.

        Refusals end the request only if every replica that is awake refuses for a reason that lies in the request. All
        others are reasons of the replica, and pass: after a pause it is asked again, up to the end of the request's
        patience.
        """
        world, reader = self._world, self.reader
        if request.anew:
            self._avoided, self._verdicts, self._why = set(), {}, ""
            if self._patience.begin(reader.cursor.next_index):
                await self._pause()
        if request.lost is not None:
            self._avoided.add(request.lost)
        if reader.engine_losses >= world.max_engine_losses:
            raise NotServed(Loss(LossKind.SUSPECT, _suspect(reader.engine_losses)))
        while True:
            exclude = self._avoided | self._verdicts.keys()
            replica = await world.hosts.place(self.spec, reader.cursor.next_index, exclude)
            if replica is None:
                await self._wait_for_another()
                continue
            reader.submitting(replica)
            tokens = tuple(reader.cursor.tokens)
            world.journal.hosted(self.spec, reader, reader.origin, len(tokens))
            try:
                self._model = await world.hosts.submit(
                    replica, self.spec, reader.cursor.hop, tokens, self._model if tokens else self._required
                )
            except Refused as error:
                self._take_refusal(replica, error)
            except MigrationError as error:
                log.info("placing %s: %s", self.spec.id, error)
                return self._unanswered(str(error))
            else:
                if not world.hosts.reachable(replica):
                    return self._unanswered("the replica died")
                self._patience.end()
                return reader.submitted

    def _take_refusal(self, replica: ReplicaId, error: Refused) -> None:
        """The replica has not taken the request."""
        self._why = str(error)
        self._avoided.add(replica)
        if error.cause in _VERDICTS and not isinstance(error, Stopping):
            self._verdicts[replica] = Loss(_VERDICTS[error.cause], f"no replica takes the request: {error}")
        self._world.journal.lost(self.spec, self.reader, str(error), had=False)

    def _unanswered(self, why: str) -> Report:
        """The replica may have taken the request."""
        self._why = why
        self._world.journal.lost(self.spec, self.reader, why, had=False)
        return partial(self.reader.host_lost, why)

    async def _wait_for_another(self) -> None:
        """Wait before all replicas are asked again. Raises NotServed if none will take the request, or did in time.

        A replica that sleeps is of the same model as those awake, and would refuse for the same reason of the request.
        """
        awake = set(self._world.hosts.awake)
        if self._verdicts and self._verdicts.keys() >= awake:
            raise NotServed(next(iter(self._verdicts.values())))
        await self._pause()
        self._avoided.clear()

    async def _pause(self) -> None:
        """Wait before the next attempt. Raises NotServed if there is no time for one."""
        pause_s, prospects = self._patience.pause_s(), self._world.hosts.prospects
        if prospects.wake_s is not None:
            pause_s = min(pause_s, _WAKE_LOOK_S)
        if pause_s <= 0:
            why = prospects.obstacle or self._why
            text = "no replica is available" + (f": {why}" if why else "")
            raise NotServed(Loss(LossKind.UNAVAILABLE, text, prospects.wake_s))
        if await self._world.hosts.changed(pause_s):
            self._patience.shorten()

    async def _find(self, request: FindRequest) -> Report:
        """Ask the target. No answer counts as a refusal: a later effect of the question is outdated."""
        try:
            runs = await self._world.hosts.attach(request.target, self.spec.id, request.hop, request.index)
        except PeerLost:
            runs = False
        return self.reader.found if runs else self.reader.not_found

    # --- calls in the background ----------------------------------------------------------------------

    async def _attach(self, request: AttachHost, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if self.reader.over or self.reader.cursor.hop != request.hop:
            return
        reason = "the replica does not have the request"
        try:
            runs = await self._world.hosts.attach(request.host, self.spec.id, request.hop, request.index)
        except Exception as error:
            runs, reason = False, str(error)
        if not runs and self.reader.cursor.hop == request.hop:
            self.host_lost(request.host, reason)

    async def _keep(self, request: KeepRequest) -> None:
        """A source that does not get the answer asks again."""
        try:
            await self._world.hosts.keep(request.source, self.spec.id, request.hop, request.next_hop)
        except Exception as error:
            log.info("request %s: %s did not get the answer to keep it: %s", self.spec.id, request.source, error)

    async def _release(self, request: ReleaseRequest) -> None:
        """A replica that misses it and still runs the request sends events, and gets it again."""
        if request in self._releasing:
            return
        self._releasing.add(request)
        try:
            await self._world.hosts.release(request.replica, self.spec.id, request.hop)
        except Exception as error:
            log.info("request %s: %s did not get the order to end it: %s", self.spec.id, request.replica, error)
        finally:
            self._releasing.discard(request)


class _Patience:
    """The time in which a request without progress has to be taken by a replica, and the pauses between attempts.

    Progress are tokens. A request that replicas take and lose again, without a token, has no more time than one that
    they refuse.
    """

    def __init__(self, clock: Clock, patience_s: float) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._left_s = 0.0
        self._until = 0.0
        self._pause_s = _PAUSE_S
        self._index = -1
        self._fruitless = 0

    def begin(self, index: int) -> bool:
        """Look for a replica, for a request with that many tokens. True if a pause comes first.

        None does for the first loss behind a token: its replica may have had the request for long.
        """
        if index > self._index:
            self._index, self._left_s, self._fruitless = index, self._patience_s, 0
            self.shorten()
        self._until = self._clock() + self._left_s
        self._fruitless += 1
        return self._fruitless > 2

    def end(self) -> None:
        """A replica has taken the request."""
        self._left_s = self._until - self._clock()

    def pause_s(self) -> float:
        """The pause before the next attempt; not above 0 once there is no time left."""
        pause_s = min(self._pause_s, self._until - self._clock())
        self._pause_s = min(2 * self._pause_s, RETRY_S)
        return pause_s

    def shorten(self) -> None:
        """Begin with short pauses again."""
        self._pause_s = _PAUSE_S


def _suspect(losses: int) -> str:
    engines = "the engine that ran it has died" if losses == 1 else f"{losses} engines have died that ran it"
    return f"the request is not given to another engine, since {engines}"
