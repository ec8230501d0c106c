"""The division of the nodes' memory between KV pools: what there is to divide, and the orders that follow.

Orders that replicas failed to carry out are repeated here, whoever gave them.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf

from deployments.scheduler.memory.ledgers import BudgetedPool, NodeLedgers
from deployments.scheduler.memory.orders import MemoryOrders
from deployments.scheduler.memory.starting import StartingSeats
from migration.concurrency import Tasks
from migration.memory.tables import PoolState
from migration.protocol.errors import MigrationError
from migration.protocol.ports import Clock
from policies.decision.devices import Division, SeatSize
from policies.decision.observation import Device, DeviceSeat
from policies.memory.ledger import MemoryOrder, Seat
from policies.memory.plan import MemoryPlan
from policies.model import Blocks, Bytes, PoolId, ReplicaId

log = logging.getLogger("ray.serve")

REPEAT_S = 5.0
"""The time between two orders of a resize or a sleep that keeps failing, in seconds."""

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

        A replica that grows gets no more than others have given back; the next division orders the rest. In every
        mode, orders that failed are repeated.
        """
        self._sizes = {size.replica: size for sizes in division.values() for size in sizes}
        self._repeated_at = {r: at for r, at in self._repeated_at.items() if self._ledgers.home(r) is not None}
        orders = [order for sizes in division.values() for order in self._resizes(sizes)] if self._acts() else []
        ordered = {order.replica for order in orders}
        for node in self._ledgers.nodes:
            orders += [
                order
                for seat in self._ledgers.on(node).seats
                if seat.replica not in ordered and (order := self._order_again(seat)) is not None
            ]
        for order in orders:
            self._tasks.start(self._order(order))

    def _resizes(self, sizes: Iterable[SeatSize]) -> Iterator[MemoryOrder]:
        """The orders of the sizes on a node that change."""
        changes = []
        for size in sizes:
            seat = self._ledgers.seat_of(size.replica)
            is_ordered = seat is not None and self._ledgers.is_divided(seat)
            if seat is not None and is_ordered and not self._orders.is_under_way(size.replica):
                changes.append((size.blocks - _ordered(seat), size.replica, size.blocks))
        for _, replica, blocks in sorted(changes):
            if (order := self._ledgers.order_size(replica, blocks)) is not None:
                yield order

    def _order_again(self, seat: Seat) -> MemoryOrder | None:
        """The newest order of a replica that failed to carry it out; None too soon after the last repetition."""
        replica, newest, now = seat.replica, seat.reported, self._clock()
        is_late = now - self._repeated_at.get(replica, -inf) >= REPEAT_S
        if newest is None or not is_late or self._orders.is_under_way(replica) or not self._has_failed(seat):
            return None
        self._repeated_at[replica] = now
        return self._ledgers.order(replica, newest.ordered, newest.by_hand)

    def _has_failed(self, seat: Seat) -> bool:
        """True if a replica does not change its memory, and has another plan than the one that it is ordered to have.

        A replica that could not wake is ordered to sleep instead (`deployments.scheduler.sleepers`).
        """
        found = self._ledgers.find(seat.replica)
        if seat.reported is None or found is None or found.memory.cause is None or found.memory.is_paired:
            return False
        if seat.reported.ordered.is_awake:
            return found.memory.state == PoolState.SETTLED
        return seat.reported.held.is_awake and found.memory.state in (PoolState.SETTLED, PoolState.ASLEEP)

    async def _order(self, order: MemoryOrder) -> None:
        """Send an order. Without an answer, the next division orders again."""
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
