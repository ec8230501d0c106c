"""The scheduler's loop: gather reports, decide, carry the plans out. `policies.decision` makes all decisions."""

import asyncio
import logging
from collections.abc import Collection

from deployments.api.calls import PlaceCall
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
from policies.decision.deciding import Plans, SchedulerMemory, decide_in_slices, order_by_hand, place
from policies.decision.limits import Mode
from policies.decision.observation import ENGINE, Observation, Pool, PoolReport
from policies.decision.placement import Decision
from policies.decision.reports import Roster
from policies.model import ReplicaId, ReplicaState, Tokens
from policies.plan import Move, Plan, Reason

log = logging.getLogger("ray.serve")

EARLIEST_S = 0.1
"""The shortest time between two epochs, in seconds."""


class Epochs:
    """Runs epochs; between them, and between the slices of one, places arrivals and takes operators' moves."""

    def __init__(
        self,
        config: SchedulerConfig,
        fence: int,
        listing: Listing,
        gatherer: Gatherer,
        roster: Roster,
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
        self._roster = roster
        self._memory = memory
        self._dispatch = dispatch
        self._scaler = scaler
        self._telemetry = telemetry
        self._clock = clock
        self._recorder = recorder
        self._rehearsal = rehearsal
        self._entries: list[PlacedCall | Ordered] = []
        self._slices = 0
        self._soon = asyncio.Event()
        self.last = clock()
        self.known = asyncio.Event()

    def hurry(self) -> None:
        """Run the next epoch as soon as `EARLIEST_S` allows."""
        self._soon.set()

    async def run(self) -> None:
        """Run epochs until a newer scheduler is at work."""
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
        """Run one epoch. Raises `Refused` if a newer scheduler is at work."""
        await self._listing.refresh()
        await self._gatherer.gather(urgent=True)
        now = self._clock()
        passed_s, self.last = now - self.last, now
        seen = self._observe()
        states = (status.state for status in self._roster.observed.values())
        self._telemetry.epoch(states, passed_s, self._scaler.wanted)
        resting = set(self._memory.pool().breaker.resting(now))
        await asyncio.sleep(0)
        plans = await self._decide(Observation(now, (seen,)))
        self._record(Observation(now, (seen,)), plans)
        for pair in set(self._memory.pool().breaker.resting(now)) - resting:
            log.warning("moves from %s to %s keep failing: none for a while", *pair)
        if self._roster.statuses:
            self.known.set()
        for plan in plans[ENGINE]:
            self._act(plan)
        await asyncio.sleep(0)
        self._scale(plans[ENGINE])
        if self._rehearsal is not None:
            self._rehearsal.epoch(seen, now)

    def place(self, call: PlaceCall, gone: Collection[ReplicaId]) -> Decision:
        """Choose a replica for a request, none in `gone`; the request counts there from now on."""
        entry = PlacedCall(self._clock(), call.arrival, (*call.exclude, *gone), call.label, self._slices)
        self._note(entry)
        return place(self._memory.pool(), entry.arrival, entry.at, entry.exclude, entry.label)

    def order(self, move: Move) -> Move:
        """Add path and predictions to an operator's move, which counts as under way from now on."""
        entry = Ordered(self._clock(), move, self._slices)
        self._note(entry)
        return order_by_hand(self._memory.pool(), move, entry.at)

    # --- inside ---------------------------------------------------------------------------------------

    def _observe(self) -> PoolReport:
        roster, scaler = self._roster, self._scaler
        model = next((status.model for status in roster.statuses.values() if status.model), "")
        pool = Pool(ENGINE, model, "serve", Tokens(0), self._config.bounds[0], scaler.max_replicas, scaler.wanted)
        others = self._listing.others(roster.statuses)
        return roster.observe(pool, self._dispatch.take_reports(), scaler.opening, others, self._listing.leaving())

    async def _decide(self, seen: Observation) -> Plans:
        """Decide in slices, with arrivals placed in between: none waits for the whole epoch."""
        slices = decide_in_slices(self._memory, seen)
        try:
            while True:
                try:
                    next(slices)
                except StopIteration as end:
                    plans: Plans = end.value
                    return plans
                self._slices += 1
                await asyncio.sleep(0)
        finally:
            self._slices = 0

    def _act(self, plan: Plan) -> None:
        self._dispatch.begin(plan.moves)
        if self._config.mode is Mode.ACT:
            self._scaler.open(len(plan.opened))
            self._scaler.close(plan.closed, self._fence)
            self._scaler.stand_by()

    def _scale(self, plans: Collection[Plan]) -> None:
        """Have the scaler close drained replicas, and note which replicas are being emptied and which are gone."""
        empty, filled = set(), set()
        for replica, status in self._roster.observed.items():
            if replica not in self._roster.statuses:
                continue
            is_empty = self._roster.is_empty(replica)
            if status.state is ReplicaState.DRAINING and is_empty:
                empty.add(replica)
            elif status.state is ReplicaState.RUNNING and not is_empty:
                filled.add(replica)
        self._scaler.close_drained(sorted(empty), self._fence)
        moves = [move for plan in plans for move in plan.moves]
        emptying = {move.source for move in moves if move.reason in (Reason.DRAIN, Reason.EVACUATE)}
        self._scaler.emptying(emptying)
        leaving = emptying | {underway.move.source for underway in self._memory.pool().under_way.values()}
        self._scaler.look_for_gone(filled - leaving)

    def _note(self, entry: PlacedCall | Ordered) -> None:
        if self._recorder is not None:
            self._entries.append(entry)

    def _record(self, seen: Observation, plans: Plans) -> None:
        if self._recorder is not None:
            entries, self._entries = tuple(self._entries), []
            self._recorder.record(Epoch(entries, seen, dict(plans)))
