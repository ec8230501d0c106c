"""All parts of the memory of the nodes, for one scheduler. A part calls only those above it:

ledgers     what every replica holds, or may hold soon
starting    replicas that start or wake, and wait for memory
orders      orders of operators and scalers, and the sending of all
division    the sizes of divisions, ordered in every epoch
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from deployments.config import MemorySettings
from deployments.scheduler.memory.dividing import NodeDivision
from deployments.scheduler.memory.ledgers import BudgetedPool, NodeLedgers
from deployments.scheduler.memory.orders import MemoryOrders
from deployments.scheduler.memory.starting import StartingSeats
from deployments.serve.seats import ClaimStore
from migration.protocol.ports import Clock
from policies.model import Bytes, PoolId


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """The memory of the nodes, which the replicas of all pools share."""

    ledgers: NodeLedgers
    starting: StartingSeats
    orders: MemoryOrders
    division: NodeDivision

    @classmethod
    def of(
        cls,
        settings: MemorySettings,
        fence: int,
        pools: Mapping[PoolId, BudgetedPool],
        store: ClaimStore,
        acts: Callable[[], bool],
        clock: Clock,
    ) -> Self | None:
        """The parts, for the scheduler with this `fence`; None without a budget. `acts` is true in the mode `act`."""
        if settings.budget_mib is None:
            return None
        ledgers = NodeLedgers(Bytes(settings.budget_mib << 20), fence, pools, store, clock)
        starting = StartingSeats(ledgers, pools, clock)
        orders = MemoryOrders(ledgers, starting, pools, settings.shrink_s, acts)
        return cls(ledgers, starting, orders, NodeDivision(ledgers, starting, orders, pools, acts, clock))
