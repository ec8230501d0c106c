"""The scheduler's loop: look, decide, act. Everything that is decided, `policies.decision` decides."""

import asyncio
import logging
from collections.abc import Collection

from deployments.api.calls import PlaceCall
from deployments.api.report import ReplicaReport
from deployments.config import SchedulerConfig
from deployments.metrics.telemetry import Telemetry
from deployments.scheduler.dispatch import Dispatch
from deployments.scheduler.gatherer import Gatherer
from deployments.scheduler.listing import Listing
from deployments.scheduler.recording import Epoch, Ordered, PlacedCall, Recorder
from deployments.scheduler.rehearsal import Rehearsal
from deployments.scheduler.scaler import Scaler
from migration.protocol.errors import Refused
from migration.protocol.ports import Clock
from policies.decision.deciding import Plans, SchedulerMemory, decide, order_by_hand, place
from policies.decision.limits import Mode
from policies.decision.observation import ENGINE, Observation, Pool, PoolReport
from policies.decision.placement import Decision
from policies.decision.reports import Report, Roster, status_of
from policies.model import ReplicaId, ReplicaLoad, ReplicaState
from policies.plan import Move, Plan, Reason

log = logging.getLogger("ray.serve")

EARLIEST_S = 0.1
"""The shortest time between two epochs, when one is asked for early."""


class Epochs:
    """Runs epochs, and passes arrivals and operators' moves on to the decision in between."""

    def __init__(
        self,
        config: SchedulerConfig,
        fence: int,
        listing: Listing,
        gatherer: Gatherer,
        memory: SchedulerMemory,
        dispatch: Dispatch,
        scaler: Scaler,
        telemetry: Telemetry,
        clock: Clock,
        recorder: Recorder | None = None,
        rehearsal: Rehearsal | None = None,
    ) -> None:
        self._config = config
        self._fence = fence
        self._listing = listing
        self._gatherer = gatherer
        self._memory = memory
        self._dispatch = dispatch
        self._scaler = scaler
        self._telemetry = telemetry
        self._clock = clock
        self._recorder = recorder
        self._rehearsal = rehearsal
        self._roster = Roster()
        self._profiled: set[ReplicaId] = set()
        self._entries: list[PlacedCall | Ordered] = []
        self._soon = asyncio.Event()
        self.last = clock()
        self.known = asyncio.Event()

    def hurry(self) -> None:
        """Have the next epoch as soon as may be."""
        self._soon.set()

    async def run(self) -> None:
        """Epoch after epoch, until a newer scheduler is at work."""
        while True:
            self._soon.clear()
            try:
                await self.epoch()
            except Refused as error:
                log.warning("this scheduler has been replaced: %s", error)
                return
            except Exception:
                log.exception("epoch failed; the next one starts afresh")
            await asyncio.sleep(EARLIEST_S)
            try:
                async with asyncio.timeout(max(0.0, self._config.epoch_s - EARLIEST_S)):
                    await self._soon.wait()
            except TimeoutError:
                continue

    async def epoch(self) -> None:
        """One epoch. Raises Refused when a newer scheduler is at work."""
        await self._listing.refresh()
        await self._gatherer.gather(urgent=True)
        now = self._clock()
        passed_s, self.last = now - self.last, now
        reports, others = self.reports(), self._listing.others(self._gatherer.received)
        self._telemetry.epoch([*(report.load for report in reports), *others], passed_s, self._scaler.wanted)
        seen = self._observe(reports, others)
        resting = set(self._memory.pool().breaker.resting(now))
        plans = decide(self._memory, Observation(now, (seen,)))
        for pair in set(self._memory.pool().breaker.resting(now)) - resting:
            log.warning("moves from %s to %s keep failing: none for a while", *pair)
        if self._gatherer.received:
            self.known.set()
        for plan in plans[ENGINE]:
            self._act(plan)
        self._scale(reports, plans[ENGINE])
        self._record(Observation(now, (seen,)), plans)
        if self._rehearsal is not None:
            self._rehearsal.epoch(seen, now)

    def reports(self) -> list[ReplicaReport]:
        """The newest report of every replica, in the state in which Serve lists it, ordered by id."""
        received = self._gatherer.received
        return [self._listing.as_listed(received[replica]) for replica in sorted(received)]

    def place(self, call: PlaceCall, gone: Collection[ReplicaId]) -> Decision:
        """Where a request goes, other than to replicas that are gone; it counts there from now on."""
        entry = PlacedCall(self._clock(), call.arrival, (*call.exclude, *gone), call.label)
        self._note(entry)
        return place(self._memory.pool(), entry.arrival, entry.at, entry.exclude, entry.label)

    def order(self, move: Move) -> Move:
        """An operator's move with its path and predictions; it counts as under way from now on."""
        entry = Ordered(self._clock(), move)
        self._note(entry)
        return order_by_hand(self._memory.pool(), move, entry.at)

    # --- inside ---------------------------------------------------------------------------------------

    def _observe(self, reports: Collection[ReplicaReport], others: Collection[ReplicaLoad]) -> PoolReport:
        roster = self._roster
        roster.keep([*(report.load.id for report in reports), *(load.id for load in others)])
        for load in others:
            roster.take_status(status_of(load))
        for report in reports:
            roster.take(Report(0, status_of(report.load), None, report.load.requests))
        profiles = {r.load.id: r.profile for r in reports if r.profile is not None and r.load.id not in self._profiled}
        self._profiled = {report.load.id for report in reports if report.profile is not None}
        return roster.observe(self._pool(reports), self._dispatch.take_reports(), profiles, self._scaler.opening)

    def _pool(self, reports: Collection[ReplicaReport]) -> Pool:
        model = next((report.load.model for report in reports if report.load.model), "")
        fewest, most = self._config.bounds[0], self._scaler.max_replicas
        return Pool(ENGINE, model, min_replicas=fewest, max_replicas=most, wanted=self._scaler.wanted)

    def _act(self, plan: Plan) -> None:
        self._dispatch.begin(plan.moves)
        if self._config.mode is Mode.ACT:
            self._scaler.open(len(plan.opened))
            self._scaler.close(plan.closed, self._fence)
            self._scaler.stand_by()

    def _scale(self, reports: Collection[ReplicaReport], plans: Collection[Plan]) -> None:
        """Have the scaler see which replicas are being emptied, and which are gone."""
        self._scaler.close_drained(reports, self._fence)
        moves = [move for plan in plans for move in plan.moves]
        emptying = {move.source for move in moves if move.reason in (Reason.DRAIN, Reason.EVACUATE)}
        self._scaler.emptying(emptying)
        leaving = emptying | {underway.move.source for underway in self._memory.pool().under_way.values()}
        loads = [report.load for report in reports if report.load.state is ReplicaState.RUNNING]
        self._scaler.look_for_gone({load.id for load in loads if load.requests and load.id not in leaving})

    def _note(self, entry: PlacedCall | Ordered) -> None:
        if self._recorder is not None:
            self._entries.append(entry)

    def _record(self, seen: Observation, plans: Plans) -> None:
        if self._recorder is not None:
            entries, self._entries = tuple(self._entries), []
            self._recorder.record(Epoch(entries, seen, dict(plans)))
