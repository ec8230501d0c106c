"""The event streams of all replicas, and the readers of all requests: each event goes to its request's reader.

One task per replica receives batches of events. `migration.protocol.reading` decides, its shell `migration.run.reader`
acts, and the output goes to the request's listener.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from collections.abc import Set as AbstractSet
from functools import partial

from app.ingress.streams.placing import NO_CONTENT, Placer, PromptContent
from app.ingress.streams.replica_calls import RECONNECT_S, ROUTER_SKEW_S, EngineCalls, Successor
from app.ingress.telemetry.tracing import NO_TRACER, Tracer
from deployments.api.protocols import NoticeApi, RemoteReplicas, SchedulerClient, ServingApi
from deployments.serve.membership import Membership
from deployments.serve.routing import Unrouted
from migration.concurrency import Tasks, take_failure
from migration.protocol.errors import MigrationError, PeerLost
from migration.protocol.ports import Clock, Listener
from migration.protocol.reading import Reader, SegmentOrigin
from migration.protocol.record import MigrationRecord, Outcome
from migration.protocol.request import Delta, IngressId, Lost, ModelIdentity, Moved, RequestSpec, StreamEvent
from migration.protocol.tables.reader import ReaderState
from migration.run.reader import ReaderRun, ReaderWorld
from policies.causes import Cause
from policies.model import PoolId, ReplicaId, RequestId
from policies.plan import Path, Reason
from policies.prefix.names import Naming

log = logging.getLogger("ray.serve")

_ASKED = 8
"""The most replicas that are asked for their model at once."""


class Streams:
    """All requests of one ingress. `lost` is called for each that was under way and could not be continued."""

    def __init__(
        self,
        ingress: IngressId,
        replicas: RemoteReplicas[ServingApi],
        placer: Placer,
        scheduler: SchedulerClient[NoticeApi],
        patience_s: float,
        max_engine_losses: int,
        lost: Callable[[], None] = lambda: None,
        tracer: Tracer = NO_TRACER,
        clock: Clock = time.monotonic,
    ) -> None:
        self._ingress = ingress
        self._replicas = replicas
        self._placer = placer
        self._tracer = tracer
        self._clock = clock
        self._calls = EngineCalls(replicas, placer, clock)
        journal = RequestJournal(scheduler, placer.pool, tracer, self._calls.successors.keys())
        self._world = ReaderWorld(self._calls, journal, clock, patience_s, max_engine_losses, lost)
        self._live: dict[RequestId, ReaderRun] = {}
        self._readers: dict[ReplicaId, asyncio.Task[None]] = {}
        self._unlisted: set[ReplicaId] = set()
        """The replicas that have been listed, and are not any more."""
        self._stopping: set[ReplicaId] = set()
        """Those of them that have sent something since: Serve stops them. The others have died, as far as is known."""
        self._tasks = Tasks()
        self._serving = asyncio.Event()

    @property
    def count(self) -> int:
        """Requests under way."""
        return len(self._live)

    @property
    def naming(self) -> Naming | str:
        """The engines' naming of KV blocks, or the reason why there is none."""
        return self._placer.naming

    @property
    def serving(self) -> bool:
        """True if a replica is running, or another Mell takes requests over."""
        return self._serving.is_set()

    async def wait_until_serving(self, within_s: float) -> None:
        """Return once `serving` is true, or after `within_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._serving.wait()

    async def tasks(self) -> tuple[str, ...]:
        """The tasks of the served model, of the first replica that answers. Waits for one without limit."""
        while True:
            for replica in self._calls.running:
                with contextlib.suppress(MigrationError):
                    return await self._calls.tasks(replica)
            await asyncio.sleep(RECONNECT_S)

    async def served(self) -> ModelIdentity | None:
        """The served model, of the first of some replicas that answers; None if none does."""
        calls = [asyncio.create_task(self._calls.served(replica)) for replica in self._calls.running[:_ASKED]]
        try:
            for answer in asyncio.as_completed(calls):
                with contextlib.suppress(MigrationError):
                    return await answer
            return None
        finally:
            for call in calls:
                call.add_done_callback(take_failure)
                call.cancel()

    # --- for a hand-over ------------------------------------------------------------------------------

    def by_place(self) -> tuple[list[tuple[RequestSpec, int]], int]:
        """The requests on replicas, with the numbers of their output tokens; the number of those at other Mells."""
        running = [run for run in self._live.values() if not run.reader.over]
        here = [run for run in running if run.reader.host not in self._calls.successors]
        return [(run.spec, run.reader.cursor.next_index) for run in here], len(running) - len(here)

    def succeed(self, successor: Successor | None) -> None:
        """Have another Mell take over new requests, and those that `hand_over` gives it; None: none does any more.

        Those that it has stay there.
        """
        self._calls.successor = successor
        if successor is not None:
            self._calls.successors[successor.id] = successor
        self._set_serving()

    def hand_over(self, at_once: int) -> None:
        """Begin to hand over running requests, so that at most `at_once` are between two hosts.

        Each is given up here, and submitted with the tokens that have arrived; it is between two hosts until the first
        token from there. A request that moves is left alone.
        """
        successor, runs = self._calls.successor, list(self._live.values())
        if successor is None:
            return
        between = sum(run.reader.state is ReaderState.PLACING or successor.awaits(run.spec.id) for run in runs)
        for run in runs:
            reader = run.reader
            if between >= at_once:
                break
            if (
                reader.state is ReaderState.READING
                and reader.host not in self._calls.successors
                and successor.takes(run.spec, reader.cursor.next_index)
            ):
                between += 1
                run.host_lost(reader.host, f"handed over to {successor.id}")

    def lose(self, request: RequestId, host: ReplicaId, hop: int, reason: str) -> None:
        """The connection to another Mell for a request under `hop` has broken."""
        run = self._live.get(request)
        if run is not None and run.reader.cursor.hop == hop:
            run.host_lost(host, reason)

    # --- of one ingress -------------------------------------------------------------------------------

    def watch(self, membership: Membership) -> None:
        """Read every replica that is running. A replica that is stopping is read until it ends its stream."""
        self._calls.follow(membership.running)
        self._unlisted = self._readers.keys() - set(membership.running)
        self._stopping -= set(membership.running)
        self._set_serving()
        for replica in membership.running:
            if replica not in self._readers or self._readers[replica].done():
                self._readers[replica] = reading = asyncio.create_task(self._read(replica))
                reading.add_done_callback(partial(self._forget_reader, replica))

    def _set_serving(self) -> None:
        if self._calls.running or self._calls.successor is not None:
            self._serving.set()
        else:
            self._serving.clear()

    @contextlib.asynccontextmanager
    async def run(
        self,
        spec: RequestSpec,
        reader: Reader,
        listener: Listener,
        content: PromptContent = NO_CONTENT,
        model: str | None = None,
    ) -> AsyncIterator[None]:
        """Have a request served, with its output for `listener`; on leaving, it is ended wherever it is.

        `content` decides with the load on its replica, which has to serve `model` (None: any).

        Raises:
            NotServed: no replica took it.
        """
        run = ReaderRun(spec, reader, listener, self._world, model)
        self._live[spec.id] = run
        self._placer.describe(spec.id, content)
        self._tracer.opened(spec.id)
        try:
            await run.start()
            yield
        finally:
            del self._live[spec.id]
            run.leave()
            self._tracer.closed(spec.id, reader.cursor.finish)
            self._placer.ended(spec.id)
            for successor in self._calls.successors.values():
                successor.forget(spec.id)

    # --- the replicas' streams ------------------------------------------------------------------------

    async def _read(self, replica: ReplicaId) -> None:
        """Read one replica's events for as long as it is listed, over as many streams as that takes.

        When it dies, or cannot be reached for longer than a router lags behind, its requests continue elsewhere.
        """
        broken_since: float | None = None
        while True:
            reason = "the replica ended its stream"
            try:
                connected = False
                async for batch in self._replicas.at(replica).events(self._ingress):
                    broken_since = None
                    if replica in self._unlisted:
                        self._stopping.add(replica)
                    self._calls.reached(replica)
                    if not connected:
                        connected = True
                        self._reconnected(replica)
                    for event in batch:
                        self.take(event, replica)
            except Unrouted as error:
                reason = str(error)
            except PeerLost as error:
                reason = str(error)
                died = error.cause is Cause.PEER_LOST and replica not in self._stopping
                self._give_up(replica, reason, died)
            except Exception as error:
                if broken_since is None:  # one traceback per outage, not one per attempt
                    log.exception("reading replica %s failed", replica)
                reason = repr(error)
            broken_since = broken_since or self._clock()
            listed = replica in self._calls.running
            if not listed or self._clock() - broken_since > ROUTER_SKEW_S:
                self._give_up(replica, reason)
            if not listed:
                break
            await asyncio.sleep(RECONNECT_S)
        self._calls.forget(replica)
        self._unlisted.discard(replica)
        self._stopping.discard(replica)

    def _forget_reader(self, replica: ReplicaId, ended: asyncio.Task[None]) -> None:
        if self._readers.get(replica) is ended:
            del self._readers[replica]

    def _give_up(self, replica: ReplicaId, reason: str, died: bool = False) -> None:
        """A replica died, or cannot be reached: its requests continue elsewhere."""
        self._calls.down.add(replica)
        for run in list(self._live.values()):
            run.host_lost(replica, reason, died)

    def _reconnected(self, replica: ReplicaId) -> None:
        """Events may have been lost between two streams."""
        for run in list(self._live.values()):
            run.reconnected(replica)

    def take(self, word: StreamEvent, replica: ReplicaId) -> None:
        """An event of a replica, or of another Mell."""
        if run := self._live.get(word.request):
            run.take(word, replica)
        elif not isinstance(word, Lost | Moved) and not (isinstance(word, Delta) and word.finish is not None):
            # Its reader left while it was on its way there.
            self._tasks.start(self._release(word.request, replica))

    async def _release(self, request: RequestId, replica: ReplicaId) -> None:
        with contextlib.suppress(MigrationError):
            await self._calls.release(replica, request, None)


class RequestJournal:
    """Implements `Journal`: traces of all that happens to requests, records of those that continue on another host.

    Of these, `successors` are other Mells.
    """

    def __init__(
        self, scheduler: SchedulerClient[NoticeApi], pool: PoolId, tracer: Tracer, successors: AbstractSet[ReplicaId]
    ) -> None:
        self._successors = successors
        self._scheduler = scheduler
        self._pool = pool
        self._tracer = tracer

    def hosted(self, spec: RequestSpec, reader: Reader, origin: SegmentOrigin, index: int) -> None:
        """See `Journal.hosted`."""
        self._tracer.hosted(spec.id, reader, origin, index)

    def took(self, spec: RequestSpec, reader: Reader) -> None:
        """See `Journal.took`."""
        self._tracer.took(spec.id, reader)

    def lost(self, spec: RequestSpec, reader: Reader, reason: str, had: bool) -> None:
        """See `Journal.lost`."""
        self._tracer.lost(spec.id, reason, had)

    def continued(self, spec: RequestSpec, reader: Reader, lost: ReplicaId, reason: str, took_s: float) -> None:
        """See `Journal.continued`. A resubmission is a migration by tokens, and is recorded as one."""
        handed = reader.host in self._successors
        trigger = Reason.HAND_OVER if handed else Reason.LOST
        record = MigrationRecord(
            id=uuid.uuid4().hex[:16],
            request_id=spec.id,
            label=spec.label,
            source=lost,
            target=reader.host,
            path=Path.TOKENS,
            reason=trigger if handed else f"{trigger}: {reason}",
            trigger=trigger,
            cause=None if handed else Cause.PEER_LOST,
            state="resubmitted",
            outcome=Outcome.COMMITTED,
            pause_s=took_s,
            duration_s=took_s,
            started_at=time.time() - took_s,
            pool=self._pool,
        )
        log.log(
            logging.INFO if handed else logging.WARNING,
            "request %s continues on %s: %s",
            spec.id,
            reader.host,
            record.reason,
            extra={"migration": record.to_json()},
        )
        self._scheduler.notify(lambda scheduler: scheduler.record(self._pool, record))
