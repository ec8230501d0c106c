"""The orders of operators about pairs of replicas: refused with a reason here, or carried out by the replicas."""

from collections.abc import Awaitable, Callable, Mapping
from itertools import count

from deployments.api.calls import MoveAccepted, MoveAnswer, MoveRejected, PairOrder
from deployments.api.protocols import ControlApi, RemoteReplicas
from deployments.api.report import PairReport
from deployments.config import MemorySettings
from deployments.scheduler.memory.ledgers import ReportedMemory
from migration.memory.pair_tables import TOGETHER
from migration.protocol.errors import MigrationError, PeerLost
from policies.model import ReplicaId, ReplicaState

_EPOCHS = 1 << 20
"""More pairs than a scheduler orders: their epochs are those of its fence."""


ControlOrder = Callable[[ControlApi], Awaitable[None]]


class PairOrders:
    """Orders pairs of replicas of one pool, for the scheduler with this `fence`.

    `reported` gives the memory of all replicas by their newest reports, `states` the states of those that run.
    """

    def __init__(
        self,
        settings: MemorySettings,
        fence: int,
        replicas: RemoteReplicas[ControlApi],
        reported: Callable[[], Mapping[ReplicaId, ReportedMemory]],
        states: Callable[[], Mapping[ReplicaId, ReplicaState]],
    ) -> None:
        self._settings = settings
        self._fence = fence
        self._replicas = replicas
        self._reported = reported
        self._states = states
        self._numbers = count()

    async def pair(self, lower: ReplicaId, upper: ReplicaId) -> MoveAnswer:
        """Have two replicas that run form a pair. The order may come again."""
        reported = self._reported()
        if self._settings.budget_mib is None:
            return MoveRejected(422, "memory.budget_mib is not set: replicas are not paired")
        if lower == upper:
            return MoveRejected(422, "a pair has two replicas")
        if missing := [replica for replica in (lower, upper) if replica not in reported]:
            return MoveRejected(503, f"replica {missing[0]} has not reported yet; try again")
        if are_together(_pair(reported, lower), upper) and are_together(_pair(reported, upper), lower):
            return MoveAccepted(lower)
        if refusal := self._refusal(reported, lower, upper):
            return refusal
        order = PairOrder(self._fence * _EPOCHS + next(self._numbers), upper, self._settings.shrink_s)
        return await self._ordered(lower, lambda control: control.pair(order, self._fence))

    async def unpair(self, replica: ReplicaId) -> MoveAnswer:
        """Have the pair of a replica undone."""
        return await self._ordered(replica, lambda control: control.unpair(self._fence))

    def _refusal(
        self, reported: Mapping[ReplicaId, ReportedMemory], lower: ReplicaId, upper: ReplicaId
    ) -> MoveRejected | None:
        states = self._states()
        if reported[lower].node != reported[upper].node:
            return MoveRejected(422, "replicas on two nodes are not paired")
        for replica in (lower, upper):
            memory = reported[replica].memory
            if states.get(replica) is not ReplicaState.RUNNING:
                return MoveRejected(409, f"replica {replica} is {states.get(replica)}: only running ones are paired")
            if memory.pair is not None and memory.is_paired:
                return MoveRejected(409, f"replica {replica} is in a pair with replica {memory.pair.buddy}")
            if memory.unpairable is not None:
                return MoveRejected(422, f"replica {replica} cannot be paired: {memory.unpairable}")
        return None

    async def _ordered(self, replica: ReplicaId, order: ControlOrder) -> MoveAnswer:
        try:
            await order(self._replicas.at(replica))
        except PeerLost as error:
            return MoveRejected(503, str(error))
        except MigrationError as error:
            return MoveRejected(409, str(error))
        return MoveAccepted(replica)


def are_together(pair: PairReport | None, other: ReplicaId) -> bool:
    """True if a replica is in a pair with the other one, or on its way there."""
    return pair is not None and pair.buddy == other and pair.state in TOGETHER


def _pair(reported: Mapping[ReplicaId, ReportedMemory], replica: ReplicaId) -> PairReport | None:
    return reported[replica].memory.pair
