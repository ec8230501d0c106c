"""The number of engine replicas, and the choice of the replica that Serve stops.

To close a replica, the scaler has it refuse new requests, which fails unless the replica is empty, and then has
Serve's controller stop exactly that replica. If the installed version of Serve offers no such call, the scaler lowers
the wanted number of replicas instead: Serve stops a replica of its own choice, whose requests are evacuated, and the
emptied replica accepts requests again.

The wanted number falls by one with each replica that stops, and for no other reason: while Serve's controller is away,
and until Serve has as few replicas as are wanted, nothing is closed. It stays if a sleeping replica has ended: another
one takes its place.

Where replicas sleep, an opening wakes one before another one is started, and a closed one falls asleep before one stops
(`policies.memory.ladder`). The wanted number is of replicas awake; Serve's is of all (`sleepers`).
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum, auto
from functools import partial
from typing import Protocol

from deployments.api.calls import MoveAnswer, MoveRejected
from deployments.api.protocols import ControlApi, RemoteReplicas
from deployments.scheduler.listing import Listing
from deployments.scheduler.sleepers import Sleeping
from deployments.serve.bounds import Bounds, read_bounds, write_bounds
from deployments.serve.retirement import generation, retire
from deployments.serve.scaling import Wanted, read_wanted, write_wanted
from migration.concurrency import Tasks
from migration.protocol.errors import MigrationError, Refused
from migration.protocol.ports import Clock
from policies.causes import Cause
from policies.memory.ladder import Wait, Wake
from policies.model import PoolId, ReplicaId

log = logging.getLogger("ray.serve")

_SLEEPLESS = "memory.budget_mib is not set: no replica sleeps"

_INHERITED_S = 60.0
"""The greatest age, in seconds, at which a scheduler takes the wanted number over from its predecessor."""


class Scaler(Protocol):
    """Opens and closes replicas, within the bounds. `fence` is the scheduler's in all methods."""

    min_replicas: int
    max_replicas: int

    scales: bool
    """False if something else decides on the number of replicas: the wanted number is then Serve's own."""

    sleeping: Sleeping | None
    """The pool's sleeping replicas; None: none sleeps."""

    def set_bounds(self, bounds: Bounds) -> None:
        """Set the bounds for this scheduler and its successors. The wanted number follows at once."""
        ...

    @property
    def wanted(self) -> int:
        """The wanted number of replicas; the minimum before Serve's first list."""
        ...

    @property
    def opening(self) -> int:
        """The number of wanted replicas that Serve does not list yet."""
        ...

    def publish(self) -> None:
        """Write the wanted number for Serve's autoscaler, which ignores a number without a recent time stamp.

        While the controller is about to stop a replica, the number is its own to write.
        """
        ...

    def open(self, count: int) -> None:
        """Raise the wanted number by `count`, up to the maximum."""
        ...

    def mark_emptying(self, replicas: Collection[ReplicaId]) -> None:
        """Start the clock of the replicas that are being emptied, unless an earlier call did."""
        ...

    def close(self, replicas: Iterable[ReplicaId], fence: int) -> None:
        """Begin to close replicas. A replica that turns out not to be empty stays."""
        ...

    def close_drained(self, empty: Iterable[ReplicaId], fence: int) -> None:
        """Begin to close `empty` replicas that an operator has drained: those that Serve itself is not stopping."""
        ...

    def put_to_sleep(self, idle: Sequence[ReplicaId], fence: int) -> None:
        """Begin to have idle replicas sleep, those of `spare`, since others need their memory.

        A replica that turns out not to be empty stays, and so does one of which no more may sleep.
        """
        ...

    @property
    def closing(self) -> Collection[ReplicaId]:
        """The replicas that are being closed, to stop or to sleep."""
        ...

    def spare(self, idle: Sequence[ReplicaId]) -> Sequence[ReplicaId]:
        """Those of these replicas that can all fall asleep beyond the minimum; none while nothing can be closed."""
        ...

    def measure_freed(self, filled: Collection[ReplicaId]) -> None:
        """Stop the clock of emptied replicas that Serve no longer lists, and drop that of `filled` replicas."""
        ...

    async def drain(self, replica: ReplicaId, fence: int) -> None:
        """Have a replica refuse new requests, so that its requests move away and it closes. Raises MigrationError."""
        ...

    def follow_sleep(self) -> None:
        """Follow the newest reports of sleeping replicas: Serve's number stays, whatever falls asleep or wakes.

        Replicas whose wakes have failed are not wanted any longer: an opening may try again. A sleeper that has ended
        is replaced by a replica that is awake.
        """
        ...

    async def sleep(self, replica: ReplicaId) -> MoveAnswer:
        """Close a replica by an operator's order: its requests move away, and it falls asleep."""
        ...

    async def wake(self, replica: ReplicaId) -> MoveAnswer:
        """Open a replica by an operator's order: it wakes."""
        ...


