"""The target of a migration behind a Serve handle."""

from deployments.routing import Replicas
from migration.protocol.messages import Adopt, Chunk, Prepare, Prepared
from policies.model import ReplicaId


class ServePeer:
    """Implements `Peer` by targeted calls."""

    def __init__(self, replicas: Replicas, replica: ReplicaId) -> None:
        self._replicas = replicas
        self.id = replica

    async def prepare(self, message: Prepare) -> Prepared:
        """See `Peer.prepare`."""
        prepared: Prepared = await self._replicas.call(self.id, "migration_prepare", message)
        return prepared

    async def receive(self, message: Chunk) -> None:
        """See `Peer.receive`."""
        await self._replicas.call(self.id, "migration_receive", message)

    async def adopt(self, message: Adopt) -> None:
        """See `Peer.adopt`."""
        await self._replicas.call(self.id, "migration_adopt", message)

    async def cancel(self, migration: str) -> None:
        """See `Peer.cancel`."""
        await self._replicas.call(self.id, "migration_cancel", migration)

    async def resumed(self, migration: str) -> float | None:
        """See `Peer.resumed`."""
        seconds: float | None = await self._replicas.call(self.id, "migration_resumed", migration)
        return seconds
