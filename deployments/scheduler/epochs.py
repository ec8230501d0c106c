"""The scheduler's loop: gather reports, decide, carry out the plans. `policies.decision` makes all decisions."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from deployments.api.calls import PlaceCall
from deployments.config import SchedulerConfig
from deployments.scheduler.dry_run import DryRun
from deployments.scheduler.memory.nodes import NodeMemory
from deployments.scheduler.memory.room import IdleTimes, replicas_to_sleep
from deployments.scheduler.pairs import ProposedPairs
from deployments.scheduler.pool import LivePool
from deployments.scheduler.recorder import Recorder
from migration.protocol.errors import Refused
from migration.protocol.ports import Clock
from policies.cost.service import ServiceLevel
from policies.decision.breaker import Pair
from policies.decision.deciding import Plans, SchedulerMemory, decide_in_slices, order_by_hand, place
from policies.decision.disaggregation.roles import awaits_prefills, set_role
from policies.decision.level.scaling import scaling_report
from policies.decision.level.service import service_report
from policies.decision.limits import Mode
from policies.decision.observation import Observation
from policies.decision.placement import Decision
from policies.decision.recording import Entry, Epoch, LevelsOrdered, ModeOrdered, Ordered, PlacedCall, RoleOrdered
from policies.model import PoolId, ReplicaId, Role
from policies.plan import Move

log = logging.getLogger("ray.serve")

EARLIEST_S = 0.1
"""The shortest time between two epochs, in seconds."""


class Epochs:
    """Runs epochs of all pools. Between epochs, and between the slices of one, takes arrivals and operators' moves.

    `last` is the beginning of the last epoch by `clock`. `ready` is set after the first epoch with a report, since
    arrivals can be placed from then on. `ordered` gives the mode that epochs are to have; by default that of `memory`
    for good. `nodes` have the memory that the pools share. `dry_runs` are those of the mode `observe`, by pool, and
    `proposed_pairs` what would become of pairs where that is only proposed.

    An epoch that fails may leave anything half done: observations that are taken in part, moves that are planned and
    not ordered. So the epoch after it forgets all locations, and decides on a snapshot of the replicas.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pools: Sequence[LivePool],
        memory: SchedulerMemory,
        clock: Clock,
        recorder: Recorder | None = None,
        ordered: Callable[[], Mode] | None = None,
        nodes: NodeMemory | None = None,
    ) -> None:
        self._config = config
        self._pools = pools
        self._memory = memory
        self._clock = clock
        self._recorder = recorder
        self._ordered = ordered
        self._nodes = nodes
        self._entries: list[Entry] = []
        self._slices = 0
        self._soon = asyncio.Event()
        self._deciding = asyncio.Lock()
        self._is_complete = True
        self.last = clock()
        self.ready = asyncio.Event()
        self._begin_mode()

    @property
    def mode(self) -> Mode:
        """The mode of the epochs."""
        return self._memory.terms.mode

    async def follow_mode(self) -> None:
        """Have the ordered mode from now on. Waits for the end of the epoch under way, so that none acts later."""
        async with self._deciding:
            self._follow_mode()
        self.hurry()

    def hurry(self) -> None:
        """Run the next epoch as soon as `EARLIEST_S` allows."""
        self._soon.set()

    async def run(self) -> None:
        """Run epochs until a newer scheduler has replaced this one."""
        while True:
            self._soon.clear()
            try:
                await self.epoch()
            except Refused as error:
                log.warning("this scheduler has been replaced: %s", error)
                return
            except Exception:
                log.exception("epoch failed; the next one decides on a snapshot of all replicas")
            await asyncio.sleep(EARLIEST_S)
            try:
                async with asyncio.timeout(max(0.0, self._config.epoch_s - EARLIEST_S)):
                    await self._soon.wait()
            except TimeoutError:
                continue

    async def epoch(self) -> None:
        """Run one epoch of all pools, with pauses in which arrivals are placed.

        Raises `Refused` if a newer scheduler has replaced this one.
        """
        async with self._deciding:
            if not self._is_complete:
                self._restart()
            self._is_complete = False
            await self._epoch()
            self._is_complete = True

    async def _epoch(self) -> None:
        await asyncio.gather(*(pool.gather() for pool in self._pools))
        self._follow_mode()
        await asyncio.sleep(0)
        now = self._clock()
        passed_s, self.last = now - self.last, now
        nodes = self._nodes
        devices, waiting = ((), ()) if nodes is None else (nodes.division.devices(), nodes.starting.waiting())
        seen = Observation(now, tuple(pool.observe() for pool in self._pools), devices, waiting)
        await asyncio.sleep(0)
        for pool in self._pools:
            pool.telemetry.epoch(pool.states(), passed_s, pool.scaler.wanted)
        resting = self._resting(now)
        await asyncio.sleep(0)
        plans = await self._decide(seen)
        self._record(seen, plans)
        if nodes is not None:
            nodes.division.follow(self._memory.division.newest)
        for pair in self._resting(now) - resting:
            log.warning("moves from %s to %s keep failing; none will start for a while", *pair)
        self._report(now)
        if any(pool.roster.statuses for pool in self._pools):
            self.ready.set()
        self._add_proposals(seen, plans)
        await self._carry_out(plans)
        self._make_room()
        self._await_prefills()

    def idle(self) -> IdleTimes:
        """The replicas that may fall asleep since others need their memory; none unless the mode is `act`."""
        if self.mode is not Mode.ACT:
            return {}
        pools = ((pool, self._memory.pool(pool.deployment).cluster) for pool in self._pools)
        return {id: since for pool, cluster in pools for id, since in pool.idle(cluster, self.last).items()}

    def place(self, call: PlaceCall, gone: Collection[ReplicaId]) -> Decision:
        """Choose a replica outside of `gone` for a request. The request counts there from now on."""
        excluded, now = (*call.exclude, *gone), self._clock()
        self._note(PlacedCall(now, call.arrival, excluded, call.label, self._slices, call.pool, call.submitted))
        memory = self._memory.pool(call.pool)
        decision = place(memory, call.arrival, now, excluded, call.label, call.submitted)
        self._await_prefills()
        return decision

    def order(self, pool: PoolId, move: Move) -> Move:
        """Add path and predictions to an operator's move. It counts as under way from now on."""
        entry = Ordered(self._clock(), move, self._slices, pool)
        self._note(entry)
        return order_by_hand(self._memory.pool(pool), move, entry.at)

    def set_role(self, pool: PoolId, replica: ReplicaId, role: Role | None) -> None:
        """Give a replica an operator's role, or with None that of the mode again, in the next epoch."""
        self._note(RoleOrdered(self._clock(), replica, role, self._slices, pool))
        set_role(self._memory.pool(pool), replica, role)
        self.hurry()

    async def set_levels(self, pool: PoolId, levels: Mapping[str, ServiceLevel]) -> None:
        """Keep other levels from now on. Waits for the end of the epoch under way, which keeps those of before."""
        async with self._deciding:
            self.begin_levels(pool, levels)
        self.hurry()

    def begin_levels(self, pool: PoolId, levels: Mapping[str, ServiceLevel]) -> None:
        """Keep other levels, between two epochs."""
        log.info("service levels %s", dict(levels))
        self._note(LevelsOrdered(self._clock(), levels, 0, pool))
        self._memory.pool(pool).set_levels(levels)

    # --- inside ---------------------------------------------------------------------------------------

    def _restart(self) -> None:
        """Have the next observation be a snapshot, after an epoch that has not ended."""
        for pool in self._pools:
            pool.roster.restart()
        # A snapshot has what was placed and ordered before; roles, modes and levels are in no report.
        kept = (entry for entry in self._entries if isinstance(entry, RoleOrdered | ModeOrdered | LevelsOrdered))
        self._entries = [replace(entry, slices=0) for entry in kept]

    def _follow_mode(self) -> None:
        mode = self.mode if self._ordered is None else self._ordered()
        if mode is not self.mode:
            log.info("mode %s instead of %s", mode, self.mode)
            self._note(ModeOrdered(self._clock(), mode))
            self._memory.set_mode(mode)
            self._begin_mode()

    def _begin_mode(self) -> None:
        for pool in self._pools:
            pool.scaler.scales = self.mode is Mode.ACT
            pool.telemetry.begin_mode(self.mode)
        observes = self.mode is Mode.OBSERVE
        self.dry_runs = {pool.deployment: DryRun(pool.telemetry) for pool in self._pools if observes}
        pairings = {pool.deployment: self._memory.pool(pool.deployment).terms.pairing_mode for pool in self._pools}
        self.proposed_pairs = {pool: ProposedPairs() for pool, mode in pairings.items() if mode is Mode.OBSERVE}

    def _add_proposals(self, seen: Observation, plans: Plans) -> None:
        """Add the proposals of the mode `observe` to the dry runs, once a replica has reported, and those of pairs."""
        for id, proposed in self.proposed_pairs.items():
            proposed.add_epoch(tuple(pair for plan in plans[id] for pair in plan.proposed_pairs))
        for report in seen.pools if self.dry_runs and self.ready.is_set() else ():
            pool = report.pool.deployment
            (proposal,) = (plan.proposed for plan in plans[pool] if plan.proposed is not None)
            self.dry_runs[pool].add_epoch(report, proposal, self._memory.pool(pool).cluster.up(), seen.now)

    async def _decide(self, seen: Observation) -> Plans:
        """Decide in slices. Arrivals are placed in between, so that none waits for the whole epoch."""
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

    def _await_prefills(self) -> None:
        """Run the next epoch soon while a prefill waits for its move."""
        if any(awaits_prefills(self._memory.pool(pool.deployment)) for pool in self._pools):
            self.hurry()

    async def _carry_out(self, plans: Plans) -> None:
        for pool in self._pools:
            for plan in plans[pool.deployment]:
                pool.carry_out(plan, scales=self.mode is Mode.ACT)
            await asyncio.sleep(0)
            under_way = self._memory.pool(pool.deployment).locations.under_way.values()
            pool.watch_closing(plans[pool.deployment], {underway.move.source for underway in under_way})

    def _make_room(self) -> None:
        """Have idle replicas fall asleep where others wait for memory. What these wait for is decided on soon."""
        if self._nodes is None or not (idle := self.idle()):
            return
        sleeping = replicas_to_sleep(self._nodes, idle, {id for pool in self._pools for id in pool.scaler.closing})
        homes = {replica: self._nodes.ledgers.home(replica) for replica in sleeping}
        for pool in self._pools:
            if mine := [id for id, home in homes.items() if home is not None and home.pool == pool.deployment]:
                log.info("replicas wait for the memory of idle ones: %s", ", ".join(mine))
                pool.scaler.put_to_sleep(mine, pool.fence)
        if sleeping:
            self.hurry()

    def _report(self, now: float) -> None:
        """Set the metrics of the roles, of the service level and of the number of replicas."""
        for pool in self._pools:
            memory = self._memory.pool(pool.deployment)
            pool.telemetry.roles(replica.role for replica in memory.cluster.running())
            if (service := service_report(memory, now, pool.reached.quantiles(now))) is not None:
                pool.telemetry.service(service)
            if memory.scaled is not None:
                pool.telemetry.scaling(scaling_report(memory.cluster, memory.scaled))

    def _resting(self, now: float) -> set[Pair]:
        """The pairs, of all pools, between which the breaker allows no moves."""
        breakers = (self._memory.pool(pool.deployment).learned.breaker for pool in self._pools)
        return {pair for breaker in breakers for pair in breaker.resting(now)}

    def _note(self, entry: Entry) -> None:
        if self._recorder is not None:
            self._entries.append(entry)

    def _record(self, seen: Observation, plans: Plans) -> None:
        if self._recorder is not None:
            entries, self._entries = tuple(self._entries), []
            self._recorder.record(Epoch(entries, seen, dict(plans), self._memory.division.newest))
