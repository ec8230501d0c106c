"""Gathers the replicas' reports: one gathering at a time, shared by all callers.

A gathering requests the reports of all replicas at once and ends when all have answered, or after the time-out. A
replica without an answer is silent from then on: gatherings leave it out, and a probe requests its report until it
answers again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

from deployments.api.protocols import ControlApi, RemoteReplicas
from deployments.api.report import Gauges, ReplicaReport
from deployments.scheduler.listing import Listing
from deployments.serve.membership import Membership
from migration.concurrency import take_failure
from migration.protocol.errors import PeerLost, Refused
from migration.protocol.ports import Clock
from migration.protocol.record import MigrationRecord
from policies.decision.reports import Roster
from policies.model import ReplicaId, ReplicaState

log = logging.getLogger("ray.serve")

SPACING_S = 0.2
"""The shortest time between the beginnings of two gatherings, in seconds, unless a caller is urgent."""

AT_ONCE = 16
"""The number of requests for reports between two turns of the event loop."""

SILENCE_S = 5.0
"""The time for which the last report of a silent replica counts, in seconds. Later the scheduler does not use it."""

PROBE_S = 1.0
"""The time between two probes of a silent replica, in seconds."""


class Reporters(Protocol):
    """The replicas of one pool as sources of reports."""

    def serving(self) -> Iterable[ReplicaId]:
        """The replicas that serve, stopping ones included."""
        ...

    async def report(self, replica: ReplicaId, version: int | None) -> ReplicaReport:
        """Request a replica's changes since `version`.

        Raises:
            PeerLost: The replica is dead or does not exist.
            Refused: A newer scheduler has replaced this one.
        """
        ...

    def forget(self, replica: ReplicaId) -> None:
        """Drop the state kept for a replica that is gone."""
        ...


class EngineReporters:
    """Implements `Reporters` for one pool; `fence` is the scheduler's."""

    def __init__(
        self, replicas: RemoteReplicas[ControlApi], membership: Membership, listing: Listing, fence: int
    ) -> None:
        self._replicas = replicas
        self._membership = membership
        self._listing = listing
        self._fence = fence

    def serving(self) -> Iterable[ReplicaId]:
        """See `Reporters.serving`: the replicas that Serve's router lists, and those that Serve is stopping."""
        return (*self._membership.running, *self._listing.stopping())

    async def report(self, replica: ReplicaId, version: int | None) -> ReplicaReport:
        """See `Reporters.report`."""
        return await self._replicas.at(replica).report(self._fence, version)

    def forget(self, replica: ReplicaId) -> None:
        """See `Reporters.forget`."""
        self._replicas.forget(replica)


