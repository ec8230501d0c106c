"""Orders of operators to the engines of all running replicas at once."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from deployments.api.protocols import RemoteReplicas, UtilityApi
from deployments.engine.port import ProfileSession
from deployments.serve.membership import Membership
from migration.concurrency import settle
from policies.model import ReplicaId

Failures = Mapping[ReplicaId, str]
"""The reasons of the replicas that could not carry an order out."""

_RESET_S = 10.0
_START_S = 60.0
_STOP_S = 900.0
"""Longest waits. At the end of a session a profiler writes its files, which may take minutes."""


class EngineOrders:
    """Sends orders to the running replicas. Those that start later do not get them."""

    def __init__(self, replicas: RemoteReplicas[UtilityApi], membership: Membership) -> None:
        self._replicas = replicas
        self._membership = membership

    async def reset_prefix_cache(self) -> Failures:
        """Drop the cached blocks of ended requests."""
        return await self._send(lambda replica: replica.reset_prefix_cache(), _RESET_S)

    async def start_profile(self, session: ProfileSession) -> Failures:
        """Start the profilers."""
        return await self._send(lambda replica: replica.start_profile(session), _START_S)

    async def stop_profile(self) -> Failures:
        """Stop the profilers; returns once their files are written."""
        return await self._send(lambda replica: replica.stop_profile(), _STOP_S)

    async def _send(self, order: Callable[[UtilityApi], Coroutine[Any, Any, str | None]], within_s: float) -> Failures:
        running = self._membership.running
        answers = await settle([order(self._replicas.at(replica)) for replica in running], within_s)
        failures: dict[ReplicaId, str] = {}
        for replica, answer in zip(running, answers, strict=True):
            if isinstance(answer, TimeoutError):
                failures[replica] = f"no answer within {within_s:g} s"
            elif answer is not None:
                failures[replica] = str(answer) or repr(answer)
        return failures
