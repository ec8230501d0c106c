"""The scheduler's loop: look, decide, act. Everything that it decides is `policies.decision.planner`'s."""

import asyncio
import logging
from collections.abc import Callable, Mapping

from deployments.config import SchedulerConfig
from deployments.dispatch import Dispatch, Route
from deployments.gatherer import Gatherer
from deployments.listing import Listing
from deployments.recording import Epoch, Recorder
from deployments.rehearsal import Rehearsal
from deployments.report import ReplicaReport
from deployments.scaler import Scaler
from deployments.telemetry import Telemetry
from migration.errors import Refused
from migration.paths import URGENCY
from migration.ports import Clock
from policies.decision.ledger import Ledger
from policies.decision.observation import Observation
from policies.decision.planner import Decided, Mode, Planner
from policies.model import ClusterState, ReplicaState, RequestId
from policies.plan import Move, Reason

log = logging.getLogger("ray.serve")

EARLIEST_S = 0.1
"""The shortest time between two epochs, when one is asked for early."""

Routing = Callable[[list[Move]], tuple[list[Move], Mapping[RequestId, Route]]]
"""Gives moves their paths; those that have to wait for the next epoch are not returned."""


class Epochs:
    """Runs epochs."""

    def __init__(
        self,
        config: SchedulerConfig,
        fence: int,
        listing: Listing,
        gatherer: Gatherer,
        ledger: Ledger,
        planner: Planner,
        dispatch: Dispatch,
        scaler: Scaler,
        telemetry: Telemetry,
        route: Routing,
        clock: Clock,
        recorder: Recorder | None = None,
        rehearsal: Rehearsal | None = None,
    ) -> None:
        self._config = config
        self._fence = fence
        self._listing = listing
        self._gatherer = gatherer
        self._ledger = ledger
        self._planner = planner
        self._dispatch = dispatch
        self._scaler = scaler
        self._telemetry = telemetry
        self._route = route
        self._clock = clock
        self._recorder = recorder
        self._rehearsal = rehearsal
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
        passed_s = self._clock() - self.last
        self.last = self._clock()
        seen = self._observe()
        self._telemetry.epoch(seen.state.replicas, passed_s, self._scaler.wanted)
        self._planner.observe(seen)
        decided = self._planner.decide(self._config.mode)
        if self._gatherer.received:
            self.known.set()
        put_off = self._act(decided)
        if self._recorder is not None:
            self._recorder.record(Epoch(seen, self._config.mode, decided.plan, decided.orders, put_off))
        if self._rehearsal is not None:
            self._rehearsal.epoch(seen, [report.profile for report in self._reports()])

    # --- inside ---------------------------------------------------------------------------------------

    def _reports(self) -> list[ReplicaReport]:
        return [self._listing.as_listed(received.report) for received in self._gatherer.received.values()]

    def _observe(self) -> Observation:
        now = self._clock()
        took_s, by_hand = self._dispatch.take_results()
        state = ClusterState((*self._ledger.state(now).replicas, *self._listing.others(self._gatherer.received)))
        return Observation(
            now,
            state,
            self._dispatch.under_way(),
            self._scaler.opening,
            self._scaler.max_replicas,
            by_hand,
            took_s,
        )

    def _act(self, decided: Decided) -> tuple[RequestId, ...]:
        """Begin what was decided; returns the requests whose orders have to wait."""
        urgent = sorted(decided.orders, key=lambda move: URGENCY[move.reason])
        moves, routes = self._route(self._dispatch.admissible(urgent))
        begun = {move.request for move in moves}
        put_off = tuple(move.request for move in decided.orders if move.request not in begun)
        self._planner.put_off(put_off)
        self._dispatch.begin(moves, routes)
        if self._config.mode is Mode.ACT:
            self._scaler.open(len(decided.plan.opened))
            self._scaler.close(decided.plan.closed, self._fence)
            self._scaler.stand_by()
        reports = self._reports()
        self._scaler.close_drained(reports, self._fence)
        emptying = {m.source for m in moves if m.reason in (Reason.DRAIN, Reason.EVACUATE)}
        self._scaler.emptying(emptying)
        leaving = emptying | {move.source for move in self._dispatch.under_way()}
        loads = [report.load for report in reports if report.load.state is ReplicaState.RUNNING]
        self._scaler.look_for_gone({load.id for load in loads if load.requests and load.id not in leaving})
        return put_off