class _Ending(Enum):
    """The end of an emptied replica: asleep if it may, else stopped; stopped; or asleep if it may, else as before."""

    CLOSE = auto()
    STOP = auto()
    SLEEP = auto()


class ServeScaler:
    """Implements `Scaler` for one pool of an application.

    `bounds` are those of the configuration, which an operator may have changed. `freed` receives the seconds from the
    beginning of a replica's emptying until it has stopped.
    """

    def __init__(
        self,
        app: str,
        pool: PoolId,
        replicas: RemoteReplicas[ControlApi],
        listing: Listing,
        bounds: Bounds,
        freed: Callable[[float], None],
        clock: Clock,
        wall_clock: Clock,
    ) -> None:
        self._app = app
        self._pool = pool
        self._replicas = replicas
        self._listing = listing
        self._configured = bounds
        self.min_replicas, self.max_replicas = read_bounds(app, pool, generation(), bounds)
        self._freed = freed
        self._clock = clock
        self._wall_clock = wall_clock
        self._scales = True
        self.sleeping: Sleeping | None = None
        self._wanted: int | None = None
        self._stopping = asyncio.Lock()
        self._emptying: dict[ReplicaId, float] = {}
        self._closing: dict[ReplicaId, asyncio.Task[None]] = {}
        self._reopened: set[ReplicaId] = set()
        """The replicas that were closed, and take requests again or sleep; their newest reports may be from between."""
        self._waking = Tasks()
        self._stopped: set[ReplicaId] = set()
        """The replicas that the controller has stopped since Serve's list was read."""

    @property
    def scales(self) -> bool:
        """See `Scaler.scales`."""
        return self._scales

    @scales.setter
    def scales(self, scales: bool) -> None:
        self._scales, self._wanted = scales, None

    @property
    def wanted(self) -> int:
        """See `Scaler.wanted`."""
        if not self._scales:
            return self._of_serve() if self._listing.listed else self.min_replicas
        if self._wanted is None and self._listing.listed:
            if self.sleeping is not None:
                # The number is without these sleepers.
                self.sleeping.follow()
            self._wanted = self._inherited()
        return self.min_replicas if self._wanted is None else self._wanted

    def _inherited(self) -> int:
        found = read_wanted(self._app, self._pool, generation())
        if found is not None and self._wall_clock() - found.at < _INHERITED_S:
            return self._bounded(found.count - len(self._asleep()))
        return self._of_serve()

    def _of_serve(self) -> int:
        return self._bounded(self._kept_by_serve())

    def _kept_by_serve(self) -> int:
        """Serve's number of replicas awake: those of its list that have not been stopped since."""
        return self._listing.wanted_by_serve - sum(map(self._listing.runs, self._stopped)) - len(self._asleep())

    def _asleep(self) -> frozenset[ReplicaId]:
        """The replicas that are asleep, and that Serve keeps."""
        found = frozenset[ReplicaId]() if self.sleeping is None else self.sleeping.asleep
        return frozenset(replica for replica in found if replica not in self._stopped and self._listing.runs(replica))

    def _bounded(self, count: int) -> int:
        return min(max(count, self.min_replicas), self.max_replicas)

    @property
    def opening(self) -> int:
        """See `Scaler.opening`."""
        waking = 0 if self.sleeping is None else self.sleeping.waking
        return max(0, self.wanted - self._kept_by_serve()) + waking

    def set_bounds(self, bounds: Bounds) -> None:
        """See `Scaler.set_bounds`. Above the maximum, Serve stops replicas, whose requests are evacuated."""
        write_bounds(self._app, self._pool, generation(), self._configured, bounds)
        before, (self.min_replicas, self.max_replicas) = self.wanted, bounds
        self._wanted = min(max(before, self.min_replicas), self.max_replicas)
        log.info("at least %d and at most %d replicas, %d for now", *bounds, self._wanted)
        self.publish()

    def publish(self) -> None:
        """See `Scaler.publish`."""
        if self._scales and not self._stopping.locked():
            count = self.wanted + len(self._asleep())
            write_wanted(self._app, self._pool, generation(), Wanted(count, self._wall_clock()))

    def open(self, count: int) -> None:
        """See `Scaler.open`. Where a sleeper has to wait until another one has woken, nothing opens."""
        starts = 0
        for _ in range(min(count, self.max_replicas - self.wanted)):
            rung = None if self.sleeping is None else self.sleeping.climb()
            if isinstance(rung, Wait):
                break
            self._wanted = self.wanted + 1
            if isinstance(rung, Wake):
                assert self.sleeping is not None
                self.sleeping.expect_wake(rung.replica)
                self._waking.start(self._wake(rung.replica))
            else:
                starts += 1
        if starts:
            log.info("opening %d replicas, %d in all", starts, self.wanted)
            self.publish()

    async def _wake(self, replica: ReplicaId) -> None:
        """Wake a replica that is wanted already."""
        assert self.sleeping is not None
        answer = await self.sleeping.wake(replica)
        if isinstance(answer, MoveRejected):
            log.warning("replica %s is not woken: %s", replica, answer.message)
            self._wanted = self._one_less()

    def follow_sleep(self) -> None:
        """See `Scaler.follow_sleep`."""
        if self.sleeping is not None and self._wanted is not None and (more := self.sleeping.follow()):
            self._wanted = self._bounded(self._wanted + more)

    async def sleep(self, replica: ReplicaId) -> MoveAnswer:
        """See `Scaler.sleep`."""
        if self.sleeping is None:
            return MoveRejected(422, _SLEEPLESS)
        if replica in self.sleeping.asleep:
            return MoveRejected(409, f"replica {replica} is asleep")
        if self.wanted <= self.min_replicas:
            return MoveRejected(422, f"min_replicas is {self.min_replicas}: lower it first (mell bounds)")
        return await self._put_to_sleep(replica, self.sleeping)

    async def _put_to_sleep(self, replica: ReplicaId, sleeping: Sleeping) -> MoveAnswer:
        """Have a replica sleep. The numbers of those wanted awake and asleep change together: Serve's stays."""
        before, self._wanted = self.wanted, self._one_less()
        lowered = before - self._wanted
        answer = await sleeping.sleep(replica)
        if isinstance(answer, MoveRejected):
            self._wanted = self._bounded(self.wanted + lowered)
        self.publish()
        return answer

    async def wake(self, replica: ReplicaId) -> MoveAnswer:
        """See `Scaler.wake`."""
        if self.sleeping is None:
            return MoveRejected(422, _SLEEPLESS)
        if replica not in self.sleeping.asleep:
            return MoveRejected(409, f"replica {replica} is awake, or wakes already")
        if self.wanted >= self.max_replicas:
            return MoveRejected(422, f"max_replicas is {self.max_replicas}: raise it first (mell bounds)")
        self._wanted = self.wanted + 1
        answer = await self.sleeping.wake(replica)
        if isinstance(answer, MoveRejected):
            self._wanted = self._one_less()
        self.publish()
        return answer

    def mark_emptying(self, replicas: Collection[ReplicaId]) -> None:
        """See `Scaler.mark_emptying`."""
        for replica in replicas:
            self._emptying.setdefault(replica, self._clock())

    def close(self, replicas: Iterable[ReplicaId], fence: int) -> None:
        """See `Scaler.close`."""
        self._begin_closing(replicas, fence, _Ending.CLOSE)

    def close_drained(self, empty: Iterable[ReplicaId], fence: int) -> None:
        """See `Scaler.close_drained`."""
        drained = set(empty)
        self._reopened &= drained
        drained -= self._reopened
        self._begin_closing(filter(self._listing.runs, sorted(drained)), fence, _Ending.STOP)

    def put_to_sleep(self, idle: Sequence[ReplicaId], fence: int) -> None:
        """See `Scaler.put_to_sleep`."""
        self._begin_closing(self.spare(idle), fence, _Ending.SLEEP)

    def spare(self, idle: Sequence[ReplicaId]) -> Sequence[ReplicaId]:
        """See `Scaler.spare`."""
        found: list[ReplicaId] = []
        if self.sleeping is None or not self._closes:
            return found
        most = self.wanted - len(self._closing) - self.min_replicas
        for replica in idle:
            if len(found) < most and replica not in self._closing and self.sleeping.keeps(replica, found):
                found.append(replica)
        return found

    @property
    def _closes(self) -> bool:
        """True if replicas can be closed now."""
        return self._listing.is_current and self.wanted >= self._kept_by_serve()

    @property
    def closing(self) -> Collection[ReplicaId]:
        """See `Scaler.closing`."""
        return self._closing.keys()

    def _begin_closing(self, replicas: Iterable[ReplicaId], fence: int, ending: _Ending) -> None:
        if not self._closes:
            return
        for replica in replicas:
            if replica not in self._closing and replica not in self._stopped:
                self.mark_emptying([replica])
                task = asyncio.create_task(self._close(replica, fence, ending))
                self._closing[replica] = task
                task.add_done_callback(partial(self._closed, replica))

    def _closed(self, replica: ReplicaId, task: "asyncio.Task[None]") -> None:
        del self._closing[replica]
        if not task.cancelled() and (error := task.exception()):
            log.warning("closing replica %s failed: %r", replica, error)

    async def _close(self, replica: ReplicaId, fence: int, ending: _Ending) -> None:
        try:
            await self._replicas.at(replica).close(fence)
        except MigrationError as error:
            log.info("replica %s is not closed: %s", replica, error)
            return
        if self.sleeping is not None and ending is not _Ending.STOP and self.sleeping.keeps(replica, ()):
            answer = await self._put_to_sleep(replica, self.sleeping)
            # It takes nothing until it wakes.
            await self._reopen(replica, fence)
            if isinstance(answer, MoveRejected):
                log.warning("replica %s does not sleep: %s", replica, answer.message)
            return
        if ending is _Ending.SLEEP:
            await self._reopen(replica, fence)
            return
        try:
            async with self._stopping:
                asleep = len(self._asleep() - {replica})
                is_replaced = self.sleeping is not None and self.sleeping.has_ended(replica)
                left = self.wanted if is_replaced else self._one_less()
                stops = await retire(self._app, self._pool, replica, left + asleep)
        except Exception as error:
            log.warning("replica %s is not closed: %r", replica, error)
            if ending is not _Ending.STOP:
                await self._reopen(replica, fence)
            return
        self._wanted = self.wanted if is_replaced else self._one_less()
        self.publish()
        if stops:
            self._stopped.add(replica)
            log.info("replica %s is empty and closes; %d are wanted", replica, self._wanted)
        else:
            # Serve will stop a replica of its own choice. This replica has room for the evacuated requests.
            await self._reopen(replica, fence)

    def _one_less(self) -> int:
        return max(self.min_replicas, self.wanted - 1)

    async def _reopen(self, replica: ReplicaId, fence: int) -> None:
        self._reopened.add(replica)
        try:
            await self._replicas.at(replica).reopen(fence)
        except MigrationError:
            self._reopened.discard(replica)

    def measure_freed(self, filled: Collection[ReplicaId]) -> None:
        """See `Scaler.measure_freed`."""
        self._stopped = set(filter(self._listing.runs, self._stopped))
        for replica, since in list(self._emptying.items()):
            if not self._listing.lists(replica):
                self._freed(self._clock() - since)
            elif replica not in filled:
                continue
            del self._emptying[replica]

    async def drain(self, replica: ReplicaId, fence: int) -> None:
        """See `Scaler.drain`."""
        if not self._listing.runs(replica):
            raise Refused(f"replica {replica} is not running", Cause.NOT_RUNNING)
        await self._replicas.at(replica).drain(fence)
        self.mark_emptying([replica])