class Gatherer:
    """Keeps the newest report of every replica: its requests in `roster`, which it alone writes to, and its gauges.

    `on_records` is called with the migrations in each report, and `on_gathered` after each gathering. `leaving` are the
    replicas that Serve is stopping: one of them that has no request falls silent without a warning.
    """

    def __init__(
        self,
        reporters: Reporters,
        roster: Roster,
        clock: Clock,
        timeout_s: float,
        on_records: Callable[[Iterable[MigrationRecord]], None],
        on_gathered: Callable[[], None],
        leaving: Callable[[], Collection[ReplicaId]] = tuple,
    ) -> None:
        self._reporters = reporters
        self._roster = roster
        self._clock = clock
        self._timeout_s = timeout_s
        self._on_records = on_records
        self._on_gathered = on_gathered
        self._leaving = leaving
        self._began = clock() - SPACING_S
        self._gathering: asyncio.Task[None] | None = None
        self._urgent = asyncio.Event()
        self._gauges: dict[ReplicaId, Gauges] = {}
        self._reported_at: dict[ReplicaId, float] = {}
        self._failing: set[ReplicaId] = set()
        self._probes: dict[ReplicaId, asyncio.Task[None]] = {}

    @property
    def gauges(self) -> Mapping[ReplicaId, Gauges]:
        """The gauges of every replica in the roster.

        A silent replica stays in the roster for `SILENCE_S` seconds. A replica that answers with an error is removed at
        once.
        """
        return self._gauges

    async def gather(self, urgent: bool = False) -> None:
        """Wait for the end of the gathering under way or, if there is none, of the next. If `urgent`, begin it at once.

        Raises:
            Refused: A newer scheduler has replaced this one.
        """
        if urgent:
            self._urgent.set()
        if self._gathering is None:
            self._gathering = asyncio.create_task(self._gather())
            self._gathering.add_done_callback(self._over)
            self._gathering.add_done_callback(take_failure)
        await asyncio.shield(self._gathering)

    async def gather_within(self, limit_s: float) -> None:
        """As `gather`, but return after `limit_s` seconds at the latest, with the reports that have arrived by then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self.gather()

    def close(self) -> None:
        """Cancel the gathering under way, and all probes."""
        for task in (self._gathering, *self._probes.values()):
            if task is not None:
                task.cancel()

    def _over(self, _: "asyncio.Task[None]") -> None:
        self._gathering = None
        self._urgent.clear()

    async def _gather(self) -> None:
        await self._turn()
        self._began = self._clock()
        serving = tuple(dict.fromkeys(self._reporters.serving()))
        self._forget_others(serving)
        await self._ask_all([replica for replica in serving if replica not in self._probes])
        limit = self._clock() - SILENCE_S
        for replica in [replica for replica, at in self._reported_at.items() if at < limit]:
            self._forget(replica)
        self._on_gathered()

    async def _ask_all(self, replicas: Sequence[ReplicaId]) -> None:
        """Take the reports of all replicas. Raises Refused."""
        try:
            # The group drops each request at its end. A list of all would take milliseconds at once to drop.
            async with asyncio.TaskGroup() as requests:
                for first in range(0, len(replicas), AT_ONCE):
                    for replica in replicas[first : first + AT_ONCE]:
                        requests.create_task(self._ask(replica))
                    await asyncio.sleep(0)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _turn(self) -> None:
        """Wait until the next gathering may begin."""
        wait_s = self._began + SPACING_S - self._clock()
        if wait_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._urgent.wait()

    def _forget_others(self, serving: Iterable[ReplicaId]) -> None:
        """Forget all replicas but the `serving` ones."""
        kept = set(serving)
        for replica in self._probes.keys() - kept:
            self._probes.pop(replica).cancel()
        self._failing &= kept
        for replica in self._gauges.keys() - kept:
            self._forget(replica)

    def _forget(self, replica: ReplicaId) -> None:
        self._reporters.forget(replica)
        self._roster.forget(replica)
        self._gauges.pop(replica, None)
        self._reported_at.pop(replica, None)

    async def _ask(self, replica: ReplicaId) -> None:
        """Request and take one replica's report. Raises Refused."""
        try:
            report = await self._request(replica, self._roster.version(replica))
            self._take(replica, report)
        except (TimeoutError, PeerLost) as error:
            level = logging.DEBUG if self._has_ended(replica) else logging.WARNING
            log.log(level, "replica %s does not report: %r", replica, error)
            self._begin_probe(replica)
        except Refused:
            raise
        except Exception as error:
            if replica not in self._failing:
                log.warning("replica %s fails to report: %r", replica, error)
            self._failing.add(replica)
            self._forget(replica)

    def _has_ended(self, replica: ReplicaId) -> bool:
        """True if the replica stops, and nothing was left on it."""
        status = self._roster.statuses.get(replica)
        drains = status is not None and status.state is ReplicaState.DRAINING
        return (drains or replica in self._leaving()) and self._roster.is_empty(replica)

    def _begin_probe(self, replica: ReplicaId) -> None:
        probe = self._probes[replica] = asyncio.create_task(self._probe(replica))
        probe.add_done_callback(partial(self._end_probe, replica))

    def _end_probe(self, replica: ReplicaId, probe: "asyncio.Task[None]") -> None:
        """Leave the replica to gatherings again, however its probe has ended."""
        if self._probes.get(replica) is probe:
            del self._probes[replica]
        if not probe.cancelled() and (error := probe.exception()):
            log.info("replica %s answers again, with an error: %r", replica, error)

    async def _probe(self, replica: ReplicaId) -> None:
        """Request a snapshot from a silent replica until it answers. Raises all errors but silence."""
        while True:
            await asyncio.sleep(PROBE_S)
            try:
                report = await self._request(replica, None)
            except (TimeoutError, PeerLost):
                continue
            self._take(replica, report)
            log.info("replica %s reports again", replica)
            return

    async def _request(self, replica: ReplicaId, version: int | None) -> ReplicaReport:
        """Request one replica's report. Raises TimeoutError, PeerLost, and all errors of the replica's `report`."""
        async with asyncio.timeout(self._timeout_s):
            return await self._reporters.report(replica, version)

    def _take(self, replica: ReplicaId, report: ReplicaReport) -> None:
        """Merge a report. Raises `ValueError` for changes since another version than the roster's."""
        self._roster.take(report.report)
        if replica in self._failing:
            self._failing.discard(replica)
            log.info("replica %s reports again", replica)
        self._gauges[replica] = report.gauges
        self._reported_at[replica] = self._clock()
        self._on_records(report.records)
