"""Orders of operators to one replica's engine: its prefix cache and its profiler."""

from dataclasses import replace

from deployments.engine.port import Engine, ProfilerUnavailable, ProfileSession
from migration.protocol.errors import TransferFailed
from policies.model import ReplicaId


class EngineUtilities:
    """Implements `UtilityApi` for the engine of replica `id`."""

    def __init__(self, engine: Engine, id: ReplicaId) -> None:
        self._engine = engine
        self._id = id

    async def reset_prefix_cache(self) -> str | None:
        """See `UtilityApi.reset_prefix_cache`."""
        try:
            await self._engine.reset_prefix_cache()
        except TransferFailed as error:
            return str(error)
        return None

    async def start_profile(self, session: ProfileSession) -> str | None:
        """See `UtilityApi.start_profile`."""
        named = replace(session, prefix="-".join(filter(None, (session.prefix, self._id))))
        try:
            await self._engine.start_profile(named)
        except ProfilerUnavailable as error:
            return str(error)
        return None

    async def stop_profile(self) -> str | None:
        """See `UtilityApi.stop_profile`."""
        try:
            await self._engine.stop_profile()
        except ProfilerUnavailable as error:
            return str(error)
        return None
