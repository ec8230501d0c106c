"""The replicas of one pool that are asleep: the rungs between an opening and a start, and between a closing and a stop.

Serve does not know of sleep, so its number of replicas is that of those awake and of those asleep. Policies know only
of those awake. A replica counts as asleep from the order to sleep on, and as awake from the order to wake on.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from deployments.api.calls import MoveAccepted, MoveAnswer, MoveRejected
from deployments.scheduler.memory.nodes import NodeMemory
from deployments.scheduler.memory.room import IdleTimes, device_states
from migration.concurrency import Tasks
from policies.decision.observation import Status
from policies.memory.ladder import OpeningNeed, Sleep, Wait, Wake, climb, descend
from policies.model import Bytes, PoolId, ReplicaId, ReplicaState

log = logging.getLogger("ray.serve")

Statuses = Callable[[], Mapping[ReplicaId, Status]]
"""The newest reported statuses of the pool's replicas."""


class Sleeping(Protocol):
    """The sleep of a pool's replicas, as its scaler needs it."""

    @property
    def asleep(self) -> frozenset[ReplicaId]:
        """The replicas that are asleep, or ordered to be."""
        ...

    @property
    def waking(self) -> int:
        """The number of replicas that were ordered to wake, and have not reported that they do."""
        ...

    def climb(self) -> Wake | Wait | None:
        """The rung of an opening; None: a start."""
        ...

    def keeps(self, replica: ReplicaId, others: Collection[ReplicaId]) -> bool:
        """True if a replica that closes sleeps, and does not stop, when `others` sleep as well."""
        ...

    def has_ended(self, replica: ReplicaId) -> bool:
        """True if the replica's engine has ended while it was asleep."""
        ...

    def expect_wake(self, replica: ReplicaId) -> None:
        """Count a replica as awake: it is about to be ordered to wake."""
        ...

    async def wake(self, replica: ReplicaId) -> MoveAnswer:
        """Order a sleeping or expected replica to wake. It counts as awake from the call on, unless it is refused."""
        ...

    async def sleep(self, replica: ReplicaId) -> MoveAnswer:
        """Order a replica that is awake to sleep. It counts as asleep from the call on, unless it is refused."""
        ...

    def follow(self) -> int:
        """Follow the newest reports. Returns the number of sleepers that there are less by them, and not by orders.

        A wake that fails is one more. So is a replica that a scheduler before had ordered to sleep, and one that obeys
        an order without an answer; a sleeper that has ended is one less.
        """
        ...


