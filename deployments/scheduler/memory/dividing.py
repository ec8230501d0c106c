"""The division of the nodes' memory between KV pools: what there is to divide, and the orders that follow."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from math import inf

from deployments.scheduler.memory.ledgers import BudgetedPool, NodeLedgers
from deployments.scheduler.memory.orders import MemoryOrders
from deployments.scheduler.memory.starting import StartingSeats
from migration.concurrency import Tasks
from migration.protocol.errors import MigrationError
from migration.protocol.ports import Clock
from policies.decision.devices import Division, SeatSize
from policies.decision.observation import Device, DeviceSeat
from policies.memory.ledger import MemoryOrder, Seat
from policies.memory.plan import MemoryPlan
from policies.model import Blocks, Bytes, PoolId, ReplicaId

log = logging.getLogger("ray.serve")

REPEAT_S = 5.0
"""The time between two orders of a resize that keeps failing, in seconds."""

_ORDER_S = 5.0
"""The longest wait for the answer to an order, in seconds. The order counts also without."""


class NodeDivision:
    """Orders the sizes of divisions, which `policies.decision` makes. `acts` is true while they are ordered."""

    def __init__(
        self,
        ledgers: NodeLedgers,
        starting: StartingSeats,
        orders: MemoryOrders,
        pools: Mapping[PoolId, BudgetedPool],
        acts: Callable[[], bool],
        clock: Clock,
    ) -> None:
        self._ledgers = ledgers
        self._starting = starting
        self._orders = orders
        self._pools = pools
        self._acts = acts
        self._clock = clock
        self._sizes: dict[ReplicaId, SeatSize] = {}
        self._repeated_at: dict[ReplicaId, float] = {}
        self._tasks = Tasks()

    def devices(self) -> tuple[Device, ...]:
        """The memory of the nodes that a division may give to KV pools; nothing before all replicas have reported."""
        return tuple(map(self._device, self._ledgers.nodes)) if self._ledgers.is_known else ()

    def size_of(self, seat: Seat) -> SeatSize | None:
        """The part of a replica by the newest division; None without one, and for a replica that is not divided."""
        return self._sizes.get(seat.replica) if self._ledgers.is_divided(seat) else None

    def _device(self, node: str) -> Device:
        ledger = self._ledgers.on(node)
        room, seats = ledger.budget - self._starting.reserved(node, ledger), []
        for seat in ledger.seats:
            found, home = self._ledgers.find(seat.replica), self._ledgers.home(seat.replica)
            if found is None or home is None or not self._ledgers.is_divided(seat):
                room -= seat.bound
                continue
            room -= seat.model.need(MemoryPlan(Blocks(0)))
            weight, blocks = self._pools[home.pool].weight, _ordered(seat)
            seats.append(
                DeviceSeat(seat.replica, weight, seat.model, found.block_tokens, found.memory.declared, blocks)
            )
        return Device(node, Bytes(room), tuple(seats))

    def follow(self, division: Division) -> None:
        """Take a division: orders follow while the mode is `act`, shrinks first.

        A replica that grows gets no more than others have given back; the next division orders the rest.
        """
        self._sizes = {size.replica: size for sizes in division.values() for size in sizes}
        self._repeated_at = {r: at for r, at in self._repeated_at.items() if self._ledgers.home(r) is not None}
        if not self._acts():
            return
        for sizes in division.values():
            changes = []
            for size in sizes:
                seat = self._ledgers.seat_of(size.replica)
                is_ordered = seat is not None and self._ledgers.is_divided(seat)
                if seat is not None and is_ordered and not self._orders.is_under_way(size.replica):
                    changes.append((size.blocks - _ordered(seat), size.replica, size))
            for _, _, size in sorted(changes, key=lambda change: change[:2]):
                if (order := self._order_of(size)) is not None:
                    self._tasks.start(self._order(order))

    def _order_of(self, size: SeatSize) -> MemoryOrder | None:
        """The order that a replica's part is. If its size stays, and the last resize has failed: the same one again."""
        replica = size.replica
        if (order := self._ledgers.order_size(replica, size.blocks)) is not None:
            return order
        found, seat = self._ledgers.find(replica), self._ledgers.seat_of(replica)
        has_failed = found is not None and found.memory.cause is not None
        if not has_failed or self._clock() - self._repeated_at.get(replica, -inf) < REPEAT_S:
            return None
        newest = None if seat is None else seat.reported
        assert newest is not None, "a replica that is divided has reported"
        self._repeated_at[replica] = self._clock()
        return self._ledgers.order(replica, newest.ordered)

    async def _order(self, order: MemoryOrder) -> None:
        """Send an order of a division. Without an answer, the next division orders again."""
        try:
            async with asyncio.timeout(_ORDER_S):
                await self._orders.send(order)
        except (MigrationError, TimeoutError) as error:
            log.debug("replica %s has not answered an order of memory: %r", order.replica, error)


def _ordered(seat: Seat) -> Blocks:
    """The blocks that a replica which is awake is ordered to have, by its newest report."""
    blocks = None if seat.reported is None else seat.reported.ordered.blocks
    assert blocks is not None, "a replica that is awake has blocks"
    return blocks
