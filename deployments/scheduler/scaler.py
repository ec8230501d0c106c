"""Opens and closes engine replicas: how many there are to be, and which one goes.

A replica goes in steps that can each fail and then leave things as they were: it promises to take nothing more, is
found empty, and Serve stops that very one. Where Serve does not know how, it lowers the number, Serve stops one of its
choosing, and that one is evacuated; the emptied one takes requests again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Protocol

from deployments.api.protocols import ControlApi, RemoteReplicas
from deployments.scheduler.listing import Listing
from deployments.serve.retirement import generation, retire
from deployments.serve.scaling import Wanted, read_wanted, write_wanted
from migration.protocol.errors import MigrationError, Refused
from migration.protocol.ports import Clock
from policies.causes import Cause
from policies.model import ReplicaId

log = logging.getLogger("ray.serve")

_REMEMBERED_S = 60.0
"""A number that a scheduler stood by within this time is taken over by the next one; an older one is stale."""


class Scaler(Protocol):
    """The number of replicas, and which one goes. `max_replicas` is the most there may be."""

    max_replicas: int

    @property
    def wanted(self) -> int:
        """The number of replicas that there are to be; before Serve has listed its own, the fewest."""
        ...

    @property
    def opening(self) -> int:
        """Replicas that are wanted and that Serve does not list yet."""
        ...

    def stand_by(self) -> None:
        """Repeat the number to Serve: it still holds."""
        ...

    def open(self, count: int) -> None:
        """Want `count` more."""
        ...

    def emptying(self, replicas: Collection[ReplicaId]) -> None:
        """Those replicas are being emptied, as of now or since an earlier call."""
        ...

    def close(self, replicas: Iterable[ReplicaId], fence: int) -> None:
        """Close those replicas if they really are empty."""
        ...

    def close_drained(self, empty: Iterable[ReplicaId], fence: int) -> None:
        """Close, of the `empty` replicas that drain, those that an operator drains and Serve still runs."""
        ...

    def look_for_gone(self, filled: Collection[ReplicaId]) -> None:
        """Note which of the replicas that were being emptied are gone, and forget those that are `filled` again."""
        ...

    async def drain(self, replica: ReplicaId, fence: int) -> None:
        """Have a replica take nothing more; its requests move away, and it closes. Raises MigrationError."""
        ...


class ServeScaler:
    """Implements `Scaler`. `freed` is called with the seconds that it took to empty and stop a replica."""

    def __init__(
        self,
        app: str,
        replicas: RemoteReplicas[ControlApi],
        listing: Listing,
        bounds: tuple[int, int],
        freed: Callable[[float], None],
        clock: Clock,
        wall_clock: Clock,
    ) -> None:
        self._app = app
        self._replicas = replicas
        self._listing = listing
        self._min, self.max_replicas = bounds
        self._freed = freed
        self._clock = clock
        self._wall_clock = wall_clock
        self._wanted: int | None = None
        self._emptying: dict[ReplicaId, float] = {}
        self._closing: dict[ReplicaId, asyncio.Task[None]] = {}

    @property
    def wanted(self) -> int:
        """See `Scaler.wanted`."""
        if self._wanted is None and self._listing.listed:
            self._wanted = self._inherited()
        return self._min if self._wanted is None else self._wanted

    def _inherited(self) -> int:
        found = read_wanted(self._app, generation())
        if found is not None and self._wall_clock() - found.at < _REMEMBERED_S:
            return found.count
        return min(max(self._listing.wanted_by_serve, self._min), self.max_replicas)

    @property
    def opening(self) -> int:
        """See `Scaler.opening`."""
        return max(0, self.wanted - self._listing.wanted_by_serve)

    def stand_by(self) -> None:
        """See `Scaler.stand_by`."""
        write_wanted(self._app, generation(), Wanted(self.wanted, self._wall_clock()))

    def open(self, count: int) -> None:
        """See `Scaler.open`."""
        if count:
            self._wanted = min(self.wanted + count, self.max_replicas)
            log.info("opening %d replicas, %d in all", count, self._wanted)
            self.stand_by()

    def emptying(self, replicas: Collection[ReplicaId]) -> None:
        """See `Scaler.emptying`."""
        for replica in replicas:
            self._emptying.setdefault(replica, self._clock())

    def close(self, replicas: Iterable[ReplicaId], fence: int) -> None:
        """See `Scaler.close`."""
        for replica in replicas:
            if replica not in self._closing:
                self.emptying([replica])
                task = asyncio.create_task(self._close(replica, fence))
                self._closing[replica] = task
                task.add_done_callback(partial(self._closed, replica))

    def _closed(self, replica: ReplicaId, task: "asyncio.Task[None]") -> None:
        del self._closing[replica]
        if not task.cancelled() and (error := task.exception()):
            log.warning("closing replica %s failed: %r", replica, error)

    def close_drained(self, empty: Iterable[ReplicaId], fence: int) -> None:
        """See `Scaler.close_drained`."""
        self.close([replica for replica in empty if self._listing.runs(replica)], fence)

    async def _close(self, replica: ReplicaId, fence: int) -> None:
        try:
            await self._replicas.at(replica).close(fence)
        except MigrationError as error:
            log.info("replica %s is not closed: %s", replica, error)
            return
        self._wanted = max(self._min, self.wanted - 1)
        if await retire(self._app, "Engine", replica, self._wanted):
            log.info("replica %s is empty and closes; %d stay", replica, self._wanted)
            return
        # Serve will stop one of its choosing; that one is evacuated, and this one has the room.
        self.stand_by()
        with contextlib.suppress(MigrationError):
            await self._replicas.at(replica).reopen(fence)

    def look_for_gone(self, filled: Collection[ReplicaId]) -> None:
        """See `Scaler.look_for_gone`."""
        for replica, since in list(self._emptying.items()):
            if not self._listing.knows(replica):
                self._freed(self._clock() - since)
            elif replica not in filled:
                continue
            del self._emptying[replica]

    async def drain(self, replica: ReplicaId, fence: int) -> None:
        """See `Scaler.drain`."""
        if not self._listing.runs(replica):
            raise Refused(f"replica {replica} is not running", Cause.NOT_RUNNING)
        await self._replicas.at(replica).drain(fence)
        self.emptying([replica])
