"""The migrations of one replica, as their source and as their target."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from deployments.replica.host import RequestHost
from deployments.replica.outgoing import Outgoing
from migration.concurrency import Tasks
from migration.protocol.errors import MigrationError, Refused
from migration.protocol.messages import Adopt, Chunk, CopyRound, Prepare, Prepared
from migration.protocol.ports import Peer
from migration.protocol.record import MigrationRecord, Outcome, Recent
from migration.protocol.request import RequestSpec
from migration.protocol.tables.source import SourceEvent
from migration.protocol.tables.target import TargetEvent, TargetState
from migration.run.source import Order, SourceRun
from migration.run.target import TargetRun
from migration.run.times import QUIET_S
from migration.run.world import MigrationWorld
from policies.causes import Cause
from policies.model import ReplicaId, RequestId
from policies.plan import Move

log = logging.getLogger("ray.serve")

_REMEMBERED = 256
_EXCHANGING = (TargetState.LOADING, TargetState.ADOPTING)


class PastTarget(NamedTuple):
    """A migration to here that has ended, of `request` under `hop`. `owned`: this replica became its owner."""

    request: RequestId
    hop: int
    owned: bool


class Moves:
    """Starts and tracks migrations, and passes the events of requests on to their migrations."""

    def __init__(
        self,
        world: MigrationWorld,
        host: RequestHost,
        peer: Callable[[ReplicaId], Peer],
        lease_s: float,
        on_record: Callable[[MigrationRecord], None] = lambda record: None,
    ) -> None:
        self._world = world
        self._host = host
        self._peer = peer
        self._lease_s = lease_s
        self._on_record = on_record
        self.outgoing: Outgoing[RequestId, SourceRun] = Outgoing()
        """The migrations from here, by request."""
        self._tasks = Tasks()
        self._coming: dict[str, TargetRun] = {}
        self._past: Recent[str, PastTarget] = Recent(_REMEMBERED)
        self._done: deque[MigrationRecord] = deque(maxlen=_REMEMBERED)
        host.on_end = self._request_ended

    # --- as the source --------------------------------------------------------------------------------

    def start(self, order: Order, to: ReplicaId) -> MigrationRecord:
        """Begin to move a request. Returns the migration's record so far.

        Raises:
            RequestGone: the request is not here.
            Refused: the request moves already or must stay, or the target is this replica.
        """
        if to == self._world.replica:
            raise Refused("the request is on that replica already", Cause.ALREADY_THERE)
        if reason := self._host.why_immovable(order.request):
            raise Refused(reason, Cause.IMMOVABLE)
        if running := self.outgoing.get(order.request):
            running.post(SourceEvent.ASKED_AGAIN)
            raise Refused(f"the request is already moving to {running.target}", Cause.ALREADY_MOVING)
        run = SourceRun(order, self._peer(to), self._world)
        self.outgoing[order.request] = run
        self._tasks.start(self._lead(run))
        return run.record

    async def _lead(self, run: SourceRun) -> None:
        try:
            record = await run.run()
        finally:
            del self.outgoing[run.request]
        self._done.appendleft(record)
        if record.outcome is Outcome.COMMITTED:
            # If it stayed too briefly for its reader to attach, its own migration here still waits for that.
            self._end_coming(run.request, run.next_hop)
            await asyncio.sleep(QUIET_S)
        _log_record(record)
        self._on_record(record)
        if record.outcome is Outcome.COMMITTED:
            resumed = await run.resumed()
            if record in self._done:
                self._done[self._done.index(record)] = resumed

    def records(self) -> list[MigrationRecord]:
        """Migrations with this replica as the source, newest first. `resume_s` comes some time after the outcome."""
        return [run.record for run in reversed(self.outgoing.values())] + list(self._done)

    # --- as the target --------------------------------------------------------------------------------

    def prepare(self, message: Prepare) -> Prepared:
        """Reserve room for a migration. Raises Refused; a migration that raises anything is not under way here."""
        if message.migration in self._coming:
            raise Refused("this migration is under way here already", Cause.ALREADY_MOVING)
        if message.migration in self._past:
            raise Refused("this migration has ended here", Cause.MIGRATION_GONE)
        run = TargetRun(
            message,
            self._host,
            self._world.blocks,
            self._world.transport,
            self._world.slots,
            self._lease_s,
            on_end=lambda migration: self._target_ended(migration, run),
        )
        prepared = run.prepare()
        self._coming[message.migration] = run
        return prepared

    async def load(self, message: CopyRound) -> None:
        """Load a round of blocks. Raises Refused or TransferFailed."""
        run = self._target_run(message.migration)
        await run.load(message)
        if run.copied is not None:
            self._host.contexts.add(run.copied, run.outputs)

    async def receive(self, message: Chunk) -> None:
        """Receive blocks. Raises Refused or TransferFailed."""
        await self._target_run(message.migration).receive(message)

    def renew(self, migration: str) -> None:
        """Keep what is held for a migration whose source waits. Raises Refused."""
        self._target_run(migration).renew()

    async def adopt(self, message: Adopt) -> None:
        """Take the request over, on probation. A repeated message changes nothing. Raises Refused."""
        past = self._past.get(message.migration)
        if past is None or not past.owned:
            await self._target_run(message.migration).adopt(message)

    def cancel(self, migration: str) -> None:
        """End a migration whose source keeps the request. An unknown migration is no error."""
        if run := self._coming.get(migration):
            run.post(TargetEvent.CANCEL)

    async def resumed(self, migration: str) -> float | None:
        """Wait for the migrated request's first token. Returns the seconds since its adoption; None without a token."""
        run = self._coming.get(migration) or self._past.get(migration)
        return await self._host.first_token(run.request, run.hop) if run is not None else None

    def attach(self, request: RequestId, hop: int, index: int) -> bool:
        """Stream the request to its reader under `hop` from output token `index` on; False if it does not run here.

        From now on the replica owns the request.
        """
        for run in self._coming_with(request):
            if run.hop == hop and not run.attach():
                return False
        return self._host.resume(request, hop, index)

    def keep(self, request: RequestId, hop: int, next_hop: int) -> None:
        """Go on with the request under `hop`, since its reader will not follow it to `next_hop`."""
        run = self.outgoing.get(request)
        if run is not None and (run.hop, run.next_hop) == (hop, next_hop):
            run.post(SourceEvent.KEPT)

    def release(self, request: RequestId, hop: int | None) -> None:
        """End the runs of a request under hops below `hop`, which its reader reads now, even during a migration.

        Without a hop, since the reader has left, end all runs.
        """
        self._end_coming(request, hop)
        leaving = self.outgoing.get(request)
        if leaving is not None and leaving.next_hop == hop:
            leaving.post(SourceEvent.FOLLOWED)
        else:
            self._host.client_gone(request, hop)

    def _end_coming(self, request: RequestId, hop: int | None) -> None:
        """End the migrations of a request to here under hops below `hop`, or (None) under any."""
        for coming in self._coming_with(request):
            if hop is None or coming.hop < hop:
                coming.post(TargetEvent.CLIENT_GONE)

    def _coming_with(self, request: RequestId) -> list[TargetRun]:
        """The migrations of a request to here. The caller may end them."""
        return [run for run in self._coming.values() if run.request == request]

    def _target_ended(self, migration: str, run: TargetRun) -> None:
        """Forget a migration, except for what answers repeated messages. A copy brings no request to run twice."""
        self._coming.pop(migration, None)
        if run.copied is None:
            self._past[migration] = PastTarget(run.request, run.hop, run.state is TargetState.OWNED)

    def _target_run(self, migration: str) -> TargetRun:
        run = self._coming.get(migration)
        if run is None:
            raise Refused("the target no longer has this migration (its lease may have run out)", Cause.MIGRATION_GONE)
        return run

    # --- events ---------------------------------------------------------------------------------------

    def submit(
        self, spec: RequestSpec, hop: int, outputs: tuple[int, ...], then: Move | None = None, fetching: bool = False
    ) -> None:
        """Run a request from its reader, see `RequestHost.submit`, and begin `then`, its move. Raises Refused.

        A move that cannot begin costs the request nothing: the scheduler sees that it has none.
        """
        self._host.submit(spec, hop, outputs, fetching=fetching)
        if then is not None:
            try:
                self.start(Order.of(then), then.target)
            except MigrationError as error:
                log.info("request %s does not move on to %s: %s", spec.id, then.target, error)

    def stop(self) -> None:
        """Begin to stop: take no new requests, and end incoming migrations; outgoing ones go on."""
        self._host.stopping = True
        self._leave()

    def sleep(self) -> None:
        """Begin to fall asleep, as to stop; a wake is no more than an end of `RequestHost.asleep`."""
        self._host.asleep = True
        self._leave()

    def _leave(self) -> None:
        for leaving in self.outgoing.values():
            leaving.post(SourceEvent.SOURCE_STOPPING)
        for coming in list(self._coming.values()):
            coming.post(TargetEvent.STOPPING)

    @property
    def exchanging(self) -> bool:
        """True if blocks of a migration are on their way, or a request is being handed over."""
        return any(run.exchanging for run in self.outgoing.values()) or any(
            run.state in _EXCHANGING for run in self._coming.values()
        )

    @property
    def pending(self) -> int:
        """The number of migrations that occupy memory here: outgoing ones, and incoming ones under a lease."""
        return len(self.outgoing) + len(self._coming)

    def _request_ended(self, request: RequestId, by_client: bool) -> None:
        if run := self.outgoing.get(request):
            run.post(SourceEvent.CLIENT_GONE if by_client else SourceEvent.FINISHED)
        for coming in self._coming_with(request):
            if coming.state is TargetState.PROVISIONAL:
                coming.post(TargetEvent.CLIENT_GONE if by_client else TargetEvent.FINISHED)


def _log_record(record: MigrationRecord) -> None:
    """Log one structured line per migration. The Ray dashboard shows it on the replica's page."""
    level = logging.INFO if record.outcome is Outcome.COMMITTED else logging.WARNING
    pause = "" if record.pause_s is None else f", pause {record.pause_s * 1e3:.1f} ms"
    log.log(
        level,
        f"migration {record.id} {record.outcome}: {record.request_id} {record.source} -> {record.target} "
        f"by {record.path}, {record.blocks} blocks in {record.rounds} rounds{pause}"
        + (f": {record.error}" if record.error else ""),
        extra={"migration": record.to_json()},
    )
