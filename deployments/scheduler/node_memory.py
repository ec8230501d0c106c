"""The memory of the nodes: what replicas hold by their reports, and the orders of operators about their KV pools.

Each node has a ledger (`policies.memory.ledger`), so the replicas on it never hold more than its budget together. A
replica that starts takes its share, the budget divided by the most replicas. The shares of replicas that do not run yet
are kept free.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from deployments.api.calls import MoveAccepted, MoveAnswer, MoveRejected
from deployments.api.protocols import ControlApi, RemoteReplicas
from deployments.api.report import ElasticMemory
from deployments.config import MemorySettings
from migration.protocol.errors import MigrationError, PeerLost
from policies.memory.ledger import DeviceLedger, MemoryOrder, Seat
from policies.memory.plan import MemoryPlan, mib_of
from policies.model import Blocks, Bytes, ReplicaId


@dataclass(frozen=True, slots=True)
class ReportedMemory:
    """A replica's KV pool by its newest report, and its node."""

    node: str
    memory: ElasticMemory


class NodeMemory:
    """The ledgers of all nodes, for one scheduler.

    `reported` gives the pools of all replicas by their newest reports, `serving` all replicas that serve, silent ones
    included, and `most` the maximum number of replicas.
    """

    def __init__(
        self,
        settings: MemorySettings,
        fence: int,
        replicas: RemoteReplicas[ControlApi],
        reported: Callable[[], Mapping[ReplicaId, ReportedMemory]],
        serving: Callable[[], Iterable[ReplicaId]],
        most: int,
    ) -> None:
        self._settings = settings
        self._fence = fence
        self._replicas = replicas
        self._reported = reported
        self._serving = serving
        self._most = most
        self._ledgers: dict[str, DeviceLedger] = {}

    @property
    def is_elastic(self) -> bool:
        """True if KV pools change their sizes."""
        return self._settings.budget_mib is not None

    def to_json(self) -> list[dict[str, Any]]:
        """The member `devices` of `/mell/state`."""
        self._follow()
        return [
            {
                "id": node,
                "budget_mib": self._settings.budget_mib,
                "ordered_mib": mib_of(sum(seat.bound for seat in ledger.seats)),
                "held_mib": mib_of(sum(seat.model.need(seat.reported.held) for seat in ledger.seats if seat.reported)),
            }
            for node, ledger in sorted(self._ledgers.items())
        ]

    async def set_blocks(self, replica: ReplicaId, blocks: int | None) -> MoveAnswer:
        """Order the size of a replica's KV pool; None: that of its start."""
        if not self.is_elastic:
            return MoveRejected(422, "memory.budget_mib is not set: KV pools keep their sizes")
        found = self._reported().get(replica)
        if found is None:
            return MoveRejected(HTTPStatus.SERVICE_UNAVAILABLE, f"replica {replica} has not reported yet; try again")
        self._follow()
        memory, wanted = found.memory, Blocks(found.memory.start if blocks is None else blocks)
        if refusal := self._out_of_bounds(memory, wanted):
            return MoveRejected(422, refusal)
        ledger = self._ledgers[found.node]
        if not ledger.is_known or self._unknown():
            return MoveRejected(503, "a replica has not reported to this scheduler yet; try again")
        ordered = ledger.order(replica, MemoryPlan(wanted))
        if ordered is None:
            return MoveRejected(422, self._over_budget(ledger, ledger.seat(replica), wanted))
        self._ledgers[found.node], order = ordered
        return await self._send(found.node, order)

    async def _send(self, node: str, order: MemoryOrder) -> MoveAnswer:
        try:
            report = await self._replicas.at(order.replica).set_memory(order, self._settings.shrink_s, self._fence)
        except PeerLost as error:
            # The order may have arrived: the ledger counts it until a newer one to the replica is answered.
            return MoveRejected(503, str(error))
        except MigrationError as error:
            return MoveRejected(422, str(error))
        ledger = self._ledgers.get(node)
        if ledger is not None and any(seat.replica == order.replica for seat in ledger.seats):
            self._ledgers[node] = ledger.take(report)
        return MoveAccepted(order.replica)

    def _out_of_bounds(self, memory: ElasticMemory, wanted: Blocks) -> str | None:
        """The reason why the replica cannot have the wanted blocks, whatever others have."""
        if wanted < memory.model.floor:
            least = memory.model.floor
            return f"a pool of {wanted} blocks does not hold a request of max_model_len: write {least} or more"
        if wanted > memory.declared:
            return f"{wanted} blocks are more than the {memory.declared} that the replica can have (memory.declared)"
        return None

    def _over_budget(self, ledger: DeviceLedger, seat: Seat, wanted: Blocks) -> str:
        left = ledger.budget - ledger.bound + seat.bound
        most = max(seat.model.floor, min(seat.declared.blocks or 0, seat.model.blocks_in(left)))
        free = mib_of(max(0, ledger.budget - ledger.bound))
        return f"{wanted} blocks exceed memory.budget_mib: {free} MiB are free, so the replica can have {most} blocks"

    def _unknown(self) -> set[ReplicaId]:
        """The replicas that serve and have never reported to this scheduler: their nodes may be any."""
        return set(self._serving()) - {seat.replica for ledger in self._ledgers.values() for seat in ledger.seats}

    def _follow(self) -> None:
        """Have the ledgers follow the newest reports. The shares of replicas that do not run are not in the budgets.

        A replica that has become silent counts with its last report until Serve no longer lists it.
        """
        assert self._settings.budget_mib is not None
        reported, budget = self._reported(), self._settings.budget_mib << 20
        serving = set(self._serving())
        silent = {seat.replica for each in self._ledgers.values() for seat in each.seats} & serving - reported.keys()
        absent = max(0, self._most - len(reported) - len(silent))
        room = Bytes(budget - absent * (budget // self._most))
        for node in {found.node for found in reported.values()} - self._ledgers.keys():
            self._ledgers[node] = DeviceLedger(room, self._fence)
        for node, ledger in list(self._ledgers.items()):
            here = {replica: found.memory for replica, found in reported.items() if found.node == node}
            followed = _following(replace(ledger, budget=room), here, silent)
            if followed.seats:
                self._ledgers[node] = followed
            else:
                del self._ledgers[node]


def _following(
    ledger: DeviceLedger, reported: Mapping[ReplicaId, ElasticMemory], silent: Collection[ReplicaId]
) -> DeviceLedger:
    """The ledger with these replicas and their reports, and with those of its replicas that are silent."""
    for seat in ledger.seats:
        if seat.replica not in reported and seat.replica not in silent:
            ledger = ledger.without(seat.replica)
    known = {seat.replica for seat in ledger.seats}
    for replica, memory in reported.items():
        if replica not in known:
            ledger = ledger.with_seat(Seat(replica, memory.model, MemoryPlan(memory.declared)))
        ledger = ledger.take(memory.report)
    return ledger