class PoolSleepers:
    """Implements `Sleeping`. At most `most` replicas sleep on a node.

    `idle` gives the replicas of all pools that may fall asleep so that one of these wakes.
    """

    def __init__(
        self,
        pool: PoolId,
        nodes: NodeMemory,
        statuses: Statuses,
        most: int,
        idle: Callable[[], IdleTimes],
    ) -> None:
        self._pool = pool
        self._ledgers = nodes.ledgers
        self._orders = nodes.orders
        self._statuses = statuses
        self._most = most
        self._idle = idle
        self._to_sleep: set[ReplicaId] = set()
        self._to_wake: set[ReplicaId] = set()
        self._giving_up = Tasks()
        self._known: set[ReplicaId] = set()
        """The sleepers as of the newest reports, and of the orders since."""
        self._ended: set[ReplicaId] = set()

    @property
    def asleep(self) -> frozenset[ReplicaId]:
        """See `Sleeping.asleep`."""
        reported = {r for r, status in self._statuses().items() if status.state is ReplicaState.ASLEEP}
        return frozenset((reported | self._to_sleep) - self._to_wake)

    @property
    def waking(self) -> int:
        """See `Sleeping.waking`."""
        return len(self._to_wake)

    def climb(self) -> Wake | Wait | None:
        """See `Sleeping.climb`. Without a sleeper there is nothing but a start.

        A sleeper that needs the memory of idle replicas waits for that.
        """
        asleep, waking = self.asleep, self._on_the_way()
        if not asleep:
            return None
        if waking:
            return Wait()
        found = filter(None, map(self._ledgers.find, asleep))
        least = Bytes(max((each.memory.model.least for each in found), default=0))
        devices = device_states(self._ledgers, asleep, (), self._idle())
        rung = climb(OpeningNeed(self._pool, least, apart=False), devices)
        if isinstance(rung, Wake) and rung.sleeping:
            # They fall asleep at the end of this epoch. The next ones have it wake.
            self._orders.await_wake(rung.replica)
            return Wait()
        return rung if isinstance(rung, Wake | Wait) else None

    def keeps(self, replica: ReplicaId, others: Collection[ReplicaId]) -> bool:
        """See `Sleeping.keeps`."""
        found = self._ledgers.find(replica)
        for device in device_states(self._ledgers, self.asleep | set(others), self._on_the_way(), {}):
            for seat in device.seats:
                if seat.replica == replica:
                    can = found is None or found.memory.sleepless is None
                    return can and isinstance(descend(seat, device, self._most), Sleep)
        return False

    def has_ended(self, replica: ReplicaId) -> bool:
        """See `Sleeping.has_ended`."""
        return replica in self._ended

    def expect_wake(self, replica: ReplicaId) -> None:
        """See `Sleeping.expect_wake`."""
        self._to_sleep.discard(replica)
        self._to_wake.add(replica)
        self._known.discard(replica)

    async def wake(self, replica: ReplicaId) -> MoveAnswer:
        """See `Sleeping.wake`."""
        answer: MoveAnswer
        if self._on_the_way() - {replica}:
            answer = MoveRejected(409, "another replica is waking: one wakes at a time; try again")
        else:
            self.expect_wake(replica)
            answer = await self._orders.wake(replica)
        if isinstance(answer, MoveAccepted):
            log.info("replica %s wakes", replica)
        else:
            self._to_wake.discard(replica)
            self._known.add(replica)
        return answer

    async def sleep(self, replica: ReplicaId) -> MoveAnswer:
        """See `Sleeping.sleep`."""
        self._to_wake.discard(replica)
        self._to_sleep.add(replica)
        self._known.add(replica)
        answer = await self._orders.sleep(replica)
        if isinstance(answer, MoveAccepted):
            log.info("replica %s falls asleep", replica)
        else:
            self._to_sleep.discard(replica)
            self._known.discard(replica)
        return answer

    def _on_the_way(self) -> set[ReplicaId]:
        """The replicas that wake, or are ordered to."""
        return self._to_wake | {r for r, status in self._statuses().items() if status.state is ReplicaState.WAKING}

    def _why_not_woken(self, replica: ReplicaId) -> str | None:
        """The reason why a replica sleeps that was ordered to wake."""
        found = self._ledgers.find(replica)
        return None if found is None or not found.memory.report.ordered.is_awake else found.memory.cause

    def follow(self) -> int:
        """See `Sleeping.follow`. Orders that the reports show are not kept here any longer."""
        statuses = self._statuses()
        for replica in tuple(self._to_sleep):
            if replica not in statuses or statuses[replica].state is ReplicaState.ASLEEP:
                self._to_sleep.discard(replica)
        for replica in tuple(self._to_wake):
            is_gone = replica not in statuses
            if is_gone or statuses[replica].state is not ReplicaState.ASLEEP:
                self._to_wake.discard(replica)
            elif (reason := self._why_not_woken(replica)) is not None:
                log.warning("replica %s does not wake: %s", replica, reason)
                self._to_wake.discard(replica)
                # While it is ordered to be awake, nobody else may have its memory.
                self._giving_up.start(self._give_up(replica))
        before, self._known = self._known, set(self.asleep)
        self._ended = {
            replica
            for replica in self._ended | (before - self._known)
            if replica in statuses and statuses[replica].state is ReplicaState.DRAINING
        }
        return len(before) - len(self._known)

    async def _give_up(self, replica: ReplicaId) -> None:
        """Order a replica that could not wake to sleep."""
        answer = await self._orders.sleep(replica)
        if isinstance(answer, MoveRejected):
            log.warning("replica %s keeps the memory of its wake: %s", replica, answer.message)
