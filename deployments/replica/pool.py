"""The MemPool of one replica, over its engine, its requests and its migrations."""

import asyncio
from collections.abc import Collection, Sequence

from deployments.engine.port import Engine
from deployments.replica.copies import Copies
from deployments.replica.host import RequestHost
from deployments.replica.moves import Moves
from migration.concurrency import gather
from migration.protocol.errors import Refused
from migration.protocol.messages import SlotRef
from migration.protocol.record import CopyRecord, MigrationRecord
from migration.protocol.request import RequestSpec
from migration.run.donor import CopyOrder
from migration.run.source import Order
from policies.causes import Cause
from policies.model import Blocks, ReplicaId, Tokens
from policies.prefix.tree import HeldPrefix


class ReplicaPool:
    """Implements `MemPool`. Allocated memory is under leases of `lease_s` seconds."""

    def __init__(self, engine: Engine, host: RequestHost, moves: Moves, copies: Copies, lease_s: float) -> None:
        self._engine = engine
        self._host = host
        self._moves = moves
        self._copies = copies
        self._lease_s = lease_s
        self._leases: dict[str, asyncio.TimerHandle] = {}

    def alloc_mem(self, name: str, tokens: Tokens) -> None:
        """See `MemPool.alloc_mem`."""
        if name in self._leases:
            raise Refused(f"there is memory of the name {name!r} already", Cause.ALREADY_THERE)
        self._host.require_room(tokens)
        self._host.reserve(_reservation(name), tokens)
        self._leases[name] = asyncio.get_running_loop().call_later(self._lease_s, self.free_mem, name)

    def free_mem(self, name: str) -> None:
        """See `MemPool.free_mem`."""
        if (lease := self._leases.pop(name, None)) is not None:
            lease.cancel()
            self._host.release(_reservation(name))

    async def insert(
        self,
        name: str,
        spec: RequestSpec,
        outputs: tuple[int, ...],
        first: Blocks,
        staged: Sequence[SlotRef],
        count: Blocks,
    ) -> None:
        """See `MemPool.insert`."""
        last = Blocks(first + count)
        # The load comes first, since blocks are put into a load that has begun.
        await gather([self._engine.load(name, spec, outputs, first, last), self._engine.put(name, first, last, staged)])

    def match(self, spec: RequestSpec, outputs: tuple[int, ...] = ()) -> HeldPrefix:
        """See `MemPool.match`."""
        return self._engine.present(spec, outputs)

    async def delete(self, names: Collection[int] | None) -> Blocks:
        """See `MemPool.delete`."""
        return await self._engine.delete(names)

    def transfer(self, order: Order, to: ReplicaId) -> MigrationRecord:
        """See `MemPool.transfer`."""
        return self._moves.start(order, to)

    async def transfer_with_insert(self, order: CopyOrder, to: ReplicaId) -> CopyRecord:
        """See `MemPool.transfer_with_insert`."""
        return await self._copies.copy(order, to)


def _reservation(name: str) -> str:
    """The name of a reservation at the host, apart from those of migrations."""
    return f"pool-{name}"
