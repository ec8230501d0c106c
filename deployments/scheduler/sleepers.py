"""The replicas of one pool that are asleep: the rungs between an opening and a start, and between a closing and a stop.

Serve does not know of sleep, so its number of replicas is that of those awake and of those asleep. Policies know only
of those awake. A replica counts as asleep from the order to sleep on, and as awake from the order to wake on.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from deployments.api.calls import MoveAccepted, MoveAnswer, MoveRejected
from deployments.scheduler.node_memory import NodeMemory
from policies.decision.observation import Status
from policies.memory.ladder import OpeningNeed, Sleep, Wait, Wake, climb, descend
from policies.model import PoolId, ReplicaId, ReplicaState

log = logging.getLogger("ray.serve")

Statuses = Callable[[], Mapping[ReplicaId, Status]]
"""The newest reported statuses of the pool's replicas."""


@dataclass(frozen=True, slots=True)
class SleepChanges:
    """The numbers of wakes that have failed, and of sleepers that have ended, since the reports before."""

    failed: int = 0
    lost: int = 0


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

    def keeps(self, replica: ReplicaId) -> bool:
        """True if a replica that closes sleeps, and does not stop."""
        ...

    def expect_wake(self, replica: ReplicaId) -> None:
        """Count a replica as awake: it is about to be ordered to wake."""
        ...

    async def wake(self, replica: ReplicaId) -> MoveAnswer:
        """Order a replica to wake."""
        ...

    async def sleep(self, replica: ReplicaId) -> MoveAnswer:
        """Order a replica to sleep."""
        ...

    def follow(self) -> "SleepChanges":
        """Follow the newest reports; what they show."""
        ...


class PoolSleepers:
    """Implements `Sleeping`. At most `most` replicas sleep on a node."""

    def __init__(self, pool: PoolId, memory: NodeMemory, statuses: Statuses, most: int) -> None:
        self._pool = pool
        self._memory = memory
        self._statuses = statuses
        self._most = most
        self._to_sleep: set[ReplicaId] = set()
        self._to_wake: set[ReplicaId] = set()
        self._before: frozenset[ReplicaId] = frozenset()

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
        """See `Sleeping.climb`. Without a sleeper there is nothing but a start."""
        if not self.asleep:
            return None
        least = self._memory.least(self.asleep)
        rung = climb(OpeningNeed(self._pool, least, apart=False), self._memory.ladder(self.asleep, self._on_the_way()))
        return rung if isinstance(rung, Wake | Wait) else None

    def keeps(self, replica: ReplicaId) -> bool:
        """See `Sleeping.keeps`."""
        for device in self._memory.ladder(self.asleep, self._on_the_way()):
            for seat in device.seats:
                if seat.replica == replica:
                    can = self._memory.why_sleepless(replica) is None
                    return can and isinstance(descend(seat, device, self._most), Sleep)
        return False

    def expect_wake(self, replica: ReplicaId) -> None:
        """See `Sleeping.expect_wake`."""
        self._to_sleep.discard(replica)
        self._to_wake.add(replica)

    async def wake(self, replica: ReplicaId) -> MoveAnswer:
        """See `Sleeping.wake`."""
        if replica not in self.asleep | self._to_wake:
            return MoveRejected(409, f"replica {replica} is awake")
        if self._on_the_way() - {replica}:
            return MoveRejected(409, "another replica is waking: one wakes at a time; try again")
        self.expect_wake(replica)
        answer = await self._memory.wake(replica)
        if isinstance(answer, MoveAccepted):
            log.info("replica %s wakes", replica)
        else:
            self._to_wake.discard(replica)
        return answer

    async def sleep(self, replica: ReplicaId) -> MoveAnswer:
        """See `Sleeping.sleep`."""
        if replica in self.asleep:
            return MoveRejected(409, f"replica {replica} is asleep")
        self._to_wake.discard(replica)
        self._to_sleep.add(replica)
        answer = await self._memory.sleep(replica)
        if isinstance(answer, MoveAccepted):
            log.info("replica %s falls asleep", replica)
        else:
            self._to_sleep.discard(replica)
        return answer

    def _on_the_way(self) -> set[ReplicaId]:
        """The replicas that wake, or are ordered to."""
        return self._to_wake | {r for r, status in self._statuses().items() if status.state is ReplicaState.WAKING}

    def follow(self) -> SleepChanges:
        """See `Sleeping.follow`. Orders that the reports show are not kept here any longer."""
        statuses, failed = self._statuses(), 0
        for replica in tuple(self._to_sleep):
            if replica not in statuses or statuses[replica].state is ReplicaState.ASLEEP:
                self._to_sleep.discard(replica)
        for replica in tuple(self._to_wake):
            is_gone = replica not in statuses
            if is_gone or statuses[replica].state is not ReplicaState.ASLEEP:
                self._to_wake.discard(replica)
            elif self._memory.why_not_woken(replica) is not None:
                log.warning("replica %s does not wake: %s", replica, self._memory.why_not_woken(replica))
                self._to_wake.discard(replica)
                failed += 1
        lost = len(self._before - statuses.keys())
        self._before = self.asleep
        return SleepChanges(failed, lost)
