"""The scheduler's loop: look, decide, act. Everything that it decides is `policies.decision.planner`'s."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping

from deployments.cluster import Cluster
from deployments.config import SchedulerConfig
from deployments.dispatch import Dispatch, Route
from deployments.recording import Epoch, Recorder
from deployments.rehearsal import Rehearsal
from deployments.report import ReplicaReport
from deployments.scaler import Scaler
from deployments.telemetry import Telemetry
from migration.errors import Refused
from migration.paths import URGENCY
from migration.record import MigrationRecord
from policies.decision.ledger import Ledger
from policies.decision.observation import Observation
from policies.decision.planner import Decided, Mode, Planner
from policies.model import ClusterState, ReplicaId, ReplicaState, RequestId
from policies.plan import Move, Reason

log = logging.getLogger("ray.serve")

EARLIEST_S = 0.1
"""The shortest time between two epochs, when one is asked for early."""

Routing = Callable[[list[Move]], tuple[list[Move], Mapping[RequestId, Route]]]
"""Gives moves their paths; those that have to wait for the next epoch are not returned."""


class Epochs:
    """Runs epochs. `reports` holds what replicas said last, `as_of` when that was (seconds since the epoch)."""

    def __init__(
        self,
        config: SchedulerConfig,
        fence: int,
        cluster: Cluster,
        ledger: Ledger,
        planner: Planner,
        dispatch: Dispatch,
        scaler: Scaler,
        telemetry: Telemetry,
        heard: Callable[[MigrationRecord], None],
        profile: Callable[[Collection[ReplicaReport]], None],
        route: Routing,
        recorder: Recorder | None = None,
        rehearsal: Rehearsal | None = None,
    ) -> None:
        self._config = config
        self._fence = fence
        self._cluster = cluster
        self._ledger = ledger
        self._planner = planner
        self._dispatch = dispatch
        self._scaler = scaler
        self._telemetry = telemetry
        self._heard = heard
        self._profile = profile
        self._route = route
        self._recorder = recorder
        self._rehearsal = rehearsal
        self._soon = asyncio.Event()
        self.reports: dict[ReplicaId, ReplicaReport] = {}
        self.as_of = 0.0
        self.last = time.monotonic()
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
        await self._cluster.refresh()
        await self.gather()
        passed_s = time.monotonic() - self.last
        self.last = time.monotonic()
        seen = self._observe()
        self._telemetry.epoch(seen.state.replicas, passed_s, self._scaler.wanted)
        self._planner.observe(seen)
        decided = self._planner.decide(self._config.mode)
        if self.reports:
            self.known.set()
        put_off = self._act(decided)
        if self._recorder is not None:
            self._recorder.record(Epoch(seen, self._config.mode, decided.plan, decided.orders, put_off))
        if self._rehearsal is not None:
            self._rehearsal.epoch(seen, [report.profile for report in self.reports.values()])

    async def gather(self, timeout_s: float | None = None) -> None:
        """Take the replicas' reports, without deciding anything. Raises Refused when a newer scheduler is at work."""
        self.reports = await self._cluster.gather(self._fence, timeout_s)
        self.as_of = time.time()
        self._ledger.report([report.load for report in self.reports.values()], time.monotonic())
        self._profile(self.reports.values())
        for report in self.reports.values():
            for record in report.records:
                self._heard(record)

    # --- inside ---------------------------------------------------------------------------------------

    def _observe(self) -> Observation:
        now = time.monotonic()
        took_s, by_hand = self._dispatch.take_results()
        state = ClusterState((*self._ledger.state(now).replicas, *self._cluster.others()))
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
        self._scaler.close_drained(self.reports.values(), self._fence)
        emptying = {m.source for m in moves if m.reason in (Reason.DRAIN, Reason.EVACUATE)}
        self._scaler.emptying(emptying)
        leaving = emptying | {move.source for move in self._dispatch.under_way()}
        loads = [report.load for report in self.reports.values() if report.load.state is ReplicaState.RUNNING]
        self._scaler.look_for_gone({load.id for load in loads if load.requests and load.id not in leaving})
        return put_off
