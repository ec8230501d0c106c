"""One pool of the live scheduler: the sources of its observations, and the executors of its plans."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from deployments.metrics.telemetry import Telemetry
from deployments.scheduler.dispatch import Dispatch
from deployments.scheduler.gatherer import Gatherer
from deployments.scheduler.listing import Listing
from deployments.scheduler.memory.room import IdleTimes
from deployments.scheduler.pairs import PairOrders, count_pairs
from deployments.scheduler.scaler import Scaler
from policies.cluster.capacity import dispensable
from policies.cluster.cluster import Cluster
from policies.cost.latencies import ReachedTimes
from policies.decision.observation import Pool, PoolReport
from policies.decision.reports import Roster
from policies.model import PoolId, ReplicaId, ReplicaState, Tokens
from policies.plan import Action, Close, Eviction, Move, Open, Pair, Placement, Plan, Reason, Unpair

Executor = Callable[[Sequence[Any]], None]
"""Carries out all actions of one kind of a plan."""


def _leave(actions: Sequence[Action]) -> None:
    """Implements `Executor` for what needs no order: live requests are in the queues of replicas already."""


@dataclass(frozen=True, slots=True)
class LivePool:
    """The replicas of one deployment. `fence` is the scheduler's, `reached` the times that clients got of them.

    `pairs` are the orders to pairs of replicas; None: no plan has any.
    """

    deployment: PoolId
    fence: int
    listing: Listing
    gatherer: Gatherer
    roster: Roster
    dispatch: Dispatch
    scaler: Scaler
    telemetry: Telemetry
    pairs: PairOrders | None = None
    reached: ReachedTimes = field(default_factory=ReachedTimes)

    async def gather(self) -> None:
        """Gather Serve's list and all reports. Raises `Refused` if a newer scheduler has replaced this one."""
        await self.listing.refresh()
        await self.gatherer.gather(urgent=True)

    def observe(self) -> PoolReport:
        """The changes since the last call."""
        roster, scaler = self.roster, self.scaler
        scaler.follow_sleep()
        pool = Pool(
            self.deployment,
            min_replicas=scaler.min_replicas,
            max_replicas=scaler.max_replicas,
            wanted=scaler.wanted,
            capacity=Tokens(0),
            sleeps=self._sleeps,
        )
        others = self.listing.others(roster.statuses)
        moves, copies = self.dispatch.take_reports(), self.dispatch.take_copies()
        seen = roster.observe(pool, moves, scaler.opening, others, self.listing.leaving(), copies)
        if self.pairs is None:
            return seen
        members = self.pairs.members()
        self.telemetry.pairs(count_pairs(members))
        return replace(seen, members=members)

    @property
    def _sleeps(self) -> bool:
        """True for a pool of which all replicas may sleep."""
        return self.scaler.sleeping is not None and not self.scaler.min_replicas

    def idle(self, cluster: Cluster, now: float) -> IdleTimes:
        """The replicas of the pool that may fall asleep since others need their memory. `cluster` is the pool's."""
        if self.scaler.sleeping is None:
            return {}
        since = {r.id: r.idle_since for r in dispensable(cluster, now, self._sleeps) if r.idle_since is not None}
        return {id: since[id] for id in self.scaler.spare(tuple(since))}

    def states(self) -> Iterable[ReplicaState]:
        """The states of the pool's replicas, as of the last observation."""
        return (status.state for status in self.roster.observed.values())

    def carry_out(self, plan: Plan, scales: bool) -> None:
        """Carry out the plan, each kind of action by its executor. Only a pool that `scales` opens and closes replicas.

        Raises `KeyError` for a kind without an executor.
        """
        scaling: dict[type[Action], Executor] = {Open: self._open, Close: self._close}
        executors: dict[type[Action], Executor] = {
            Move: self.dispatch.begin,
            **(scaling if scales else dict.fromkeys(scaling, _leave)),
            **dict.fromkeys((Placement, Eviction), _leave),
        }
        if self.pairs is not None:
            executors |= {Pair: self.pairs.form, Unpair: self.pairs.undo}
        for kind, actions in groupby(plan.actions, type):
            executors[kind](tuple(actions))
        if scales:
            self.scaler.publish()

    def _open(self, actions: Sequence[Open]) -> None:
        self.scaler.open(len(actions))

    def _close(self, actions: Sequence[Close]) -> None:
        self.scaler.close([action.replica for action in actions], self.fence)

    def watch_closing(self, plans: Collection[Plan], sources: Collection[ReplicaId]) -> None:
        """Have the scaler close drained replicas, and measure the times to free emptied ones.

        `sources` are the sources of the moves under way.
        """
        empty, filled = [], set()
        for replica, status in self.roster.observed.items():
            if replica not in self.roster.statuses:
                continue
            is_empty = self.roster.is_empty(replica)
            if status.state is ReplicaState.DRAINING and is_empty:
                empty.append(replica)
            elif status.state is ReplicaState.RUNNING and not is_empty:
                filled.add(replica)
        self.scaler.close_drained(sorted(empty), self.fence)
        moves = [move for plan in plans for move in plan.moves]
        emptying = {move.source for move in moves if move.reason in (Reason.DRAIN, Reason.EVACUATE)}
        self.scaler.mark_emptying(emptying)
        self.scaler.measure_freed(filled - emptying - set(sources))
