"""The copies of cached prefixes that one replica makes for others. As a target, `moves` takes them like migrations.

All reasons for a copy come here: orders of other replicas (`fetching`) and of operators through `PeerCalls`, the
replica's own (`returning`, `evacuation`) directly.
"""

import logging
from collections.abc import Awaitable, Callable

from deployments.replica.ingress_channels import Lacks, require_adapter
from deployments.replica.outgoing import Outgoing
from migration.protocol.errors import Refused
from migration.protocol.ports import Peer, PrefixHolds
from migration.protocol.record import CopyCounts, CopyRecord
from migration.run.donor import CopyOrder, DonorRun
from migration.run.world import MigrationWorld
from policies.causes import Cause
from policies.model import ReplicaId
from policies.prefix.copies import CopyReason

log = logging.getLogger("ray.serve")

CopyTo = Callable[[CopyOrder, ReplicaId], Awaitable[CopyRecord]]
"""Copies a prefix to another replica. Raises MigrationError, as `Copies.copy`."""

AT_ONCE = 4
"""The number of copies that a replica makes at a time: each holds blocks, and takes staging slots from migrations."""


class Copies:
    """Makes copies, each under a lease of `lease_s` seconds, and counts them in `made`.

    The scheduler counts those before the replica's end: nobody could read these counts here.
    """

    def __init__(
        self,
        world: MigrationWorld,
        holds: PrefixHolds,
        peer: Callable[[ReplicaId], Peer],
        lacks: Lacks,
        lease_s: float,
        on_record: Callable[[CopyRecord], None] = lambda record: None,
    ) -> None:
        self._world = world
        self._holds = holds
        self._peer = peer
        self._lacks = lacks
        self._lease_s = lease_s
        self._on_record = on_record
        self.outgoing: Outgoing[str, DonorRun] = Outgoing()
        """The copies under way, by the id of their order."""
        self.made = CopyCounts()

    async def copy(self, order: CopyOrder, to: ReplicaId) -> CopyRecord:
        """Copy a prefix to another replica; the record of the copy's end, also of a failure.

        Raises:
            Refused: `to` is this replica, the engine does not have the context's adapter, the copy is under way
                already, or too many are.
        """
        if to == self._world.replica:
            raise Refused("the prefix is on that replica already", Cause.ALREADY_THERE)
        await require_adapter(order.spec, self._lacks)
        if order.id in self.outgoing:
            raise Refused("this copy is under way already", Cause.ALREADY_MOVING)
        if len(self.outgoing) >= AT_ONCE:
            raise Refused(f"{AT_ONCE} copies from this replica are under way", Cause.NO_SLOT)
        run = self.outgoing[order.id] = DonorRun(order, self._peer(to), self._world, self._holds, self._lease_s)
        try:
            record = await run.run()
        finally:
            del self.outgoing[order.id]
        if record.reason is not CopyReason.EVACUATE:
            self.made.add(record)
        self._on_record(record)
        _log_copy(record)
        return record


def _log_copy(record: CopyRecord) -> None:
    log.info(
        f"copy {record.id} {record.outcome}: {record.source} -> {record.target}, {record.blocks} blocks in "
        f"{record.duration_s * 1e3:.1f} ms ({record.reason})" + (f": {record.error}" if record.error else ""),
        extra={"copy": record.to_json()},
    )
