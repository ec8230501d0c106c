"""The target of a migration behind a Serve handle."""

from deployments.api.protocols import RemoteReplicas, TargetApi
from migration.protocol.messages import Adopt, Chunk, Prepare, Prepared
from policies.model import ReplicaId


class ServePeer:
    """Implements `Peer` by targeted calls."""

    def __init__(self, replicas: RemoteReplicas[TargetApi], replica: ReplicaId) -> None:
        self._target = replicas.at(replica)
        self.id = replica

    async def prepare(self, message: Prepare) -> Prepared:
        """See `Peer.prepare`."""
        return await self._target.migration_prepare(message)

    async def receive(self, message: Chunk) -> None:
        """See `Peer.receive`."""
        await self._target.migration_receive(message)

    async def adopt(self, message: Adopt) -> None:
        """See `Peer.adopt`."""
        await self._target.migration_adopt(message)

    async def cancel(self, migration: str) -> None:
        """See `Peer.cancel`."""
        await self._target.migration_cancel(migration)

    async def resumed(self, migration: str) -> float | None:
        """See `Peer.resumed`."""
        return await self._target.migration_resumed(migration)
